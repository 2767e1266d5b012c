"""`wlb-titan dryrun`: a whole step of a big job on this machine, without its GPUs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from wlb_titan.commands import command_line as cli
from wlb_titan.commands.lone_ranks import (
    DEFAULT_RANKS,
    DEFAULT_STEP,
    lone_job,
    of_ranks,
    print_rank,
    rank_numbers,
    run_ranks,
)
from wlb_titan.files import checked
from wlb_titan.memory.fits import usable_share
from wlb_titan.memory.rank import GIB
from wlb_titan.plan import MicroBatch
from wlb_titan.progress import counted
from wlb_titan.runtime.one_rank import at_once
from wlb_titan.simulator.calls import RankCalls, alike, calls_of_all, unmet

PLANNED = 24
"""As many steps as `auto` plans; the fullest is run. Queues of balancing policies fill in 8."""
LARGEST = 8  # groups of tensors that are named


@click.command(cls=cli.OfFile)
@of_ranks
@click.option(
    "--device-gib",
    type=cli.Size(),
    metavar="GIB",
    help="Memory of a GPU: bounds micro-batches as the job would, and checks that the ranks fit; "
    "if not, the exit status is 1.",
)
def dryrun(
    file: Path,
    overrides: tuple[str, ...],
    ranks: str,
    world_size: int | None,
    step: int | None,
    device_gib: float | None,
    output: Path | None,
) -> None:
    """Run one step of FILE's job on this machine, without its GPUs, before you queue for a cluster.

    Builds and parallelises each rank of --rank as the job does, with tensors that have shapes but no memory
    and a fake process group, and runs a whole planned step: forward, backward, clipping, optimizer. Reports
    its parameters, its collectives, its peak memory, traced and predicted, and any error as the job would
    meet it. With --rank all, ranks that do the same run once, and the command checks that the collectives,
    sends and receives of all ranks match.

    By default runs the step with the longest micro-batch among the first 24, on the first and the last rank
    of its pipeline. If the corpus is not on this machine, documents have synthetic lengths.

    Takes some seconds to a minute per rank, and about 1 GiB of memory. Nothing is trained, loaded or saved.
    """
    memory = None if device_gib is None else device_gib * GIB
    with tempfile.TemporaryDirectory(prefix="wlb-dryrun-") as folder:
        lone = lone_job(file, overrides, world_size, Path(folder), steps=step or PLANNED, memory=memory)
        job, chosen = lone.job, ""
        numbers = rank_numbers(ranks, job.degrees.ranks, job.degrees.pipeline)
        if step is None:
            step, longest = _fullest(lone)
            chosen = f" It has the longest micro-batch of the first steps, {longest.length:,} tokens."
            if ranks == DEFAULT_RANKS:
                numbers = job.degrees.ends_of(longest.dp_rank)
        slices = job.packing.owner.slices
        bound = "" if slices else f", micro-batches of at most {job.longest_micro_batch:,} tokens"
        cli.say(f"Step {step} of {file} under {job.policy}{bound}.{chosen}")
        same = {}
        if ranks == "all":
            same = alike(job, lone.plans(1, step - 1)[0])
            numbers = sorted(set(same.values()))
        device_bytes = job.cluster.memory if job.cluster.kind == "gpu" else None
        results = run_ranks(lone, "dryrun", numbers, at_once(), step=step, device_bytes=device_bytes)
    calls = {r["rank"]: checked(RankCalls, r.pop("calls")) for r in results if "calls" in r}
    if output is not None:
        cli.write_json(output, results)
    for result in results:
        print_rank(result, job.degrees.ranks, _parameters)
        if not same and "error" not in result:
            _print_memory_and_collectives(result)
    failed = any("error" in result for result in results)
    if same and not failed:
        failed = not _meet(calls_of_all(calls, same, job.degrees.grid))
    if device_gib is not None:
        failed |= not _fits(results, device_gib, usable_share(slices))
    if failed:
        sys.exit(1)


def _meet(calls: Mapping[int, RankCalls]) -> bool:
    """Whether the calls of all ranks meet; says so, or what does not."""
    if problem := unmet(calls, queue_per_edge=True):
        cli.say(f"\nThe job would hang or fail: {problem}")
        return False
    number = sum(len(of_rank.calls) for of_rank in calls.values())
    cli.say(f"\nAll {number:,} calls of {len(calls)} ranks meet, in the order that NCCL keeps.")
    return True


def _fullest(lone: cli.Asked) -> tuple[int, MicroBatch]:
    """The step, from 1, that has the longest micro-batch of the first steps, and that micro-batch."""
    steps = DEFAULT_STEP if lone.job.packing.planning_seconds else PLANNED  # where a step takes seconds
    planner = lone.job.planner(lone.documents)
    with cli.progress() as report:
        numbers = counted(range(steps), report, f"Planning {lone.job.policy}")
        plans = [planner.next(sharded=()) for _ in numbers]
    micro_batches = ((step, m) for step, plan in enumerate(plans, start=1) for m in plan.micro_batches)
    return max(micro_batches, key=lambda numbered: numbered[1].length)


def _fits(results: list[dict[str, Any]], device_gib: float, usable: float) -> bool:
    """Whether the ranks that came through fit; says so."""
    fullest = max((result["traced_gib"] for result in results if "error" not in result), default=None)
    if fullest is None:
        return True
    share = fullest / device_gib
    verdict = "fits" if share <= usable else "leaves too little room" if share <= 1 else "does not fit"
    cli.say(
        f"\nThe fullest of these ranks needs {fullest:.2f} of {device_gib:g} GiB, {share:.0%}: it "
        f"{verdict} (up to {usable:.0%} leaves room for fragmentation, CUDA and NCCL)."
    )
    return verdict == "fits"


def _parameters(result: dict[str, Any]) -> str:
    lengths = ", ".join(f"{length:,}" for length in result["lengths"])
    return (
        f": {result['parameters']:,} parameters in its stages, {result['local_parameters']:,} on its GPU. "
        f"Micro-batches of {lengths} tokens, {result['traced_gib']:.2f} GiB at the traced peak."
    )


def _print_memory_and_collectives(result: dict[str, Any]) -> None:
    cli.show_table(memory_rows(result))
    cli.say("The largest tensors at the traced peak:")
    for row in result["largest"][:LARGEST]:
        cli.say(f"  {row['gib']:8.3f} GiB  {row['tensors']:4} x {row['what']}")
    if result["collectives"]:
        cli.show_table(collective_rows(result["collectives"]))


def memory_rows(result: dict[str, Any]) -> cli.Rows:
    """GiB at the peak by term, predicted and traced, with their sums last. The trace does not tell the loss
    from the passes around it."""
    predicted, traced = result["predicted"], result["traced"]
    terms = sorted({*predicted, *traced}, key=lambda term: -traced.get(term, 0.0))
    figures = [(term, predicted.get(term), traced.get(term), "") for term in terms]
    total, peak = result["predicted_gib"], result["traced_gib"]
    figures.append(("total", total, peak, f"{total / peak - 1:+.1%}" if total and peak else ""))
    return [
        {"memory": term, "predicted GiB": _gib(model), "traced GiB": _gib(trace), "difference": difference}
        for term, model, trace, difference in figures
    ]


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def collective_rows(entries: list[dict[str, Any]]) -> cli.Rows:
    """Collectives by kind and axis, with predicted GiB where a dimension of the user's own gives them."""
    predicted = any("predicted_gib" in entry for entry in entries)
    return [
        {
            "collective": entry["kind"],
            "over": entry["over"],
            "number": f"{entry['number']:,}",
            "GiB": _gib(entry["gib"]),
            **({"predicted GiB": _gib(entry.get("predicted_gib"))} if predicted else {}),
        }
        for entry in entries
    ]
