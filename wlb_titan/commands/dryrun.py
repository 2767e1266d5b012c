"""`wlb-titan dryrun`: a whole step of a big job on this machine, without its GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands import lone_ranks as lone
from wlb_titan.commands.command_line import (
    OVERRIDABLE,
    POSITIVE,
    SIZE,
    Rows,
    load,
    make_console,
    show_table,
    write_json,
)
from wlb_titan.commands.lone_ranks import alike, calls_of_all
from wlb_titan.cost.cluster import UNKNOWN, cluster_of_device
from wlb_titan.job import Job, policy_parts
from wlb_titan.memory.fits import usable_share
from wlb_titan.memory.rank import GIB
from wlb_titan.simulator.calls import RankCalls, unmet

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.plan import MicroBatch

PLANNED = 24
"""As many steps as `auto` plans; the fullest is run. Queues of balancing policies fill in 8."""
LARGEST = 8  # groups of tensors that are named


@click.command(context_settings=OVERRIDABLE)
@lone.of_ranks
@click.option(
    "--policy",
    metavar="PACKING[:SHARDING[:ORDER]]",
    help="Policies instead of the file's, such as wlb_lazy:hybrid:best.",
)
@click.option(
    "--step",
    type=POSITIVE,
    metavar="N",
    help=f"Step of the plan to run.  [default: of the first {PLANNED} the one with the longest micro-batch, "
    "on the first and last rank of its pipeline]",
)
@click.option(
    "--device-gib",
    type=SIZE,
    metavar="GIB",
    help="Memory of a GPU: bounds the length of micro-batches as the job would, and says whether it fits.",
)
def dryrun(
    file: Path,
    overrides: tuple[str, ...],
    ranks: str,
    policy: str | None,
    world_size: int | None,
    step: int | None,
    device_gib: float | None,
    output: Path | None,
) -> None:
    """Run one step of FILE's job on this machine, without its GPUs: run it before you queue for a cluster.

    Each rank that is asked for is built and parallelised as the job builds it, on tensors that have shapes
    but no memory and in a process group that has no other processes, and runs a whole planned step: forward,
    backward, clipping, optimizer. Reported are its parameters, its collectives, the traced peak of its
    memory beside the predicted one, and any error as the job would meet it. With --rank all ranks that do the
    same run once, and the collectives, sends and receives of all ranks are held against each other.

    Takes some seconds to a minute a rank, and about 1 GiB of memory. Nothing is trained, loaded or saved. If
    the corpus is not on this machine, documents of synthetic lengths take its place.
    """
    words = [*overrides, *lone.policy_words(policy_parts(policy) if policy else [])]
    resolved = load(file, words, world_size)
    config = resolved.config
    # torchtitan takes seconds to import, so the file is checked first.
    from wlb_titan.runtime.job import gpu_at_hand

    asked = lone.trained_job(config, world_size, None if device_gib is None else device_gib * GIB)
    world_size = asked.degrees.ranks
    numbers = lone.rank_numbers(ranks, world_size, asked.degrees.pipeline)
    chosen = ""
    if not config.wlb.cluster:  # the ranks' processes do not see the device
        gpu = gpu_at_hand(config.wlb.device)
        words += ["--wlb.cluster", (cluster_of_device(gpu[0]) or UNKNOWN) if gpu else "cpu"]
    with tempfile.TemporaryDirectory(prefix="wlb-dryrun-") as folder:
        words += ["--dump_folder", folder]
        words += lone.corpus_words(resolved, asked.micro_batches, step or PLANNED, Path(folder))
        job, documents = lone.decided_job(file, words, world_size, asked.cluster.memory)
        if asked.undecided:
            words += lone.policy_words(job.policy)
        slices = job.packing.owner.slices
        if step is None:
            step, longest = _fullest(job, documents)
            chosen = f" It has the longest micro-batch of the first steps, {longest.length:,} tokens."
            if ranks == lone.DEFAULT_RANKS:
                numbers = job.degrees.ends_of(longest.dp_rank)
        bound = "" if slices else f", micro-batches of at most {job.longest_micro_batch:,} tokens"
        click.echo(f"Step {step} of {file} under {job.policy}{bound}.{chosen}")
        same = {}
        if ranks == "all":
            same = alike(job.trained, job.trained.plans(documents, 1, after=step - 1)[0])
            numbers = sorted(set(same.values()))
        # No accelerator is used: tensors have no memory, and the trace is of the CPU.
        command = lone.RankCommand(
            "dryrun",
            {"world_size": world_size, "step": step, "device_bytes": job.cluster.memory},
            file,
            words,
            {"CUDA_VISIBLE_DEVICES": ""},
        )
        results = command.run(numbers, Path(folder), os.cpu_count() or 1)
    calls = {
        result["rank"]: RankCalls.from_json(result.pop("calls")) for result in results if "calls" in result
    }
    if output is not None:
        write_json(output, results)
    for result in results:
        if not same or "error" in result:
            print_rank(result, world_size)
    problem = None
    if same and len(calls) == len(results):
        show_table(rank_rows(results, calls, same))
        all_calls = calls_of_all(calls, same, job.degrees)
        problem = unmet(all_calls, queue_per_edge=True)
        number = sum(len(one.calls) for one in all_calls.values())
        meet = f"All {number:,} calls of {len(all_calls)} ranks meet, in the order that NCCL keeps."
        click.echo(f"\nThe job would hang or fail: {problem}" if problem else f"\n{meet}")
    if device_gib is not None:
        _say_whether_it_fits(results, device_gib, usable_share(slices))
    if problem or any("error" in result for result in results):
        sys.exit(1)


def _fullest(job: Job, documents: Documents) -> tuple[int, MicroBatch]:
    """The step, from 1, that has the longest micro-batch of the first steps, and that micro-batch."""
    planner = job.planner(documents)
    steps = lone.DEFAULT_STEP if job.packing.planning_seconds else PLANNED  # where a step takes seconds
    plans = [planner.next(sharded=()) for _ in range(steps)]
    micro_batches = ((step, m) for step, plan in enumerate(plans, start=1) for m in plan.micro_batches)
    return max(micro_batches, key=lambda found: found[1].length)


def _say_whether_it_fits(results: list[dict[str, Any]], device_gib: float, usable: float) -> None:
    traced = [result["traced_gib"] for result in results if "error" not in result]
    if traced:
        share = max(traced) / device_gib
        verdict = "fits" if share <= usable else "leaves too little room" if share <= 1 else "does not fit"
        click.echo(
            f"\nThe fullest of these ranks needs {max(traced):.2f} of {device_gib:g} GiB, {share:.0%}: it "
            f"{verdict} (up to {usable:.0%} leaves room for fragmentation, CUDA and NCCL)."
        )


def print_rank(result: dict[str, Any], world_size: int) -> None:
    """Prints what `wlb_titan.runtime.one_rank.dry_run` yields for a rank, or its `rank` and `error`."""
    console = make_console()
    console.print(f"\nRank {result['rank']} of {world_size}", style="bold", end="")
    if "error" in result:
        console.print(
            f" fails:\n{result.get('traceback', '')}{result['error']}", markup=False, soft_wrap=True
        )
        return
    console.print(
        f" ({lone.place(result)}): {result['parameters']:,} parameters in its stages, "
        f"{result['local_parameters']:,} on its GPU. Micro-batches of "
        f"{', '.join(f'{length:,}' for length in result['lengths'])} tokens.",
        markup=False,
        soft_wrap=True,
    )
    show_table(memory_rows(result))
    console.print("At the traced peak:")
    for entry in result["largest"][:LARGEST]:
        console.print(f"  {entry['gib']:8.3f} GiB  {entry['tensors']:4} x {entry['what']}", markup=False)
    if result["collectives"]:
        show_table(collective_rows(result["collectives"]))


def rank_rows(
    results: Sequence[dict[str, Any]], calls: Mapping[int, RankCalls], same: Mapping[int, int]
) -> Rows:
    """A row for each rank that was run; `same` maps each rank of the job to the one run for it."""
    alike_ranks = list(same.values())
    return [
        {
            "rank": str(result["rank"]),
            "place": lone.place(result),
            "ranks that do the same": str(alike_ranks.count(result["rank"])),
            "micro-batches": f"{len(result['lengths'])}, up to {max(result['lengths']):,} tokens",
            "traced GiB": f"{result['traced_gib']:.2f}",
            "calls": f"{len(calls[result['rank']].calls):,}",
        }
        for result in results
    ]


def memory_rows(result: dict[str, Any]) -> Rows:
    """GiB at the peak by term, predicted and traced, with their sums last. The trace does not tell the loss
    from the passes around it."""
    predicted, traced = dict(result["predicted"]), dict(result["traced"])
    terms = sorted({*predicted, *traced}, key=lambda term: -traced.get(term, 0.0))
    predicted["total"], traced["total"] = mine, found = result["predicted_gib"], result["traced_gib"]
    rows = [
        {
            "memory": term,
            "predicted GiB": _gib(predicted.get(term)),
            "traced GiB": _gib(traced.get(term)),
            "difference": "",
        }
        for term in [*terms, "total"]
    ]
    rows[-1]["difference"] = f"{mine / found - 1:+.1%}" if mine and found else ""
    return rows


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def collective_rows(entries: list[dict[str, Any]]) -> Rows:
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
