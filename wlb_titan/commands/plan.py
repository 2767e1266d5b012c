"""`wlb-titan plan`: plan the packing of documents without model, training or GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.commands.charts import PALETTE, chart, hover, lines, number
from wlb_titan.commands.console import print_choice, say, show_table, warnings_once
from wlb_titan.commands.job import describe_job, load_job
from wlb_titan.commands.options import (
    OVERRIDABLE,
    check_outputs,
    of_job,
    report_option,
    steps_option,
    writing,
)
from wlb_titan.commands.page import Card, Try, choice_section, command, described, section, table, write_page
from wlb_titan.commands.sharding import rank_rows, rank_times, sharded_micro_batches
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.plan import Plan
from wlb_titan.planner import Planner
from wlb_titan.simulator.choice import Choice, choose
from wlb_titan.summary import Estimate, Summary

FEW_STEPS = 100  # fewer carry their standard error in the table
STEPS_SHOWN = 60  # of the workloads; more become a blur
NEAR = 0.01  # imbalances that are as good as the same

Rows = list[dict[str, str]]


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
            plain = replace(jobs[0], packing=jobs[0].packing.named("plain"))
            summaries = {"plain": _run(plain, documents, steps, None), **summaries}
    job = jobs[-1]
    say(describe_job(job, documents))
    show_table(table_rows(summaries))
    say(*remarks(summaries))
    sharded: Rows = []
    if job.strategy is not None:
        sharded = rank_rows(rank_times(sharded_micro_batches(job, documents, steps), job), job)
        say(f"Context parallelism: attention of a layer by {job.latency.source}")
        show_table(sharded)
    if report is not None:
        drawn = write_report(report, job, documents, summaries, sharded, choices, asked.typed)
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

    console = Console(stderr=True)
    numbers: Any = range(steps)
    if console.is_terminal:
        numbers = track(numbers, description=f"{job.packing.name:12}", console=console, transient=True)
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


def table_rows(summaries: Mapping[str, Summary]) -> Rows:
    """A row for each policy, as the console and the page show it."""
    rows = []
    for name, summary in summaries.items():
        figures, imbalance = summary.figures(), Estimate.mean(summary.imbalance)
        if len(summary.imbalance) >= FEW_STEPS:
            imbalance = Estimate(imbalance.value)
        rows.append(
            {
                "policy": name,
                "imbalance": imbalance.text(".3f"),
                "p95": f"{figures['imbalance_p95']:.3f}",
                "max": f"{figures['imbalance_max']:.3f}",
                "delay": f"{figures['delay_mean']:.2f}",
                "max delay": f"{figures['delay_max']}",
                "padding": f"{figures['padding']:.2%}",
                "cut": f"{figures['cut_share']:.1%}",
                "keys/token": f"{figures['keys_per_token']:,.0f}",
                "plan ms": f"{figures['plan_ms']:.1f}",
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


WORK = "Pale: the mean work of a step's micro-batches, the dots. Red: what all others wait for the largest."
IMBALANCE = "Largest over mean work of a step's micro-batches, of all steps in rising order; 1 is perfect."
DELAY = "What balance costs: documents that wait for a step that can bear them."


def write_report(
    folder: Path,
    job: Job,
    documents: Documents,
    summaries: Mapping[str, Summary],
    sharded: Rows,
    choices: Sequence[Choice],
    typed: Sequence[str],
) -> Path:
    """Draws what was planned.

    Args:
        summaries: by policy; the first is the picture before.
        sharded: as of `rank_rows`; empty without context parallelism.
        choices: what `auto` stands for in a job, where it does.
        typed: what the command line names, as of `page.command`.
    """
    imbalances = {name: Estimate.mean(one.imbalance) for name, one in summaries.items()}
    waits = {name: f"{1 - 1 / one.value:.1%}" for name, one in imbalances.items()}
    least = min(one.value for one in imbalances.values())
    near = [name for name, one in imbalances.items() if one.value <= least + NEAR]
    best, first = min(near, key=lambda name: summaries[name].delay), next(iter(summaries))
    answer = f"Under {best} GPUs wait {waits[best]} of the time for the largest micro-batch"
    if best != first:
        answer += f", under {first} {waits[first]}; for it a token waits {summaries[best].delay:.2f} steps"
    rising = {n: (np.linspace(0, 100, len(s.imbalance)), np.sort(s.imbalance)) for n, s in summaries.items()}
    corpus, about = described(job, documents)
    return write_page(
        folder,
        title=f"How {corpus} packs",
        answer=f"{answer}.",
        about=about,
        cards=[
            Card(
                name,
                imbalances[name].text(".3f"),
                (
                    f"imbalance: {waits[name]} of the time is waiting",
                    f"{one.cut:.1%} of the tokens cut off from their document's start",
                    f"a token waits {one.delay:.2f} steps",
                ),
            )
            for name, one in summaries.items()
        ],
        tries=[
            Try("What that is worth in time and memory:", command("simulate", typed)),
            Try("To train so, in the TOML file:", f'[wlb.packing]\npolicy = "{best}"'),
        ],
        sections=[
            *map(choice_section, choices),
            section("Work of every micro-batch", WORK, *_workloads(summaries)),
            section("Imbalance", IMBALANCE, lines("", "% of steps", rising)),
            section("Delay", DELAY, *_delay(summaries, job.micro_batches * job.window)),
            section("All figures", "", table(table_rows(summaries))),
            section("Context parallelism", f"Attention of a layer by {job.latency.source}.", table(sharded))
            if sharded
            else "",
        ],
    )


def _workloads(summaries: Mapping[str, Summary]) -> list[str]:
    """Every micro-batch's work, step by step, a chart a policy, on one scale."""
    mean = np.mean([summary.workloads.mean() for summary in summaries.values()])
    works = {name: summary.workloads[:STEPS_SHOWN] / mean for name, summary in summaries.items()}
    top = max(float(work.max()) for work in works.values())
    colors = (PALETTE[place % len(PALETTE)] for place in range(len(works)))
    return [_work_of_steps(name, work, next(colors), top) for name, work in works.items()]


