"""`wlb-titan plan --report DIR`: one HTML page, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from wlb_titan.commands.job import describe_job
from wlb_titan.commands.plan_rows import table_row
from wlb_titan.commands.rank_report import RankTimes, rank_heat_map
from wlb_titan.commands.report_page import choice_section, needs_matplotlib, section, table, write_page
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.pipeline.schedule import SCHEDULES
from wlb_titan.simulator.choice import Choice
from wlb_titan.summary import Summary


def write_report(
    folder: Path,
    jobs: Sequence[Job],
    documents: Documents,
    summaries: Mapping[str, Summary],
    times: Sequence[RankTimes] | None,
    choices: Sequence[Choice],
) -> Path:
    """Draws what was planned.

    Args:
        folder: made if it is not there.
        jobs: what was planned, under each packing policy.
        documents: on which.
        summaries: of each policy; `plain` is the picture before.
        times: of the context-parallel ranks under each sharding policy; None without context parallelism.
        choices: what `auto` stands for in a job, where it does.

    Returns:
        The page's path.

    Raises:
        PlanError: matplotlib is not installed, or the folder cannot be written to.
    """
    with needs_matplotlib():
        from wlb_titan.commands import plan_figures as figures
        from wlb_titan.commands.pipeline_figure import pipeline_timeline, planned_timelines
    job = jobs[-1]
    batch_tokens = job.micro_batches * job.window
    rows = [{"policy": name, **table_row(summary)} for name, summary in summaries.items()]
    sections = [
        section(
            "Work of every micro-batch",
            "A bar is a step. Its pale part is the mean work of the step's micro-batches, the red part above "
            "it the time in which all others wait for the largest; dots are the micro-batches.",
            figures.workloads(summaries),
        ),
        section(
            "Imbalance",
            "The largest over the mean work of a step's micro-batches. 1 is perfect; 1.44 means that each "
            "step takes 44 % longer than it has to.",
            figures.imbalance(summaries),
        ),
        section(
            "Delay",
            "What balance costs: documents that wait for a step that can bear them. At most "
            f"{batch_tokens:,} tokens arrive in a step.",
            figures.delay(summaries, batch_tokens),
        ),
        section(
            "Documents",
            "Few documents are long, but they hold many of the tokens, and attention is quadratic in length.",
            figures.length_histogram(documents.sample(), job.window),
        ),
        section("All figures", "Delays in iterations, weighted by tokens.", table(rows)),
    ]
    sections = [choice_section(choice) for choice in choices] + sections
    if times is not None:
        ranks = section(
            "Context-parallel ranks",
            "Predicted attention time of each rank (a row) in each micro-batch (a column), relative to the "
            "mean of the micro-batch's ranks, under every sharding policy. An even colour is balance. "
            f"Attention by {job.latency.source}.",
            figures.svg(rank_heat_map(times)),
        )
        sections.insert(-1, ranks)
    if job.degrees.pipeline > 1 and job.schedule in SCHEDULES:
        steps = len(next(iter(summaries.values())).imbalance)
        timeline = section(
            "Pipeline",
            f"Predicted passes of one step through {job.degrees.pipeline} ranks under {job.schedule}, "
            "to scale: a row is a rank, a box a pass, white is waiting. "
            "Policies train on other documents in a step, so times are relative to the work of a rank.",
            pipeline_timeline(planned_timelines(jobs, documents, steps)),
        )
        sections.insert(1, timeline)
    cards = "".join(_card(name, figures.color_of(name), summary) for name, summary in summaries.items())
    described = html.escape(describe_job(job, documents))
    head = (
        f"<h1>How {html.escape(Path(documents.name).name)} packs</h1><p>{described}</p>"
        f'<div class="cards">{cards}</div>'
    )
    return write_page(folder, f"Packing of {documents.name}", head, sections)


def _card(name: str, color: str, summary: Summary) -> str:
    figures = summary.figures()
    waste = 1 - 1 / figures["imbalance_mean"]
    return (
        f'<div class="card" style="border-top-color: {color}"><b>{name}</b>'
        f"<strong>{figures['imbalance_mean']:.3f}</strong><span>imbalance: {waste:.1%} of the time is waiting"
        f"</span><span>delay {figures['delay_mean']:.2f} iterations</span></div>"
    )
