"""`wlb-titan plan --report DIR`: one HTML page, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from wlb_titan.commands.plan import table_row
from wlb_titan.commands.plan_job import Job
from wlb_titan.commands.rank_report import RankTimes, rank_heat_map
from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.pipeline_schedule import SCHEDULES
from wlb_titan.planner.summary import Summary

STYLE = """
:root { --ink: #20242b; --soft: #5b616b; --line: #e4e7eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--soft); max-width: 76ch; }
section { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 24px; margin-top: 20px; }
svg { width: 100%; height: auto; display: block; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 16px; margin-top: 24px; }
.card { background: #fff; border: 1px solid var(--line); border-top: 4px solid; border-radius: 12px; padding: 16px 18px; }
.card b { display: block; font-size: 14px; }
.card strong { font-size: 34px; font-weight: 650; letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: 13px; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: right; color: var(--soft); font-weight: 500; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""  # noqa: E501


def write_report(
    folder: Path, job: Job, summaries: Mapping[str, Summary], times: Sequence[RankTimes] | None
) -> Path:
    """Draws what was planned.

    Args:
        folder: made if it is not there.
        job: what was planned.
        summaries: of each policy; `plain` is the picture before.
        times: of the context-parallel ranks under each sharding policy; None without context parallelism.

    Returns:
        The page's path.

    Raises:
        PlanError: matplotlib is not installed, or the folder cannot be written to.
    """
    try:
        from wlb_titan.commands import plan_figures as figures
        from wlb_titan.commands.pipeline_figure import pipeline_timeline, planned_timelines
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise PlanError(
            "A report needs matplotlib. Install it with: pip install 'wlb-titan[report]'"
        ) from error
    batch_tokens = job.micro_batches * job.window
    sections = [
        _section(
            "Work of every micro-batch",
            "A bar is a step. Its pale part is the mean work of the step's micro-batches, the red part above "
            "it the time in which all others wait for the largest; dots are the micro-batches.",
            figures.workloads(summaries),
        ),
        _section(
            "Imbalance",
            "The largest over the mean work of a step's micro-batches. 1 is perfect; 1.44 means that each "
            "step takes 44 % longer than it has to.",
            figures.imbalance(summaries),
        ),
        _section(
            "Delay",
            "What balance costs: documents that wait for a step that can bear them. At most "
            f"{batch_tokens:,} tokens arrive in a step.",
            figures.delay(summaries, batch_tokens),
        ),
        _section(
            "Documents",
            "Few documents are long, but they hold many of the tokens, and attention is quadratic in length.",
            figures.length_histogram(job.lengths, job.window),
        ),
        _section("All figures", "Delays in iterations, weighted by tokens.", _table(summaries)),
    ]
    if times is not None:
        ranks = _section(
            "Context-parallel ranks",
            "Predicted attention time of each rank (a row) in each micro-batch (a column), relative to the "
            "mean of the micro-batch's ranks, under every sharding policy. An even colour is balance. "
            f"Attention by {html.escape(job.latency.source)}.",
            figures.svg(rank_heat_map(times)),
        )
        sections.insert(-1, ranks)
    if job.pipeline is not None and job.pipeline.shape.schedule in SCHEDULES:
        steps = len(next(iter(summaries.values())).imbalance)
        timeline = _section(
            "Pipeline",
            f"Predicted passes of one step through {job.pipeline.shape.ranks} ranks under "
            f"{job.pipeline.shape.schedule}, to scale: a row is a rank, a box a pass, white is waiting. "
            "Policies train on other documents in a step, so times are relative to the work of a rank.",
            pipeline_timeline(planned_timelines(job, list(summaries), steps)),
        )
        sections.insert(1, timeline)
    cards = "".join(_card(name, figures.COLORS[name], summary) for name, summary in summaries.items())
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Packing of {html.escape(job.source)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>How {html.escape(Path(job.source).name)} packs</h1><p>{html.escape(job.describe())}</p>"
        f'<div class="cards">{cards}</div>{"".join(sections)}</main></body></html>\n'
    )
    path = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"The report cannot be written to {folder}: {error.strerror}.") from error
    return path


def _card(name: str, color: str, summary: Summary) -> str:
    figures = summary.figures()
    waste = 1 - 1 / figures["imbalance_mean"]
    return (
        f'<div class="card" style="border-top-color: {color}"><b>{name}</b>'
        f"<strong>{figures['imbalance_mean']:.3f}</strong><span>imbalance: {waste:.1%} of the time is waiting"
        f"</span><span>delay {figures['delay_mean']:.2f} iterations</span></div>"
    )


def _section(title: str, text: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p>{text}</p><div class="scroll">{body}</div></section>'


def _table(summaries: Mapping[str, Summary]) -> str:
    rows = {name: table_row(summary) for name, summary in summaries.items()}
    headings = "".join(f"<th>{heading}</th>" for heading in next(iter(rows.values())))
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells.values())}</tr>"
        for name, cells in rows.items()
    )
    return f"<table><tr><th>policy</th>{headings}</tr>{body}</table>"
