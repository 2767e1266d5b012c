"""`wlb-titan simulate --report DIR`: one HTML page, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from wlb_titan.commands.job import describe_job
from wlb_titan.commands.report_page import choice_section, needs_matplotlib, section, table, write_page
from wlb_titan.commands.simulate_rows import remarks, table_rows
from wlb_titan.plan import Plan
from wlb_titan.policies import Policy
from wlb_titan.simulator.choice import Choice
from wlb_titan.simulator.scenario import Scenario
from wlb_titan.simulator.step import Prediction
from wlb_titan.simulator.timeline import MemoryCurve
from wlb_titan.timeline import Span

Step = tuple[list[Span], list[MemoryCurve]]


def write_report(
    folder: Path,
    scenario: Scenario,
    plans: dict[Policy, list[Plan]],
    predictions: dict[Policy, Prediction],
    steps: Mapping[Policy, Step],
    choices: Sequence[Choice],
) -> Path:
    """Draws what was simulated.

    Args:
        folder: made if it is not there.
        scenario: documents and job.
        plans, predictions: of each policy, the baseline first.
        steps: timeline and memory of a typical step of each policy.
        choices: what `auto` stands for in a policy, where it does.

    Returns:
        The page's path.

    Raises:
        PlanError: matplotlib is not installed, or the folder cannot be written to.
    """
    with needs_matplotlib():
        from wlb_titan.commands import simulate_figures as figures
        from wlb_titan.commands.pipeline_figure import pipeline_timeline
    sections = [
        *map(choice_section, choices),
        section("Policies", " ".join(remarks(predictions)), table(table_rows(scenario, plans, predictions))),
        section(
            "Where the time of a step goes",
            "Mean over the simulated steps. A rank computes, or it waits for others.",
            figures.step_parts(predictions),
        ),
        section(
            "Timeline of a typical step",
            "The slowest data-parallel replica. A row is a pipeline rank, a box a pass of one micro-batch.",
            pipeline_timeline({str(policy): spans for policy, (spans, _) in steps.items()}),
        ),
        section(
            "Activations over that step",
            "GiB on one GPU of each pipeline rank, at the end of each pass.",
            figures.memory_curves({str(policy): curves for policy, (_, curves) in steps.items()}),
        ),
        section(
            "Peak memory",
            "By pipeline rank, the largest of all simulated steps; the line is what a GPU has.",
            figures.peak_memory(predictions),
        ),
    ]
    described = html.escape(describe_job(scenario.job, scenario.documents))
    head = f"<h1>What balance is worth here</h1><p>{described}</p>"
    return write_page(folder, f"Simulation of {scenario.documents.name}", head, sections)
