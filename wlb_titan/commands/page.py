"""The HTML pages: an answer, cards, what to try next, sections of tables and pictures.

A page is one file that opens without a network, drawn by the macros of `templates/page.html`. Pictures are
SVG, as wide as there is room; what stands under the pointer is a box's title. Their colours of text and lines
are the page's own variables, so they follow its light and dark look.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from wlb_titan.commands.command_line import Rows, describe_job, writing
from wlb_titan.documents import Documents
from wlb_titan.files import save
from wlb_titan.job import Job, Policy
from wlb_titan.simulator.choice import Choice
from wlb_titan.simulator.measured import Pass
from wlb_titan.simulator.step import Prediction
from wlb_titan.summary import Estimate

PASSES = {
    "F": ("forward", "#6aa5de"),
    "B": ("backward", "#2f5f98"),
    "FB": ("forward and backward", "#4486d1"),
    "I": ("backward of inputs", "#2f5f98"),
    "W": ("backward of weights", "#8fb3a5"),
    "R": ("recomputed", "#4a7fb5"),
    "L": ("loss", "#cc932f"),
}
"""Names of passes, and their colours."""

PARTS = {
    "attention": "#2f5f98",
    "products": "#4486d1",
    "element-wise": "#8fb3a5",
    "head": "#cc932f",
    "tensor parallelism": "#a06cc0",
    "context parallelism": "#c76f9f",
    "experts' exchange": "#d95f56",
    "launches": "#6fa64a",
    "kept states": "#4aa3b5",
    "recomputed": "#12967f",
    "slowest CP rank": "#e3b7ab",
    "waiting in the pipeline": "#c9ced6",
    "waiting for replicas": "#dfe2e7",
    "data parallelism": "#6b7480",
    "own dimensions": "#8b929c",
    "optimizer": "#b59a5b",
}
"""Parts of a step, and their colours; those of waiting are pale."""
Parts = Mapping[str, float]
"""Seconds of a step, as of `Prediction.parts`."""
SHOWN = 0.005  # share of a step from which a part is drawn and named

Curves = Mapping[str, tuple[Iterable[float], Iterable[float]]]
"""By name, the places on the axis and the values."""


@cache
def template(file: str) -> Template:
    """One of the files in `templates/`, of pages and of the files that a user goes on from; what is put into
    HTML is escaped."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=file.endswith(".html"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(file)


def _drawn(macro: str, *values: object) -> str:
    """HTML, escaped and not to be escaped again: what a macro of `page.html` makes of values."""
    drawn: str = getattr(template("page.html").module, macro)(*values)
    return drawn


def write_page(
    folder: Path,
    *,
    title: str,
    answer: str,
    about: str = "",
    cards: Rows,
    figure: str,
    facts: Sequence[str],
    tries: Sequence[tuple[str, str]] = (),
    sections: Iterable[str],
) -> Path:
    """Writes `folder`/report.html, and returns its path; the folder is made if need be.

    Args:
        about: small print below the answer, which is one sentence.
        cards: rows of a table in the palette's order; their first cells are the names.
        figure, facts: the heading of what matters most in a row, and those of what stands below it.
        tries: what to do next and why, and the command or the lines of TOML for it.
    """
    text = _drawn("page", title, answer, about, cards, figure, facts, tries, sections)
    path = folder / "report.html"
    with writing(f"--report: {path}"):
        save(path, text)
    return path


def write_turns(folder: Path, bench: tuple[Rows, str], turns: Sequence[str]) -> Path:
    """The page of benches without runs, with the cards and the answer of the first."""
    rows, answer = bench
    return write_page(
        folder,
        title="Policies in turns",
        answer=answer,
        cards=rows,
        figure="TFLOP/s",
        facts=("tokens/s", "imbalance", "bubble", "predicted"),
        sections=turns,
    )


def section(title: str, text: str, *bodies: str) -> str:
    """A titled box with text and HTML bodies; nothing without bodies."""
    return _drawn("section", title, text, bodies)


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions for all candidates."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))


def table(rows: Rows) -> str:
    """Rows with the same headings; nothing if there are none."""
    return _drawn("table", rows)


