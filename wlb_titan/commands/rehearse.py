"""`wlb-titan rehearse`: ranks of a big job for real on this device, and its step put together from them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click

from wlb_titan.commands import lone_ranks as lone
from wlb_titan.commands.command_line import (
    NUMBER,
    OVERRIDABLE,
    POSITIVE,
    SIZE,
    Rows,
    describe_job,
    load,
    make_console,
    report_option,
    say,
    show_table,
    warnings_once,
    write_json,
)
from wlb_titan.commands.page import (
    PASSES,
    cost,
    described,
    gained,
    pipeline_charts,
    search_command,
    section,
    table,
    write_page,
)
from wlb_titan.commands.simulate import speedup
from wlb_titan.documents import Documents
from wlb_titan.errors import UserError
from wlb_titan.job import Job, policy_parts
from wlb_titan.memory.rank import GIB
from wlb_titan.plan import Plan
from wlb_titan.simulator.measured import MeasuredPasses, MeasuredStep, Pass, measured
from wlb_titan.simulator.step import Prediction, simulate
from wlb_titan.simulator.timeline import step_timeline
from wlb_titan.simulator.trace import Span
from wlb_titan.summary import Estimate

GRACE = 60.0
"""Seconds past --seconds after which a rank still within a step is stopped."""


class Ran(NamedTuple):
    """The measured passes put together, and the steps with and without them."""

    measured: Sequence[MeasuredPasses]
    rehearsed: Prediction
    predicted: Prediction


@dataclass(frozen=True)
class Rehearsal:
    """What came of one policy."""

    job: Job
    documents: Documents
    plans: list[Plan]
    ranks: Sequence[dict[str, Any]] = ()
    """Results of the processes, including those that failed."""
    ran: Ran | None = None
    """None where no rank came through."""

    @property
    def policy(self) -> str:
        return str(self.job.policy)


@click.command(context_settings=OVERRIDABLE)
@lone.of_ranks
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    help="Side by side; the first is the baseline.  [default: the file's]",
)
@click.option("--steps", type=POSITIVE, default=3, help="Measured steps.")
@click.option("--warm-up", type=NUMBER, default=1, help="Steps before them, in which kernels are compiled.")
@click.option(
    "--step",
    "first",
    type=POSITIVE,
    default=lone.DEFAULT_STEP,
    help="First step of the plan that is measured.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=600.0,
    help="A rank starts no step after this time; one that is within a step a minute later is stopped.",
)
@click.option(
    "--memory-gib",
    type=SIZE,
    metavar="GIB",
    help="Memory that a rank may use.  [default: what the device has]",
)
@click.option("--at-once", type=POSITIVE, default=1, help="Ranks to run at the same time on the device.")
@report_option
def rehearse(
    file: Path,
    overrides: tuple[str, ...],
    ranks: str,
    policies: str | None,
    steps: int,
    warm_up: int,
    first: int,
    world_size: int | None,
    seconds: float,
    memory_gib: float | None,
    at_once: int,
    output: Path | None,
    report: Path | None,
) -> None:
    """Measure FILE's job on this device, whatever number of devices it is for.

    Each rank that is asked for runs whole planned steps by itself: its own stages, its own share of heads and
    tokens, its own micro-batches, real kernels, real memory; what other ranks would send is made up. The time
    of every pass is measured, and the job's step put together from them, with communication as the cluster's
    file has it ([wlb] cluster). It stands beside what `wlb-titan simulate` predicts of the same steps.

    Nothing is trained, loaded or saved. If the corpus is not on this machine, documents of synthetic lengths
    take its place. docs/rehearsal.md explains the figures.
    """
    if warm_up >= first:
        raise UserError(
            f"--warm-up: {warm_up} steps do not fit before step {first}; --step names a later one."
        )
    limits = {"seconds": seconds, "memory_gib": memory_gib}
    options = {"first": first, "warm_up": warm_up, "steps": steps, **limits}
    resolved = load(file, overrides, world_size)
    results: list[Rehearsal] = []
    with tempfile.TemporaryDirectory(prefix="wlb-rehearsal-") as name, warnings_once():
        folder = Path(name)
        words = [*overrides, "--dump_folder", name]
        micro_batches = lone.trained_job(resolved.config, world_size).micro_batches
        words += lone.corpus_words(resolved, micro_batches, first + steps, folder)
        for parts in [policy_parts(one) for one in policies.split(",")] if policies else [[]]:
            job, documents = lone.decided_job(file, [*words, *lone.policy_words(parts)], world_size)
            one = Rehearsal(job, documents, job.plans(documents, steps, after=first - 1))
            numbers = lone.rank_numbers(ranks, job.degrees.ranks, job.degrees.pipeline)
            if not results:
                say(describe_job(job, documents))
            click.echo(f"{one.policy}: rank {', '.join(map(str, numbers))} ...", err=True)
            command = lone.RankCommand(
                "rehearse",
                {"world_size": job.degrees.ranks, **options},
                file,
                [*words, *lone.policy_words(job.policy)],
                {"CUDA_VISIBLE_DEVICES": ""} if resolved.config.wlb.device == "cpu" else {},
                seconds + GRACE,
            )
            results.append(_put_together(one, command.run(numbers, folder, at_once)))
            for rank in results[-1].ranks:
                make_console().print(f"Rank {rank['rank']} of {job.degrees.ranks}", style="bold", end="")
                say(*rank_lines(rank))
    if any(one.ran for one in results):
        show_table(table_rows(results))
    if output is not None:
        write_json(output, {"file": str(file), "policies": list(map(_record, results))})
    if report is not None:
        click.echo(f"Report: {write_report(report, results, [str(file), *overrides])}")
    if any("error" in rank for one in results for rank in one.ranks):
        sys.exit(1)


def _put_together(one: Rehearsal, ranks: list[dict[str, Any]]) -> Rehearsal:
    """Only with the ranks that came through, and the steps that all of these ran."""
    ran = [rank for rank in ranks if rank.get("steps")]
    if not ran:
        return replace(one, ranks=ranks)
    shards = one.job.degrees.shard
    steps = []
    for number in range(min(len(rank["steps"]) for rank in ran)):
        of_ranks = []
        for rank in ran:
            at, step = rank["coordinates"], rank["steps"][number]
            dp = at.get("dp_replicate", 0) * shards + at.get("dp_shard", 0)
            passes = [Pass(*fields) for fields in step["passes"]]
            planned = [m.length for m in one.plans[number].of_rank(dp)]
            assert step["lengths"] == planned, f"rank {rank['rank']} ran another plan than the one measured"
            of_ranks.append(MeasuredStep(dp, at.get("cp", 0), passes, step["optimizer"]))
        steps.append(of_ranks)
    plans = one.plans[: len(steps)]
    found = measured(one.job, plans, steps)
    ran_so = Ran(found, simulate(one.job, plans, found), simulate(one.job, plans))
    return replace(one, plans=plans, ranks=ranks, ran=ran_so)


def table_rows(results: Sequence[Rehearsal]) -> Rows:
    """A row for each policy: rehearsed, with the standard error over the steps, and predicted."""
    ran = [(one, one.ran.rehearsed, one.ran.predicted) for one in results if one.ran]
    return [
        {
            "policy": one.policy,
            "step, s": f"{mine.seconds.mean():.3f}",
            "predicted s": f"{predicted.seconds.mean():.3f}",
            "TFLOP/s a rank": f"{mine.flops_per_second / 1e12 / one.job.degrees.ranks:.4g}",
            "predicted TFLOP/s": f"{predicted.flops_per_second / 1e12 / one.job.degrees.ranks:.4g}",
            "tokens/s": Estimate.rate(mine.tokens, mine.seconds).text(",.0f"),
            "MFU": f"{mine.mfu:.1%}",
            "bubble": f"{mine.bubble:.1%}",
            "predicted bubble": f"{predicted.bubble:.1%}",
            "FLOPs x": speedup(mine, ran[0][1]).text(".3f"),
            "tokens x": f"{mine.tokens_per_second / ran[0][1].tokens_per_second:.3f}",
        }
        for one, mine, predicted in ran
    ]


def _record(one: Rehearsal) -> dict[str, Any]:
    return {
        "policy": one.policy,
        "degrees": str(one.job.degrees),
        "cluster": one.job.cluster.name,
        "documents": one.documents.name,
        "rehearsed": one.ran and figures(one.ran.rehearsed),
        "predicted": one.ran and figures(one.ran.predicted),
        "ranks": one.ranks,
    }


def figures(prediction: Prediction) -> dict[str, Any]:
    """The JSON's figures: seconds of each step, and what follows from them."""
    tokens, flops = (Estimate.rate(a, prediction.seconds) for a in (prediction.tokens, prediction.flops))
    return {
        "seconds": prediction.seconds.tolist(),
        "pipeline_seconds": prediction.pipeline.tolist(),
        "communication_seconds": prediction.communication.tolist(),
        "optimizer_seconds": prediction.optimizer.tolist(),
        "tokens": prediction.tokens.tolist(),
        "flops": prediction.flops.tolist(),
        "tokens_per_second": tokens.value,
        "tokens_relative_error": tokens.relative,
        "flops_per_second": flops.value,
        "flops_relative_error": flops.relative,
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "peak_gib": [rank.total / GIB for rank in prediction.memory],
    }


