"""`wlb-titan rehearse`: ranks of a big job for real on this device, and its step put together from them."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wlb_titan.commands import lone_ranks as lone
from wlb_titan.commands.console import say, show_table, warnings_once
from wlb_titan.commands.job import describe_job
from wlb_titan.commands.options import OVERRIDABLE, check_outputs, json_option, of_file, report_option
from wlb_titan.commands.report.rehearse import Ran, Rehearsal, figures, print_rank, table_rows, write_report
from wlb_titan.errors import UserError
from wlb_titan.job import policy_parts

GRACE = 60.0
"""Seconds over --seconds after which a rank that is within a step is stopped."""


@click.command(context_settings=OVERRIDABLE)
@of_file
@lone.rank_option
@click.option(
    "--policies",
    metavar="PACKING[:SHARDING[:ORDER]],...",
    help="Side by side; the first is the baseline.  [default: the file's]",
)
@click.option("--steps", type=click.IntRange(min=1), default=3, help="That count.")
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=1,
    help="Steps before them, in which kernels are compiled.",
)
@click.option(
    "--step",
    "first",
    type=click.IntRange(min=1),
    default=lone.DEFAULT_STEP,
    help="First step of the plan that counts.",
)
@lone.world_size_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=600.0,
    help="A rank begins no step after so many; one that is within a step a minute later is stopped.",
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="That a rank may take.  [default: what the device has]",
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=1,
    help="Ranks that run at a time; they share the device.",
)
@json_option
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
    from wlb_titan.runtime.models.load import load_config

    check_outputs(output=output, report=report)
    if warm_up >= first:
        raise UserError(
            f"--warm-up: {warm_up} steps do not fit before step {first}; --step names a later one."
        )
    limits = {"seconds": seconds, "memory_gib": memory_gib}
    options = {"first": first, "warm_up": warm_up, "steps": steps, **limits}
    resolved = load_config(file, overrides, world_size)
    results: list[Rehearsal] = []
    with tempfile.TemporaryDirectory(prefix="wlb-rehearsal-") as name, warnings_once():
        folder = Path(name)
        words = [*overrides, "--dump_folder", name]
        micro_batches = lone.configured_job(resolved.config, world_size).micro_batches
        words += lone.corpus_words(resolved, micro_batches, first + steps, folder)
        for parts in [policy_parts(one) for one in policies.split(",")] if policies else [[]]:
            one = _planned(file, [*words, *lone.policy_words(parts)], world_size, first, steps)
            numbers = lone.rank_numbers(ranks, one.job.degrees.ranks, one.job.degrees.pipeline)
            if not results:
                say(describe_job(one.job, one.documents))
            click.echo(f"{one.policy}: rank {', '.join(map(str, numbers))} ...", err=True)
            command = lone.RankCommand(
                "rehearse",
                {"world_size": one.job.degrees.ranks, **options},
                file,
                [*words, *lone.policy_words(one.job.policy)],
                {"CUDA_VISIBLE_DEVICES": ""} if resolved.config.wlb.device == "cpu" else {},
                seconds + GRACE,
            )
            results.append(_put_together(one, command.run(numbers, folder, at_once)))
            for rank in results[-1].ranks:
                print_rank(results[-1], rank)
    if any(one.ran for one in results):
        show_table(table_rows(results))
    if output is not None:
        _write(output, file, results)
    if report is not None:
        click.echo(f"Report: {write_report(report, results, [str(file), *overrides])}")
    if any("error" in rank for one in results for rank in one.ranks):
        sys.exit(1)


def _planned(file: Path, words: list[str], world_size: int | None, first: int, steps: int) -> Rehearsal:
    """A policy's job and the plans of its steps, which the ranks' processes make too."""
    job, documents = lone.decided_job(file, words, world_size)
    plans = job.plans(documents, steps, after=first - 1)
    return Rehearsal(str(job.policy), job, documents, plans, [])


def _put_together(one: Rehearsal, ranks: list[dict[str, Any]]) -> Rehearsal:
    """The steps that all ranks ran which came through."""
    from wlb_titan.simulator.measured import MeasuredStep, Pass, measured
    from wlb_titan.simulator.step import simulate

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


def _write(output: Path, file: Path, results: list[Rehearsal]) -> None:
    record = {
        "file": str(file),
        "policies": [
            {
                "policy": one.policy,
                "degrees": str(one.job.degrees),
                "cluster": one.job.cluster.name,
                "documents": one.documents.name,
                "rehearsed": one.ran and figures(one.ran.rehearsed),
                "predicted": one.ran and figures(one.ran.predicted),
                "ranks": one.ranks,
            }
            for one in results
        ],
    }
    lone.write_json(output, record)