def lines(title: str, curves: Curves) -> str:
    """A line for each name; values that are not finite are left out."""
    points = {name: np.array([list(x), list(y)], dtype=float).T for name, (x, y) in curves.items()}
    points = {name: curve[np.isfinite(curve).all(axis=1)] for name, curve in points.items()}
    everything = np.concatenate(list(points.values()))
    if not len(everything):
        return ""
    low, high = everything.min(axis=0), everything.max(axis=0)
    extent = np.where(high > low, high - low, 1)
    shares = {name: ((curve - low) / extent).tolist() for name, curve in points.items()}
    grid = [(share, *map(_figure, low + share * extent)) for share in (0, 0.25, 0.5, 0.75, 1)]
    return _drawn("lines", title, shares, grid)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def pipelines(timelines: Mapping[str, Sequence[Pass]]) -> str:
    """A step's passes to scale: a picture for each policy or run, a row for each rank, a box for each pass
    with its micro-batch where there is room.

    Documents differ between policies, so times are relative to a rank's work.
    """
    works = {
        name: sum(p.seconds for p in step) / len({p.rank for p in step}) for name, step in timelines.items()
    }
    ends = {name: max(p.end for p in step) / works[name] for name, step in timelines.items()}
    pictures = []
    for name, step in timelines.items():
        seconds = works[name] * max(ends.values())
        ranks = sorted({p.rank for p in step}, key=lambda rank: (len(rank), rank))  # pp 2 before pp 10
        passes = [(PASSES[p.kind][0], ranks.index(p.rank), p) for p in step]
        colors = dict(PASSES[p.kind] for p in step)
        pictures.append((f"{name}: {1 - 1 / ends[name]:.1%} bubble", seconds, ranks, colors, passes))
    return _drawn("pipelines", pictures)


TIME = (
    "The average rank, predicted: a bar is as long as the same FLOPs take, and numbers are percent of it. "
    "Waiting, also for the slowest context-parallel rank, is pale."
)


def time_section(predictions: Mapping[Policy, Prediction], parts: Mapping[Policy, Parts]) -> str:
    """Bars of policies, for the FLOPs of the first policy's steps."""
    first = next(iter(predictions.values())).flops.mean()
    steps = {}
    for policy, prediction in predictions.items():
        factor = first / prediction.flops.mean()
        own = {part: seconds * factor for part, seconds in parts[policy].items()}
        steps[f"{policy}: {prediction.mfu:.1%} MFU"] = own
    return section("Where a step's time goes", TIME, bars(steps))


def in_parts(policy: Policy, parts: Parts) -> str:
    """What a policy's step goes to, in words."""
    whole = sum(parts.values())
    shares = sorted(((seconds / whole, part) for part, seconds in parts.items()), reverse=True)
    named = [f"{part} {share:.1%}" for share, part in shares if share >= SHOWN]
    return f"Of {policy}'s step: {', '.join(named)}."


def bars(steps: Mapping[str, Parts]) -> str:
    """A bar for each policy or run, below its name, in boxes with the share of each part in percent.

    Args:
        steps: seconds of the parts of a step, for the same FLOPs.
    """
    longest = max(sum(parts.values()) for parts in steps.values())
    boxes, colors = [], {}
    for row, parts in enumerate(steps.values()):
        begin, whole = 0.0, sum(parts.values())
        for part in filter(parts.get, PARTS):
            share = parts[part] / whole
            if share >= SHOWN:
                box = Pass("", 0, round(100 * share), begin, parts[part])
                boxes.append((part, 2 * row + 1, box))
                colors[part] = PARTS[part]
            begin += parts[part]
    names = [line for name in steps for line in (name, "")]
    return _drawn("pipelines", [("Seconds for the same FLOPs", longest, names, colors, boxes)])


def described(job: Job, documents: Documents) -> tuple[str, str]:
    """The corpus' name without its folder, as pages are shared, and the job and documents in words."""
    name = Path(documents.name).name
    return name, describe_job(job, replace(documents, name=name))


def try_next(name: str, typed: Sequence[str], *more: str) -> str:
    """A command for the same job, to be called in this folder; paths in it are relative. `typed` is a TOML
    file, with overrides and options that the command has too."""
    below = f"{Path.cwd()}/"
    return shlex.join(["wlb-titan", name, *(word.removeprefix(below) for word in typed), *more])


def gained(best: str, ratio: Estimate, base: str, what: str = "FLOPs") -> str:
    """The first half of a sentence: what the best gains over the baseline."""
    if best == base:
        return f"Nothing here does more {what} a second than {base}"
    return f"{best} does {ratio.text('.2f', 'x')} the {what} a second of {base}{ratio.scatter}"


def cost(bubble: float | None, imbalance: float | None) -> str:
    """The second half: what still takes the most time."""
    if bubble is not None and bubble >= 0.1:
        return f"the largest remaining cost is the pipeline bubble ({bubble:.0%})."
    if imbalance is not None and imbalance >= 1.05:
        return f"the largest remaining cost is the imbalance ({imbalance:.2f})."
    return "balancing has little left to gain."