def rank_lines(rank: dict[str, Any]) -> list[str]:
    """What a rank ran and what it took, or its error."""
    lines = []
    if steps := rank.get("steps"):
        first, last = steps[0]["iteration"] + 1, steps[-1]["iteration"] + 1
        runs = f"step {first}" if first == last else f"steps {first} to {last}"
        passes = [one for step in steps for one in step["passes"]]
        kinds = [kind for kind in PASSES if any(one[0] == kind for one in passes)]
        seconds = {kind: sum(one[4] for one in passes if one[0] == kind) / len(steps) for kind in kinds}
        took = ", ".join(f"{PASSES[kind][0]} {value:.3f}" for kind, value in seconds.items())
        optimizer = mean(step["optimizer"] for step in steps)
        predicted = rank["predicted_gib"]
        lines.append(
            f" ({lone.place(rank)}) on {rank['device']}: {runs}, all {len(passes)} passes of all "
            f"micro-batches. Seconds a step: {took}, optimizer {optimizer:.3f}."
        )
        if not rank["device"].startswith("CPU"):  # whose peak includes Python and its libraries
            peak = f" Peak {max(step['peak_gib'] for step in steps):.2f} GiB"
            lines[-1] += f"{peak}." if predicted is None else f"{peak}, {predicted:.2f} predicted."
    if "error" in rank:
        lines.append(f" fails: {rank.get('traceback', '')}{rank['error']}")
    return lines


