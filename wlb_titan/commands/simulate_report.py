"""`wlb-titan simulate --report DIR`: one HTML page, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

from wlb_titan.commands.plan_report import STYLE
from wlb_titan.commands.simulate import describe, remarks, table_rows
from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.plan import Plan
from wlb_titan.simulator.scenario import Policy, Scenario
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.timeline import MemoryCurve
from wlb_titan.timeline import Slice

Step = tuple[list[Slice], list[MemoryCurve]]


def write_report(
    folder: Path,
    scenario: Scenario,
    plans: dict[Policy, list[Plan]],
    predictions: dict[Policy, Prediction],
    steps: Mapping[Policy, Step],
) -> Path:
    """Draws what was simulated.

    Args:
        folder: made if it is not there.
        scenario: documents and job.
        plans, predictions: of each policy, the baseline first.
        steps: timeline and memory of a typical step of each policy.

    Returns:
        The page's path.

    Raises:
        PlanError: matplotlib is not installed, or the folder cannot be written to.
    """
    try:
        from wlb_titan.commands import simulate_figures as figures
        from wlb_titan.commands.pipeline_figure import pipeline_timeline
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise PlanError(
            "A report needs matplotlib. Install it with: pip install 'wlb-titan[report]'"
        ) from error
    sections = [
        _section(
            "Policies", " ".join(remarks(predictions)), _table(table_rows(scenario, plans, predictions))
        ),
        _section(
            "Where the time of a step goes",
            "Mean over the simulated steps. A rank computes, or it waits for others.",
            figures.step_parts(predictions),
        ),
        _section(
            "Timeline of a typical step",
            "The slowest data-parallel replica. A row is a pipeline rank, a box a pass of one micro-batch.",
            pipeline_timeline({str(policy): slices for policy, (slices, _) in steps.items()}),
        ),
        _section(
            "Activations over that step",
            "GiB on one GPU of each pipeline rank, at the end of each pass.",
            figures.memory_curves({str(policy): curves for policy, (_, curves) in steps.items()}),
        ),
        _section(
            "Peak memory",
            "By pipeline rank, the largest of all simulated steps; the line is what a GPU has.",
            figures.peak_memory(predictions),
        ),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Simulation of {html.escape(scenario.source)}</title><style>{STYLE}</style></head>"
        "<body><main>"
        f"<h1>What balance is worth here</h1><p>{html.escape(describe(scenario))}</p>"
        f"{''.join(sections)}</main></body></html>\n"
    )
    path = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"The report cannot be written to {folder}: {error.strerror}.") from error
    return path


def _section(title: str, text: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p>{html.escape(text)}</p><div class="scroll">{body}</div></section>'


def _table(rows: list[dict[str, str]]) -> str:
    headings = "".join(f"<th>{heading}</th>" for heading in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.values())}</tr>" for row in rows)
    return f"<table><tr>{headings}</tr>{body}</table>"
