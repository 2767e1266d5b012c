"""`wlb-titan plan` about policies: rows for the console, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.commands.report.charts import (
    PALETTE,
    bars,
    chart,
    color,
    colors,
    hover,
    line_at,
    lines,
    number,
)
from wlb_titan.commands.report.estimate import Estimate
from wlb_titan.commands.report.page import (
    Card,
    Try,
    choice_section,
    command,
    described,
    section,
    table,
    write_page,
)
from wlb_titan.commands.report.pipeline import pipeline_charts
from wlb_titan.commands.report.ranks import RankTimes, heat_maps, rank_rows
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.pipeline.schedule import SCHEDULES
from wlb_titan.policies import Policy
from wlb_titan.simulator.choice import Choice
from wlb_titan.simulator.timeline import step_timeline
from wlb_titan.summary import Summary
from wlb_titan.timeline import Span

FEW_STEPS = 100  # fewer carry their standard error in the table
STEP_SHOWN = 10  # queues have filled
STEPS_SHOWN = 60  # of the workloads; more become a blur
NEAR = 0.01  # imbalances that are as good as the same


def table_row(summary: Summary) -> dict[str, str]:
    """Headings and cells of one policy, as the console and the page show them."""
    figures, imbalance = summary.figures(), Estimate.mean(summary.imbalance)
    if len(summary.imbalance) >= FEW_STEPS:
        imbalance = Estimate(imbalance.value)
    return {
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


def write_report(
    folder: Path,
    jobs: Sequence[Job],
    documents: Documents,
    summaries: Mapping[str, Summary],
    times: Sequence[RankTimes] | None,
    choices: Sequence[Choice],
    typed: Sequence[str],
) -> Path:
    """Draws what was planned.

    Args:
        jobs: what was planned, under each packing policy.
        summaries: summary of each policy; `plain` is the picture before.
        times: times of the context-parallel ranks by sharding policy; None without context parallelism.
        choices: what `auto` stands for in a job, where it does.
        typed: what the command line names, as of `page.command`.
    """
    job = jobs[-1]
    imbalances = {name: Estimate.mean(one.imbalance) for name, one in summaries.items()}
    waits = {name: f"{1 - 1 / one.value:.1%}" for name, one in imbalances.items()}
    least = min(one.value for one in imbalances.values())
    near = [name for name, one in imbalances.items() if one.value <= least + NEAR]
    best, first = min(near, key=lambda name: summaries[name].delay), next(iter(summaries))
    answer = f"Under {best} GPUs wait {waits[best]} of the time for the largest micro-batch"
    if best != first:
        answer += f", under {first} {waits[first]}; for it a token waits {summaries[best].delay:.2f} steps"
    rows = [{"policy": name, **table_row(one)} for name, one in summaries.items()]
    sections = [
        *map(choice_section, choices),
        section("Work of every micro-batch", WORK, *_workloads(summaries)),
        section("Imbalance", IMBALANCE, bars("imbalance", imbalances, begin=1), *_imbalance(summaries)),
        section("Delay", DELAY, *_delay(summaries, job.micro_batches * job.window)),
        section("Documents", LENGTHS, _lengths(documents.sample(), job.window)),
        section("All figures", "", table(rows)),
    ]
    if job.degrees.pipeline > 1 and job.schedule in SCHEDULES:
        timelines = planned_timelines(jobs, documents, len(summaries[best].imbalance))
        sections.insert(len(choices) + 1, section("Pipeline", PIPELINE, pipeline_charts(timelines)))
    if times is not None:
        sections.append(section("Context-parallel ranks", RANKS + job.latency.source, *heat_maps(times)))
        sections.append(section("Context parallelism", "", table(rank_rows(times, job))))
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
                    f"{one.cut:.1%} of the tokens cut off from what is before them",
                    f"a token waits {one.delay:.2f} steps",
                ),
            )
            for name, one in summaries.items()
        ],
        tries=[
            Try("What that is worth in time and memory:", command("simulate", typed)),
            Try("To train so, in the TOML file:", f'[wlb.packing]\npolicy = "{best}"'),
        ],
        sections=sections,
    )


WORK = "Pale: the mean work of a step's micro-batches, the dots. Red: what all others wait for the largest."
IMBALANCE = "Largest over mean work of a step's micro-batches; 1 is perfect. The line is the standard error."
DELAY = "What balance costs: documents that wait for a step that can bear them."
LENGTHS = "Few documents are long, but they hold many of the tokens, and attention is quadratic in length."
PIPELINE = "A step's passes, predicted: a row is a rank, a box a pass. Time is over the work of a rank."
RANKS = "Attention time of each rank (a row) in each micro-batch (a column), over the mean of its ranks, by "


def planned_timelines(jobs: Sequence[Job], documents: Documents, steps: int) -> dict[str, list[Span]]:
    """One step's passes, predicted, first under `plain` as it was packed: of the replica that takes longest.

    Args:
        jobs: with a pipeline, under each packing policy.
        steps: the last of so many is taken, or the tenth.
    """
    before = jobs[0].under(Policy("plain", jobs[0].sharding.name))
    variants = {"plain, as_packed": before} | {f"{job.packing.name}, {job.order.name}": job for job in jobs}
    timelines = {}
    for name, job in variants.items():
        (plan,) = job.plans(documents, 1, after=min(steps, STEP_SHOWN) - 1)
        timelines[name], _ = step_timeline(job, plan, name)
    return timelines


def _workloads(summaries: Mapping[str, Summary]) -> list[str]:
    """Every micro-batch's work, step by step, a chart a policy, on one scale."""
    mean = np.mean([summary.workloads.mean() for summary in summaries.values()])
    works = {name: summary.workloads[:STEPS_SHOWN] / mean for name, summary in summaries.items()}
    top = max(float(work.max()) for work in works.values())
    return [_work_of_steps(name, work, color(i), top) for i, (name, work) in enumerate(works.items())]


