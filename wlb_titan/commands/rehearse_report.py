"""`wlb-titan rehearse --report DIR`: one HTML page, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from wlb_titan.commands.job import describe_job
from wlb_titan.commands.rehearse_rows import Rehearsal, rank_lines, table_rows
from wlb_titan.commands.report_page import needs_matplotlib, section, table, write_page
from wlb_titan.simulator.timeline import step_timeline
from wlb_titan.timeline import Span

HEAD = "What was measured here of a job of many devices"


def write_report(folder: Path, results: Sequence[Rehearsal]) -> Path:
    """Draws what was rehearsed.

    Args:
        folder: made if it is not there.
        results: of each policy, the baseline first.

    Returns:
        The page's path.

    Raises:
        PlanError: matplotlib is not installed, or the folder cannot be written to.
    """
    with needs_matplotlib():
        from wlb_titan.commands.pipeline_figure import pipeline_timeline
    ran = [one for one in results if one.rehearsed is not None]
    sections = []
    if ran:
        timelines: dict[str, list[Span]] = {}
        for one in ran:
            timelines[f"{one.policy}, rehearsed"] = typical_step(one, measured=True)
            timelines[f"{one.policy}, predicted"] = typical_step(one, measured=False)
        sections = [
            section(
                "Steps put together",
                "Passes as measured, communication as the cluster's file has it; ± is the standard error of "
                "these steps. Predicted: the same steps without a measurement.",
                table(table_rows(results)),
            ),
            section(
                "A typical step",
                "A row is a pipeline rank, a box a pass of one micro-batch. Rehearsed: strong boxes were "
                "measured, pale ones take the time of a like pass that was.",
                pipeline_timeline(timelines),
            ),
        ]
    for one in results:
        rows = [
            {"rank": str(r["rank"]), "what it ran": html.escape(" ".join(rank_lines(r)))} for r in one.ranks
        ]
        sections.append(section(html.escape(one.policy), "Each rank ran alone.", table(rows)))
    described = html.escape(describe_job(results[0].job, results[0].documents))
    return write_page(folder, HEAD, f"<h1>{HEAD}</h1><p>{described}</p>", sections)


def typical_step(one: Rehearsal, *, measured: bool) -> list[Span]:
    """The slowest replica's passes in the step that comes nearest to the mean of those rehearsed."""
    assert one.rehearsed is not None and one.measured is not None
    seconds = one.rehearsed.seconds
    number = int(abs(seconds - seconds.mean()).argmin())
    passes = one.measured.of([number]) if measured else None
    spans, _ = step_timeline(one.job, one.plans[number], one.policy, measured=passes)
    return spans
