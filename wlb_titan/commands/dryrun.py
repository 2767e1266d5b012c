"""`wlb-titan dryrun`: a whole step of a big job on this machine, without its GPUs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands import lone_ranks as lone
from wlb_titan.commands.all_ranks import alike, calls_of_all
from wlb_titan.commands.options import OVERRIDABLE, check_outputs, json_option, of_file
from wlb_titan.commands.report.dryrun import print_rank, print_ranks
from wlb_titan.cost.cluster import UNKNOWN, cluster_of_device
from wlb_titan.memory.fits import usable_share
from wlb_titan.memory.rank import GIB
from wlb_titan.simulator.calls import RankCalls, unmet

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.job import Job, policy_parts
    from wlb_titan.plan import MicroBatch

PLANNED = 24
"""Steps of which the fullest is run, as many as `auto` plans; queues of balancing policies fill in 8."""


@click.command(context_settings=OVERRIDABLE)
@of_file
@lone.rank_option
@click.option(
    "--policy",
    metavar="PACKING[:SHARDING[:ORDER]]",
    help="Policies instead of the file's, such as wlb_lazy:hybrid:best.",
)
@lone.world_size_option
@click.option(
    "--step",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Step of the plan to run.  [default: of the first {PLANNED} the one with the longest micro-batch, "
    "on the first and last rank of its pipeline]",
)
@click.option(
    "--device-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory of a GPU: bounds the length of micro-batches as the job would, and says whether it fits.",
)
@json_option
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
    from wlb_titan.runtime.models.load import load_config

    check_outputs(output=output)
    words = [*overrides, *lone.policy_words(policy_parts(policy) if policy else [])]
    resolved = load_config(file, words, world_size)
    config = resolved.config
    # torchtitan takes seconds to import, so that is left until the file has been found good.
    from wlb_titan.runtime.job import gpu_at_hand

    memory = None if device_gib is None else device_gib * GIB
    asked = lone.configured_job(config, world_size, memory)
    world_size = asked.degrees.ranks
    numbers = lone.rank_numbers(ranks, world_size, asked.degrees.pipeline)
    chosen = ""
    if not config.wlb.cluster:  # the ranks' processes do not see the device
        gpu = gpu_at_hand(config.wlb.device)
        words += ["--wlb.cluster", (cluster_of_device(gpu[0]) or UNKNOWN) if gpu else "cpu"]
    with tempfile.TemporaryDirectory(prefix="wlb-dryrun-") as folder:
        words += [
            "--dump_folder",
            folder,
            *lone.corpus_words(resolved, asked.micro_batches, step or PLANNED, Path(folder)),
        ]
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
        # An accelerator that is there is not used: tensors have no memory, and the trace is of the CPU.
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
        lone.write_json(output, results)
    for result in results:
        if not same or "error" in result:
            print_rank(result, world_size)
    problem = None
    if same and len(calls) == len(results):
        print_ranks(results, calls, same)
        problem = _say_whether_calls_meet(calls_of_all(calls, same, job.degrees))
    if device_gib is not None:
        _say_whether_it_fits(results, device_gib, usable_share(slices))
    if problem or any("error" in result for result in results):
        sys.exit(1)


def _fullest(job: Job, documents: Documents) -> tuple[int, MicroBatch]:
    """The longest micro-batch of the first steps, after its step, from 1."""
    planner = job.planner(documents)
    steps = lone.DEFAULT_STEP if job.packing.planning_seconds else PLANNED  # where a step takes seconds
    plans = [planner.next(sharded=()) for _ in range(steps)]
    micro_batches = ((step, m) for step, plan in enumerate(plans, start=1) for m in plan.micro_batches)
    return max(micro_batches, key=lambda found: found[1].length)


def _say_whether_calls_meet(calls: Mapping[int, RankCalls]) -> str | None:
    """Says it, and returns what does not meet."""
    problem = unmet(calls, queue_per_edge=True)
    number = sum(len(one.calls) for one in calls.values())
    if problem is None:
        click.echo(f"\nAll {number:,} calls of {len(calls)} ranks meet, in the order that NCCL keeps.")
    else:
        click.echo(f"\nThe job would hang or fail: {problem}")
    return problem


def _say_whether_it_fits(results: list[dict[str, Any]], device_gib: float, usable: float) -> None:
    traced = [result["traced_gib"] for result in results if "error" not in result]
    if traced:
        share = max(traced) / device_gib
        verdict = "fits" if share <= usable else "leaves too little room" if share <= 1 else "does not fit"
        click.echo(
            f"\nThe fullest of these ranks needs {max(traced):.2f} of {device_gib:g} GiB, {share:.0%}: it "
            f"{verdict} (up to {usable:.0%} leaves room for fragmentation, CUDA and NCCL)."
        )
