"""`wlb-titan rehearse`: ranks of a big job for real on this device, and its step put together from them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click

from wlb_titan.commands import command_line as cli
from wlb_titan.commands.lone_ranks import (
    DEFAULT_STEP,
    lone_job,
    of_ranks,
    print_rank,
    rank_numbers,
    run_ranks,
)
from wlb_titan.commands.simulate import speedup
from wlb_titan.documents import Documents
from wlb_titan.files import checked
from wlb_titan.job import Job, Policy
from wlb_titan.plan import Plan
from wlb_titan.simulator.measured import NAMES, MeasuredStep, Pass, measured
from wlb_titan.simulator.step import Prediction, simulate
from wlb_titan.summary import Estimate


class Rehearsal(NamedTuple):
    """What came of one policy."""

    job: Job
    documents: Documents
    ranks: Sequence[dict[str, Any]]
    """Results of the processes, including those that failed."""
    rehearsed: Prediction | None
    """The steps with the measured passes; None where no rank came through."""
    predicted: Prediction
    """The same steps without them."""


@click.command(cls=cli.OfFile)
@of_ranks
@cli.policies_option("the file's")
@click.option("--steps", type=cli.POSITIVE, default=3, help="Steps to measure.")
@click.option("--at-once", type=cli.POSITIVE, default=1, help="Ranks to run at the same time on the device.")
def rehearse(
    file: Path,
    overrides: tuple[str, ...],
    ranks: str,
    policies: list[Policy] | None,
    steps: int,
    step: int | None,
    world_size: int | None,
    at_once: int,
    output: Path | None,
) -> None:
    """Measure FILE's job, of any number of devices, on this device.

    Each rank of --rank runs whole planned steps alone: its own stages, its own share of heads and tokens, its
    own micro-batches, real kernels, real memory; the data of other ranks are made up. The times of its passes
    are assembled into the job's step, with communication predicted from the cluster's file ([wlb] cluster),
    and printed beside the prediction of `wlb-titan simulate` for the same steps.

    The first step is the 9th of the plan, or --step, after one in which kernels are compiled. Nothing is
    trained, loaded or saved. If the corpus is not on this machine, documents have synthetic lengths.
    docs/rehearsal.md explains the figures.
    """
    first = step or DEFAULT_STEP
    results: list[Rehearsal] = []
    with tempfile.TemporaryDirectory(prefix="wlb-rehearsal-") as name:
        for policy in policies or (None,):
            lone = lone_job(file, overrides, world_size, Path(name), steps=first + steps, policy=policy)
            job = lone.job
            plans = lone.plans(steps, first - 1)
            numbers = rank_numbers(ranks, job.degrees.ranks, job.degrees.pipeline)
            if not results:
                cli.say(cli.describe_job(job, lone.documents))
            records = run_ranks(lone, "rehearse", numbers, at_once, first=first, steps=steps)
            for rank in records:
                print_rank(rank, job.degrees.ranks, what_it_ran)
            results.append(_put_together(lone, plans, records))
    if rows := table_rows(results):
        cli.show_table(rows)
    if output is not None:
        cli.write_json(output, {"file": str(file), "policies": list(map(_record, results))})
    if any("error" in rank for result in results for rank in result.ranks):
        sys.exit(1)


def _put_together(lone: cli.Asked, plans: list[Plan], ranks: list[dict[str, Any]]) -> Rehearsal:
    """Only with the ranks that came through."""
    job, ran = lone.job, [rank for rank in ranks if "error" not in rank]
    steps = []
    for number, plan in enumerate(plans):
        of_ranks = []
        for rank in ran:
            at, step = rank["coordinates"], rank["steps"][number]
            dp = job.degrees.replica_at(at)
            passes = checked(list[Pass], step["passes"])
            planned = [m.length for m in plan.of_rank(dp)]
            assert step["lengths"] == planned, f"rank {rank['rank']} ran another plan than the one measured"
            of_ranks.append(MeasuredStep(dp, at.get("cp", 0), passes, step["optimizer"]))
        steps.append(of_ranks)
    rehearsed = simulate(job, plans, measured(job, plans, steps)) if ran else None
    return Rehearsal(job, lone.documents, ranks, rehearsed, simulate(job, plans))


def table_rows(results: Sequence[Rehearsal]) -> cli.Rows:
    """A row for each policy: rehearsed, with the standard error over the steps, and predicted."""
    ran = [(result, result.rehearsed) for result in results if result.rehearsed]
    return [
        {
            "policy": str(result.job.policy),
            "step, s": f"{rehearsed.seconds.mean():.3f}",
            "predicted s": f"{result.predicted.seconds.mean():.3f}",
            "tokens/s": Estimate.rate(rehearsed.tokens, rehearsed.seconds).text(",.0f"),
            "MFU": f"{rehearsed.mfu:.1%}",
            "bubble": f"{rehearsed.bubble:.1%}",
            "speedup": speedup(rehearsed, ran[0][1]).text(".3f", "x"),
        }
        for result, rehearsed in ran
    ]


def _record(result: Rehearsal) -> dict[str, Any]:
    return {
        "policy": str(result.job.policy),
        "degrees": str(result.job.degrees),
        "cluster": result.job.cluster.name,
        "documents": result.documents.name,
        "rehearsed": figures(result.rehearsed) if result.rehearsed else None,
        "predicted": figures(result.predicted) if result.rehearsed else None,
        "ranks": result.ranks,
    }


def figures(prediction: Prediction) -> dict[str, Any]:
    """The JSON's figures: seconds, tokens and FLOPs of each step, and what follows from them."""
    by_step = {name: getattr(prediction, name).tolist() for name in ("seconds", "tokens", "flops")}
    return by_step | {"mfu": prediction.mfu, "bubble": prediction.bubble}


def what_it_ran(rank: dict[str, Any]) -> str:
    """What a rank that came through ran, and what it took."""
    steps = rank["steps"]
    first, last = steps[0]["iteration"] + 1, steps[-1]["iteration"] + 1
    runs = f"step {first}" if first == last else f"steps {first} to {last}"
    passes = [pass_ for step in steps for pass_ in step["passes"]]
    seconds = {kind: [p["seconds"] for p in passes if p["kind"] == kind] for kind in NAMES}
    took = ", ".join(
        f"{NAMES[kind]} {sum(found) / len(steps):.3f}" for kind, found in seconds.items() if found
    )
    optimizer, peak = mean(step["optimizer"] for step in steps), ""
    if steps[0]["peak_gib"] is not None:
        peak = f" Peak {max(step['peak_gib'] for step in steps):.2f} GiB"
        peak += "." if rank["predicted_gib"] is None else f", {rank['predicted_gib']:.2f} predicted."
    return (
        f" on {rank['device']}: {runs}, all {len(passes)} passes of all micro-batches. Seconds a step: "
        f"{took}, optimizer {optimizer:.3f}.{peak}"
    )