def _work_of_steps(name: str, work: Floats, its: str, top: float) -> str:
    """What each step computes, and above it what it waits: the gap between the mean and the largest."""
    steps = [
        {
            "step": step,
            "mean": own.mean(),
            "largest": own.max(),
            "waiting": f"{1 - own.mean() / own.max():.1%}",
        }
        for step, own in enumerate(work)
    ]
    shown = work if work.shape[1] <= 16 else np.quantile(work, np.linspace(0, 1, 17), axis=1).T
    dots = [{"step": step, "work": w} for step, own in enumerate(shown.tolist()) for w in own]
    axis: dict[str, Any] = {"title": "work / mean", "domain": [0, top]}
    bar = {"type": "bar", "width": {"expr": f"0.8 * width / {len(work)}"}}
    encoding = {"y": number("mean", **axis), "tooltip": hover("step", "mean", "largest", "waiting")}
    beyond = {
        "mark": {**bar, "color": PALETTE[5], "opacity": 0.6},
        "encoding": encoding | {"y2": {"field": "largest"}},
    }
    layers = [{"mark": {**bar, "color": its, "opacity": 0.35}, "encoding": encoding}, beyond]
    circle = {"type": "circle", "size": 9, "color": its, "opacity": 1, "tooltip": True}
    x = number("step", "step", domain=[-0.7, len(work) - 0.3], nice=False)
    layers = [{"data": {"values": steps}, **layer} for layer in layers]
    layers.append({"data": {"values": dots}, "mark": circle, "encoding": {"y": number("work", **axis)}})
    return chart(name, {"encoding": {"x": x}, "layer": layers}, 130)


def _imbalance(summaries: Mapping[str, Summary]) -> list[str]:
    """Step by step, and how it is distributed."""
    ordered = {n: (np.linspace(0, 100, len(s.imbalance)), np.sort(s.imbalance)) for n, s in summaries.items()}
    steps = _smooth("step by step", {name: one.imbalance for name, one in summaries.items()})
    return [steps, lines("sorted", "% of steps", ordered)]


def _delay(summaries: Mapping[str, Summary], batch_tokens: int) -> list[str]:
    """What waits after each step, and how long tokens have waited when they are trained."""
    waiting = {name: one.waiting / batch_tokens for name, one in summaries.items()}
    later = {
        n: (range(len(s.delays)), 100 * (1 - np.cumsum(s.delays) / s.tokens)) for n, s in summaries.items()
    }
    return [
        _smooth("tokens that wait, in steps' worth", waiting, zero=True),
        lines("tokens that waited longer, %", "steps", later, zero=True, interpolate="step-after"),
    ]


def _smooth(title: str, values: Mapping[str, Floats], *, zero: bool = False) -> str:
    """Of all steps, or of many their moving average."""
    span = max(len(next(iter(values.values()))) // 20, 1)
    smooth = {name: np.convolve(own, np.full(span, 1 / span), "valid") for name, own in values.items()}
    curves = {name: (np.arange(len(own)) + (span - 1) / 2, own) for name, own in smooth.items()}
    return lines(title + (f", mean of {span}" if span > 1 else ""), "step", curves, zero=zero)


def _lengths(lengths: Ints, window: int) -> str:
    """How many documents there are of each length, and how many of all tokens they hold."""
    top = int(np.ceil(np.log2(max(int(lengths.max()), window)))) + 1
    bins = 2.0 ** np.arange(int(np.floor(np.log2(max(int(lengths.min()), 1)))), top + 0.5, 0.5)
    counted = {
        "of all documents": np.histogram(lengths, bins)[0] / len(lengths),
        "of all tokens": np.histogram(lengths, bins, weights=lengths)[0] / lengths.sum(),
    }
    rows = [
        {"share": name, "from": low, "to": high, "%": 100 * share, "none": 0}
        for name, shares in counted.items()
        for low, high, share in zip(bins, bins[1:], shares, strict=False)
    ]
    x = number("from", "tokens of a document; the line is the context window", type="log", nice=False)
    x["axis"] = {"format": "~s", "values": [10**n for n in range(12)]}
    y = {"y": number("%", "%"), "y2": {"field": "none"}, "color": colors("share", counted)}
    bar = {
        "data": {"values": rows},
        "mark": {"type": "rect", "opacity": 0.6},
        "encoding": {"x": x, "x2": {"field": "to"}, **y, "tooltip": hover("share", "from", "to", "%")},
    }
    return chart("", {"layer": [bar, line_at(window)]}, 230)