TOGETHER = "Passes as measured, communication as the cluster's file has it; ± is the standard error."
STEP = "A row is a pipeline rank, a box a pass: strong where it was measured, pale where a like pass was."


def write_report(folder: Path, results: Sequence[Rehearsal], typed: Sequence[str]) -> Path:
    rows = table_rows(results)
    sections, answer = [], "No rank came through."
    if ran := {one.policy: one.ran for one in results if one.ran}:
        base = next(iter(ran))
        gains = {policy: speedup(one.rehearsed, ran[base].rehearsed) for policy, one in ran.items()}
        best = max(gains, key=lambda policy: gains[policy].value)
        answer = f"{gained(best, gains[best], base)}; {cost(ran[best].rehearsed.bubble, None)}"
        timelines: dict[str, list[Span]] = {}
        for one in results:
            if one.ran:
                timelines[f"{one.policy}, rehearsed"] = typical_step(one, one.ran, measured=True)
                timelines[f"{one.policy}, predicted"] = typical_step(one, one.ran, measured=False)
        sections = [
            section("Steps put together", TOGETHER, table(rows)),
            section("A typical step", STEP, pipeline_charts(timelines)),
        ]
    for one in results:
        alone = [{"rank": str(r["rank"]), "what it ran": " ".join(rank_lines(r)).strip()} for r in one.ranks]
        sections.append(section(one.policy, "Each rank ran alone.", table(alone)))
    search = search_command(typed, results[0].job.degrees.ranks)
    corpus, about = described(results[0].job, results[0].documents)
    return write_page(
        folder,
        title=f"Rehearsed on one device: {corpus}",
        answer=answer,
        about=about,
        cards=rows,
        figure="FLOPs x",
        facts=("step, s", "predicted s", "bubble", "MFU", "tokens/s"),
        tries=[("What other degrees and schedules are predicted to be worth:", search)],
        sections=sections,
    )


def typical_step(one: Rehearsal, ran: Ran, *, measured: bool) -> list[Span]:
    """The slowest replica's passes in the rehearsed step that is nearest to the mean."""
    seconds = ran.rehearsed.seconds
    number = int(abs(seconds - seconds.mean()).argmin())
    passes = ran.measured[number] if measured else None
    spans, _ = step_timeline(one.job, one.plans[number], one.policy, measured=passes)
    return spans
