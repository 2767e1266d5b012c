"""`wlb-titan plan`: plan the packing of documents without model, training or GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np

from wlb_titan.commands import command_line as cli
from wlb_titan.commands import page
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.plan import Plan
from wlb_titan.planner import Planner
from wlb_titan.progress import Progress, counted
from wlb_titan.simulator.choice import Choice, Scenario
from wlb_titan.summary import Estimate, Summary

FEW_STEPS = 100  # fewer carry their standard error in the table
NEAR = 0.01  # imbalances this close count as the same


@click.command(cls=cli.OfFile)
@cli.of_job
@cli.policies_option("the file's")
@click.option("--steps", type=cli.MANY, default=100, help="Steps to plan.")
@click.option(
    "--output", type=cli.Output('{"iteration": '), help="Write the plans, one JSON object per line."
)
@cli.report_option
def plan(
    file: Path,
    overrides: tuple[str, ...],
    policies: list[Policy] | None,
    steps: int,
    output: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Plan the packing of FILE's job without training, and print how balanced it is.

    The documents are those of the file's corpus, or of --lengths, which needs none:

    \b
    wlb-titan plan train.toml --policies plain,wlb,wlb_lazy --report outputs/plan
    wlb-titan plan train_configs/llama2_7b_128k.toml --lengths FILE --output plan.jsonl \\
        --wlb.policy wlb --wlb.packing.cost_model quadratic:0.9e6,4e10

    The imbalance of a step is the largest over the mean work of its micro-batches; a delay is the number of
    iterations between a document's arrival and its training, averaged over tokens.
    """
    asked = cli.load_job(file, overrides, **options)
    documents = asked.documents
    with asked.placed(), cli.progress() as tell:
        scenario = Scenario(asked.job, documents, tell)
        compared = list(dict.fromkeys(policies or [asked.job.policy]))
        choices = [choice for policy in compared if (choice := scenario.choice(policy))]
        jobs = [scenario.under(policy) for policy in compared]
        if output is not None and len(jobs) > 1:
            raise PlanError("--output writes the plans of one policy; leave out --policies, or --output.")
        if report is not None and all(job.packing.name != "plain" for job in jobs):
            jobs.insert(0, jobs[0].under(Policy()))  # what the balance would be without
        for job in jobs:
            job.planner(documents).hold_to_rules()
        summaries = {
            str(job.policy): _run(job, documents, steps, output if job is jobs[-1] else None, tell)
            for job in jobs
        }
    for choice in choices:
        cli.print_choice(choice)
    job = jobs[-1]
    cli.say(cli.describe_job(job, documents))
    cli.show_table(table_rows(summaries))
    cli.say(*remarks(summaries))
    if report is not None:
        click.echo(f"Report: {write_report(report, replace(asked, job=job), summaries, choices)}")


def _run(job: Job, documents: Documents, steps: int, output: Path | None, tell: Progress) -> Summary:
    numbers = counted(range(steps), tell, f"Planning {job.policy}")
    planner = job.planner(documents)
    if output is None:
        return Summary.of((planner.next(sharded=()) for _ in numbers), job.window)
    with cli.writing(f"--output: {output}"), output.open("w", encoding="utf-8") as file:
        return Summary.of(_written(planner, numbers, file), job.window)


def _written(planner: Planner, numbers: Iterable[int], file: TextIO) -> Iterator[Plan]:
    for _ in numbers:
        plan = planner.next()
        file.write(json.dumps(plan.to_json()) + "\n")
        yield plan


def table_rows(summaries: Mapping[str, Summary]) -> cli.Rows:
    """A row for each policy, for the console and the page."""
    rows = []
    for name, summary in summaries.items():
        figures, imbalance = summary.figures(), Estimate.mean(summary.imbalance)
        if len(summary.imbalance) >= FEW_STEPS:
            imbalance = Estimate(imbalance.value)
        rows.append(
            {
                "policy": name,
                "imbalance": imbalance.text(".3f"),
                "max": f"{figures['imbalance_max']:.3f}",
                "delay": f"{figures['delay_mean']:.2f}",
                "max delay": f"{figures['delay_max']}",
                "cut": f"{figures['cut_share']:.1%}",
                "keys/token": f"{figures['keys_per_token']:,.0f}",
                "longest": f"{figures['longest']:,}",
            }
        )
    return rows


def remarks(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """What was left out, and how good a solver's packings are."""
    for name, summary in summaries.items():
        if summary.lost:
            yield f"{name}: {summary.lost:,} tokens were left out."
        if summary.gap is not None:
            proven = "all optimal" if summary.gap == 0 else f"at most {summary.gap:.1%} from the optimum"
            yield f"{name}: the solver's packings are {proven}."


WORK = "The gap between a line and 1 is work that others wait for, or that is missing; flat is balanced."


def write_report(
    folder: Path, asked: cli.Asked, summaries: Mapping[str, Summary], choices: Sequence[Choice]
) -> Path:
    """The first of the `summaries` is the baseline; `choices` is what `auto` stands for."""
    job = asked.job
    means = {name: float(summary.imbalance.mean()) for name, summary in summaries.items()}
    waits = {name: f"{1 - 1 / mean:.1%}" for name, mean in means.items()}
    near = [name for name, mean in means.items() if mean <= min(means.values()) + NEAR]
    best, first = min(near, key=lambda name: summaries[name].delay), next(iter(summaries))
    answer = f"Under {best} GPUs wait {waits[best]} of the time for the largest micro-batch"
    if best != first:
        answer += f", under {first} {waits[first]}; for it a token waits {summaries[best].delay:.2f} steps"
    return page.write_page(
        folder,
        title=f"How {Path(asked.documents.name).name} packs",
        answer=f"{answer}.",
        about=page.described(job, asked.documents),
        sections=[
            page.section("Work of every micro-batch", WORK, page.lines(SHARES, _shares(summaries))),
            page.next_section(
                [
                    ("What that is worth in time and memory:", page.try_next("simulate", asked.typed)),
                    (page.TRAIN, f"--wlb.policy {best}"),
                ]
            ),
            *map(page.choice_section, choices),
            page.section("All figures", "", page.table(table_rows(summaries))),
        ],
    )


SHARES = "work over the mean of its step, from the heaviest micro-batch to the lightest, %"


def _shares(summaries: Mapping[str, Summary]) -> page.Curves:
    """Every micro-batch's work over the mean of its step, by the share of all that have more."""
    percent = np.linspace(0, 100, 101)
    return {name: (percent, np.percentile(each.shares, 100 - percent)) for name, each in summaries.items()}
