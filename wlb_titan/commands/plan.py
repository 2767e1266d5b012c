"""`wlb-titan plan`: plan the packing of documents without model, training or GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wlb_titan.commands.console import print_choice, say, show_table, warnings_once
from wlb_titan.commands.errors import check_outputs, writing
from wlb_titan.commands.job import describe_job, load_job
from wlb_titan.commands.options import OVERRIDABLE, of_job, report_option, steps_option
from wlb_titan.errors import PlanError, UserError

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.job import Job
    from wlb_titan.plan import Plan
    from wlb_titan.planner import Planner
    from wlb_titan.summary import Summary


@click.command(context_settings=OVERRIDABLE)
@of_job
@click.option("--compare", metavar="POLICY,...", help="Packing policies on the same stream, side by side.")
@steps_option(100, "Steps to plan.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the plans, one JSON object a line.")
@report_option
def plan(
    file: Path,
    overrides: tuple[str, ...],
    compare: str | None,
    steps: int,
    output: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Plan the packing of FILE's job without training, and print how balanced it is.

    The documents are those of the file's corpus, or of --lengths, which needs none:

    \b
    wlb-titan plan train.toml --compare plain,wlb,wlb_lazy --report outputs/plan
    wlb-titan plan train_configs/llama2_7b_128k.toml --lengths FILE --output plan.jsonl \\
        --wlb.packing.policy wlb --wlb.packing.cost_model quadratic:0.9e6,4e10

    The imbalance of a step is the largest over the mean work of its micro-batches; a delay is the number of
    iterations between a document's arrival and its training, averaged over tokens.
    """
    from wlb_titan.simulator.choice import choose

    check_outputs(output=output, report=report)
    with warnings_once():
        asked = load_job(file, overrides, **options)
    documents = asked.documents
    with warnings_once(), asked.placed():
        candidates = _jobs(asked.job, compare)
        choices = [choose(one, documents) for one in candidates if one.undecided]
        for choice in choices:
            print_choice(choice)
        decided = iter(choices)
        jobs = [next(decided).job if one.undecided else one for one in candidates]
        if output is not None and len(jobs) > 1:
            raise PlanError("--output writes the plans of one policy; leave out --compare, or --output.")
        summaries = {one.packing.name: _run(one, documents, steps, output) for one in jobs}
        if report is not None and "plain" not in summaries:  # what the balance would be without
            jobs.insert(0, replace(jobs[0], packing=jobs[0].packing.named("plain")))
            summaries = {"plain": _run(jobs[0], documents, steps, None), **summaries}
    _print(jobs[-1], documents, summaries)
    times = None
    if jobs[-1].strategy is not None:
        from wlb_titan.commands.report.ranks import planned_rank_times, rank_rows

        times = planned_rank_times(jobs[-1], documents, steps)
        say(f"Context parallelism: attention of a layer by {jobs[-1].latency.source}")
        show_table(rank_rows(times, jobs[-1]))
    if report is not None:
        from wlb_titan.commands.report.plan import write_report

        drawn = write_report(report, jobs, documents, summaries, times, choices, asked.typed)
        click.echo(f"Report: {drawn}")


def _jobs(job: Job, compare: str | None) -> list[Job]:
    """The job under each packing policy that is asked for."""
    if compare is None:
        return [job]
    jobs = []
    for name in dict.fromkeys(name.strip() for name in compare.split(",")):
        try:
            packing = job.packing.named(name)
        except UserError as error:
            raise PlanError(f"--compare: {error}.") from error
        jobs.append(replace(job, packing=packing))
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
    with writing(f"--output: {output}"), output.open("w", encoding="utf-8") as file:
        return Summary.of(_written(planner, numbers, file), job.window)


def _written(planner: Planner, numbers: Any, file: Any) -> Iterator[Plan]:
    for _ in numbers:
        plan = planner.next()
        file.write(json.dumps(plan.to_json()) + "\n")
        yield plan


def _print(job: Job, documents: Documents, summaries: dict[str, Summary]) -> None:
    from wlb_titan.commands.report.plan import table_row

    say(describe_job(job, documents))
    show_table([{"policy": name, **table_row(s)} for name, s in summaries.items()])
    for name, summary in summaries.items():
        if summary.lost:
            say(f"{name}: {summary.lost:,} tokens were left out.")
        if summary.gap is not None:
            proven = "all optimal" if summary.gap == 0 else f"at most {summary.gap:.1%} from the optimum"
            say(f"{name}: the solver's packings are {proven}.")
