"""`wlb-titan plan`: plan the packing of documents without model, training or GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import make_console, print_choice, show_table, warnings_once
from wlb_titan.commands.job import (
    describe_job,
    lengths_option,
    load_job,
    packing_options,
    placed,
    with_settings,
)
from wlb_titan.context import STRATEGIES
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.workload import COST_MODELS
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.packing.policy import MOST_TOKENS
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.pipeline.schedule import SCHEDULES

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.plan import Plan
    from wlb_titan.planner import Planner
    from wlb_titan.summary import Summary

TABLE_WIDTH = 120  # also where no terminal tells its own

TOKENS = click.IntRange(2, MOST_TOKENS)
COUNT = click.IntRange(1, 1 << 20)
STEPS = click.IntRange(1, 1 << 20)
SEED = click.IntRange(0, 2**63 - 1)


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path), metavar="[FILE.toml]")
@lengths_option
@click.option(
    "--policy", metavar="NAME", help=f"Packing policy: {', '.join(POLICIES.names)}.  [default: plain]"
)
@click.option("--compare", metavar="POLICY,...", help="Several policies on the same stream, side by side.")
@click.option("--context-window", type=TOKENS, help="Tokens of the longest document a model sees.")
@click.option("--micro-batches", type=COUNT, help="N, those of the whole job in one step.")
@click.option("--data-parallel", type=COUNT, help="Degree.  [default: 1]")
@click.option("--context-parallel", type=COUNT, help="Degree; above 1 each micro-batch is sharded.")
@click.option("--sharding", metavar="NAME", help=f"{', '.join(STRATEGIES.names)}.  [default: per_sequence]")
@click.option("--pipeline-parallel", type=COUNT, help="Degree.  [default: 1]")
@click.option("--schedule", type=click.Choice(list(SCHEDULES)), help="Of the pipeline.  [default: 1F1B]")
@click.option("--order", metavar="NAME", help=f"{', '.join(ORDERS.names)}.  [default: as_packed]")
@click.option("--steps", type=STEPS, default=100, show_default=True, help="Steps to plan.")
@click.option(
    "--cost-model",
    metavar="MODEL",
    help=f"{', '.join(COST_MODELS.names)}, or a profile.  [default: analytic]",
)
@click.option("--cluster", metavar="NAME|FILE.toml", help="The hardware whose times count.")
@click.option(
    "--model",
    metavar="SIZE-WINDOW",
    default="7B-128K",
    show_default=True,
    help="With --lengths: the row of the paper's Table 1 for which the analytic cost model stands.",
)
@click.option(
    "--seed",
    type=SEED,
    help="Shuffle every epoch by this seed.  [default: FILE's own order; the TOML's seed]",
)
@packing_options
@click.option("--output", type=click.Path(path_type=Path), help="Write the plans, one JSON object a line.")
@click.option("--report", type=click.Path(path_type=Path), metavar="DIR", help="Draw DIR/report.html.")
def plan(
    config: Path | None,
    compare: str | None,
    steps: int,
    output: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Plan the packing of documents without training, and print how balanced it is.

    Either from a training configuration and its corpus (FILE.toml), or from document lengths, or both:

    \b
    wlb-titan plan train.toml --compare plain,wlb,wlb_lazy --report outputs/plan
    wlb-titan plan --lengths FILE --policy wlb --context-window 131072 --micro-batches 4 \\
        --cost-model quadratic:0.9e6,4e10 --output plan.jsonl

    The imbalance of a step is the largest over the mean work of its micro-batches; a delay is the number of
    iterations between a document's arrival and its training, averaged over tokens.
    """
    from wlb_titan.simulator.choice import choose

    given = {name: value for name, value in options.items() if value is not None}
    if config is None and "lengths" in given and not {"context_window", "micro_batches"} <= given.keys():
        raise PlanError("With --lengths alone, --context-window and --micro-batches must be given.")
    with warnings_once(), placed(config, given):
        # Of a row of Table 1 its model and tensor parallelism count; all else is asked for.
        job, documents = load_job(config, given, lambda row: Degrees(tensor=row.tensor))
        asked = _jobs(job, compare, given)
        choices = [choose(one, documents) for one in asked if one.undecided]
        for choice in choices:
            print_choice(choice)
        decided = iter(choices)
        jobs = [next(decided).job if one.undecided else one for one in asked]
        if output is not None and len(jobs) > 1:
            raise PlanError("--output writes the plans of one policy; leave out --compare, or --output.")
        summaries = {one.packing.name: _run(one, documents, steps, output) for one in jobs}
        if report is not None and "plain" not in summaries:  # what the balance would be without
            jobs.insert(0, replace(jobs[0], packing=jobs[0].packing.named("plain")))
            summaries = {"plain": _run(jobs[0], documents, steps, None), **summaries}
    _print(jobs[-1], documents, summaries)
    times = None
    if jobs[-1].strategy is not None:
        from wlb_titan.commands.rank_report import planned_rank_times, rank_table

        times = planned_rank_times(jobs[-1], documents, steps)
        make_console(TABLE_WIDTH).print(rank_table(times, jobs[-1]))
    if report is not None:
        from wlb_titan.commands.plan_report import write_report

        click.echo(f"Report: {write_report(report, jobs, documents, summaries, times, choices)}")


def _jobs(job: Job, compare: str | None, given: dict[str, Any]) -> list[Job]:
    """The job under each packing policy that is asked for."""
    if compare is None:
        return [job]
    jobs = []
    for name in dict.fromkeys(name.strip() for name in compare.split(",")):
        try:
            packing = job.packing.named(name)
        except UserError as error:
            raise PlanError(f"--compare: {error}.") from error
        jobs.append(with_settings(replace(job, packing=packing), given))
    return jobs


def _run(job: Job, documents: Documents, steps: int, output: Path | None) -> Summary:
    from rich.console import Console
    from rich.progress import track

    from wlb_titan.summary import Summary

    console = Console(stderr=True)
    if console.is_terminal:
        numbers = track(range(steps), description=f"{job.packing.name:12}", console=console, transient=True)
    else:
        numbers = range(steps)
    planner = job.planner(documents)
    if output is None:
        return Summary.of((planner.next(sharded=()) for _ in numbers), job.window)
    try:
        with output.open("w", encoding="utf-8") as file:
            return Summary.of(_written(planner, numbers, file), job.window)
    except OSError as error:
        raise PlanError(f"The plans cannot be written to {output}: {error.strerror}.") from error


def _written(planner: Planner, numbers: Any, file: Any) -> Iterator[Plan]:
    for _ in numbers:
        plan = planner.next()
        file.write(json.dumps(plan.to_json()) + "\n")
        yield plan


def _print(job: Job, documents: Documents, summaries: dict[str, Summary]) -> None:
    from wlb_titan.commands.plan_rows import table_row

    console = make_console(TABLE_WIDTH)
    console.print(describe_job(job, documents), markup=False, soft_wrap=True)
    show_table(console, [{"policy": name, **table_row(s)} for name, s in summaries.items()])
    for name, summary in summaries.items():
        if summary.lost:
            console.print(f"{name}: {summary.lost:,} tokens were left out.", markup=False)
        if summary.gap is not None:
            proven = "all optimal" if summary.gap == 0 else f"at most {summary.gap:.1%} from the optimum"
            console.print(f"{name}: the solver's packings are {proven}.", markup=False)
