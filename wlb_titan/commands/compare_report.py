"""`wlb-titan compare --report DIR`: one HTML page, without anything that it would have to load."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from wlb_titan.commands.compare_rows import figure_rows, remarks, setting_rows
from wlb_titan.commands.report_page import needs_matplotlib, section, table, write_page
from wlb_titan.commands.run_folder import Run
from wlb_titan.timeline import Span, read_trace


def write_report(folder: Path, runs: Sequence[Run]) -> Path:
    """Draws runs side by side.

    Args:
        folder: made if it is not there.
        runs: the first is the baseline.

    Returns:
        The page's path.

    Raises:
        UserError: matplotlib is not installed, a trace cannot be read, or the folder cannot be written to.
    """
    with needs_matplotlib():
        from wlb_titan.commands import compare_figures as figures
        from wlb_titan.commands.pipeline_figure import pipeline_timeline
    settings = setting_rows(runs)
    sections = [
        section(
            "What differs",
            "All settings that are not the same in every run." if settings else "No setting.",
            table([_escaped(row) for row in settings]) if settings else "",
        ),
        section("Figures", " ".join(remarks(runs)), table([_escaped(row) for row in figure_rows(runs)])),
        section(
            "Loss",
            "By tokens is the fair one: policies train on different numbers of tokens in a step. Dots are "
            "validation passes.",
            figures.loss(runs),
        ),
        section("Speed", "Tokens of documents a second, over the whole job.", figures.speed(runs)),
        section(
            "Balance",
            "Imbalance is the largest over the mean work of a step's micro-batches, predicted by the plan "
            "and, in traced steps (wlb.trace_every), measured. The bubble is the share of time in which "
            "the pipeline's ranks run no pass.",
            figures.balance(runs),
        ),
        section(
            "Delay",
            "What balance costs: documents that wait for a step that can bear them.",
            figures.delay(runs),
        ),
    ]
    if timelines := traced_steps(runs):
        text = (
            "Measured passes of one step, to scale: a row is a rank, white is waiting, gold the loss. Times "
            "are relative to the work of a rank, for runs train on other documents in a step."
        )
        sections.insert(5, section("A step", text, pipeline_timeline(timelines)))
    if any(run.peak_memory() for run in runs):
        text = "The most of any rank of a pipeline stage; on a CPU Python and its libraries are in it."
        sections.append(section("Memory", text, figures.memory(runs)))
    cards = "".join(_card(run, figures.color(number)) for number, run in enumerate(runs))
    head = f"<h1>{len(runs)} runs side by side</h1><div class='cards'>{cards}</div>"
    return write_page(folder, "Runs: " + ", ".join(run.name for run in runs), head, sections)


def traced_steps(runs: Sequence[Run]) -> dict[str, list[Span]]:
    """The last step that all runs traced, or each its own last one; the first data-parallel rank's passes.

    Raises:
        UserError: a trace cannot be read.
    """
    traced = [run for run in runs if run.traces()]
    common = set.intersection(*(set(run.traces()) for run in traced)) if traced else set()
    timelines = {}
    for run in traced:
        step = max(common or run.traces())
        spans = read_trace(run.traces()[step])
        timelines[f"{run.name}, step {step}"] = [s for s in spans if s.process == spans[0].process]
    return timelines


def _card(run: Run, color: str) -> str:
    flops, imbalance = run.per_second("model_tflops"), run.mean("imbalance")
    bubble, error = run.mean("bubble"), run.error("model_tflops")
    rate = f"{flops:,.3g}" if flops is not None else f"{run.per_second('tokens_per_second'):,.0f}"
    what = "model TFLOP/s" if flops is not None else "tokens a second"
    what += f" ±{error:.1%}" if error is not None else ""
    facts = [f"imbalance {imbalance:.3f}"] if imbalance is not None else []
    facts += [f"bubble {bubble:.1%}"] if bubble is not None else []
    return (
        f'<div class="card" style="border-top-color: {color}"><b>{html.escape(run.name)}</b>'
        f"<strong>{rate}</strong><span>{what}</span><span>{', '.join(facts)}</span></div>"
    )


def _escaped(row: Mapping[str, str]) -> dict[str, str]:
    return {html.escape(heading): html.escape(cell) for heading, cell in row.items()}