def _work_of_steps(name: str, work: Floats, color: str, top: float) -> str:
    """What each step computes, and above it what it waits: the gap between the mean and the largest."""
    means, largest = work.mean(axis=1), work.max(axis=1)
    steps = [
        {"step": step, "mean": m, "largest": most, "waiting": f"{1 - m / most:.1%}"}
        for step, (m, most) in enumerate(zip(means, largest, strict=True))
    ]
    shown = work if work.shape[1] <= 16 else np.quantile(work, np.linspace(0, 1, 17), axis=1).T
    dots = [{"step": step, "work": w} for step, of_step in enumerate(shown.tolist()) for w in of_step]
    axis: dict[str, Any] = {"title": "work / mean", "domain": [0, top]}
    encoding: dict[str, Any] = {
        "y": number("mean", **axis),
        "tooltip": hover("step", "mean", "largest", "waiting"),
    }
    bar = {"type": "bar", "width": {"expr": f"0.8 * width / {len(work)}"}}
    pale = {"mark": {**bar, "color": color, "opacity": 0.35}, "encoding": encoding}
    red = {
        "mark": {**bar, "color": PALETTE[5], "opacity": 0.6},
        "encoding": encoding | {"y2": {"field": "largest"}},
    }
    circle = {
        "mark": {"type": "circle", "size": 9, "color": color, "opacity": 1, "tooltip": True},
        "encoding": {"y": number("work", **axis)},
    }
    layers = [
        {"data": {"values": rows}, **layer} for rows, layer in ((steps, pale), (steps, red), (dots, circle))
    ]
    x = number("step", "step", domain=[-0.7, len(work) - 0.3], nice=False)
    return chart(name, {"encoding": {"x": x}, "layer": layers}, 130)


def _delay(summaries: Mapping[str, Summary], batch_tokens: int) -> list[str]:
    """What waits after each step, of many steps the moving average; and how long tokens waited in the end."""
    span = max(len(next(iter(summaries.values())).waiting) // 20, 1)
    smooth = {
        name: np.convolve(one.waiting / batch_tokens, np.full(span, 1 / span), "valid")
        for name, one in summaries.items()
    }
    waiting = {name: (np.arange(len(one)) + (span - 1) / 2, one) for name, one in smooth.items()}
    later = {
        n: (range(len(s.delays)), 100 * (1 - np.cumsum(s.delays) / s.tokens)) for n, s in summaries.items()
    }
    title = "tokens that wait, in steps' worth" + (f", mean of {span}" if span > 1 else "")
    return [
        lines(title, "step", waiting, zero=True),
        lines("tokens that waited longer, %", "steps", later, zero=True, interpolate="step-after"),
    ]
