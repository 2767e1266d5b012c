"""The HTML pages: an answer, cards, what to try next, sections of tables and pictures.

A page is one file that opens without a network. Pictures are SVG, as wide as there is room; what stands under
the pointer is a box's title. Their colours of text and lines are the page's own variables, so they follow its
light and dark look.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.commands.command_line import PAGE, Rows, describe_job, writing
from wlb_titan.simulator.trace import Span
from wlb_titan.summary import Estimate

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.job import Job
    from wlb_titan.simulator.choice import Choice

STYLE = Path(__file__).with_name("style.css")
PALETTE = ("#8b929c", "#12967f", "#4486d1", "#cc932f", "#a06cc0", "#d95f56", "#6fa64a", "#c76f9f", "#4aa3b5")
"""For policies and runs, on white and on dark; the first is the baseline's."""

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

HEIGHT, LINE = 200, 24  # pixels: of a chart of lines, and of a rank in a pipeline
NAMES = 8  # percent of a pipeline's width that the names of its ranks have
DIGIT = 0.9  # percent of it that a digit takes
OUTLINED = 0.3  # percent of it from which a pass has an outline, which would hide narrower ones

Curves = Mapping[str, tuple[Iterable[float], Iterable[float]]]
"""By name, the places on the axis and the values."""


def write_page(
    folder: Path,
    *,
    title: str,
    answer: str,
    about: str = "",
    cards: Rows,
    figure: str,
    facts: Sequence[str],
    tries: Sequence[tuple[str, str]],
    sections: Iterable[str],
) -> Path:
    """Writes `folder`/report.html, and returns its path; the folder is made if need be.

    Args:
        about: small print below the answer, which is one sentence.
        cards: rows of a table in the palette's order; their first cells are the names.
        figure, facts: the heading of what matters most in a row, and those of what stands below it.
        tries: what to do next and why, and the command or the lines of TOML for it.
    """
    shown = "".join(_card(row, figure, facts, _color(place)) for place, row in enumerate(cards))
    commands = "".join(f"<p>{_safe(why)}</p><pre>{_safe(what)}</pre>" for why, what in tries)
    text = (
        f'{PAGE}content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE.read_text()}</style></head><body><main>"
        f'<h1>{_safe(title)}</h1><p class="answer">{_safe(answer)}</p><p class="about">{_safe(about)}</p>'
        f'<div class="cards">{shown}</div>'
        f"{section('Try next', '', commands)}{''.join(sections)}</main></body></html>\n"
    )
    path = folder / "report.html"
    with writing(f"--report: {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def write_turns(folder: Path, bench: tuple[Rows, str], turns: Sequence[str]) -> Path:
    """The page of benches without runs, with the cards and the answer of the first."""
    return write_page(
        folder,
        title="Policies in turns",
        answer=bench[1],
        cards=bench[0],
        figure="TFLOP/s",
        facts=("tokens/s", "imbalance", "bubble", "predicted"),
        tries=[],
        sections=turns,
    )


def _safe(text: str) -> str:
    """As HTML; policies' names may be broken after a slash."""
    return html.escape(text).replace("/", "/<wbr>")


def _color(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _card(row: Mapping[str, str], figure: str, facts: Sequence[str], color: str) -> str:
    name = next(iter(row.values()))
    value, _, error = row[figure].partition(" ")
    lines_ = [figure, *(f"{fact} {row[fact]}" for fact in facts if fact in row)]
    return (
        f'<div class="card" style="--its: {color}"><b>{_safe(name)}</b>'
        f"<strong>{_safe(value)} <small>{_safe(error)}</small></strong>"
        + "".join(f"<span>{_safe(line)}</span>" for line in lines_)
        + "</div>"
    )


def section(title: str, text: str, *bodies: str) -> str:
    """A titled box with text and HTML bodies; nothing without bodies."""
    shown = "".join(bodies)
    said = text and f"<p>{_safe(text)}</p>"
    return f"<section><h2>{html.escape(title)}</h2>{said}{shown}</section>" if shown else ""


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions for all candidates."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))


def table(rows: Rows) -> str:
    """Rows with the same headings, on a phone each as a list; nothing if there are none."""
    if not rows:
        return ""
    top = "".join(f"<th>{_safe(heading)}</th>" for heading in rows[0])
    body = "".join(f"<tr>{''.join(_cell(*cell) for cell in row.items())}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(heading: str, cell: str) -> str:
    kind = ' class="text"' if len(cell) > 40 else ""
    return f'<td data-label="{html.escape(heading)}"{kind}>{_safe(cell)}</td>'


def lines(title: str, curves: Curves) -> str:
    """A line for each name; values that are not finite are left out."""
    points = {name: np.array([list(x), list(y)], dtype=float).T for name, (x, y) in curves.items()}
    points = {name: curve[np.isfinite(curve).all(axis=1)] for name, curve in points.items()}
    everything = np.concatenate(list(points.values()))
    if not len(everything):
        return ""
    low, high = everything.min(axis=0), everything.max(axis=0)
    extent = np.where(high > low, high - low, 1)
    shapes = [_grid(share, low + share * extent) for share in (0, 0.25, 0.5, 0.75, 1)]
    for place, curve in enumerate(points.values()):
        ends = [(f"{100 * x:.2f}%", f"{HEIGHT * (1 - y):.1f}") for x, y in (curve - low) / extent]
        shapes.append(f'<g stroke="{_color(place)}">')
        shapes += [
            f'<line class="curve" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
            for (x1, y1), (x2, y2) in pairwise(ends)
        ]
        shapes.append("</g>")
    return _picture(title, HEIGHT + 18, shapes, {name: _color(place) for place, name in enumerate(points)})


def _grid(share: float, point: Floats) -> str:
    """A line and its value on each axis, at this share of them."""
    x, y = (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" for value in point)
    height = HEIGHT * (1 - share)
    place = "first" if share == 0 else "last" if share == 1 else "middle"
    return (
        f'<line x2="100%" y1="{height:g}" y2="{height:g}"/><text y="{height - 3:g}">{y}</text>'
        f'<text class="{place}" x="{share:.0%}" y="{HEIGHT + 14}">{x}</text>'
    )


def pipelines(timelines: Mapping[str, Sequence[Span]]) -> str:
    """A step's passes to scale: a picture for each policy or run, a row for each rank, a box for each pass.

    Documents differ between policies, so times are relative to a rank's work.
    """
    works = {
        name: sum(s.duration for s in step) / len({s.track for s in step}) for name, step in timelines.items()
    }
    ends = {name: max(s.start + s.duration for s in step) / works[name] for name, step in timelines.items()}
    return "".join(
        _pipeline(f"{name}: {1 - 1 / ends[name]:.1%} bubble", step, works[name] * max(ends.values()))
        for name, step in timelines.items()
    )


def _pipeline(title: str, spans: Sequence[Span], seconds: float) -> str:
    """One picture, as wide as `seconds`."""
    tracks = sorted({s.track for s in spans}, key=lambda track: (len(track), track))  # pp 2 before pp 10
    kinds = dict(PASSES[_kind(span)] for span in spans)
    shapes = [f'<text y="{LINE * row + 15}">{html.escape(track)}</text>' for row, track in enumerate(tracks)]
    percent = (100 - NAMES) / seconds
    for span in spans:
        left, width = NAMES + percent * span.start, percent * span.duration
        shapes.append(_box(span, left, width, LINE * tracks.index(span.track)))
    return _picture(title, LINE * len(tracks), shapes, kinds)


def _box(span: Span, left: float, width: float, top: float) -> str:
    """A pass: its colour, its micro-batch where there is room, and all of it under the pointer."""
    name, color = PASSES[_kind(span)]
    number = span.name.removeprefix(_kind(span))
    facts = {"ms": f"{span.duration * 1e3:.4g}", **span.args}
    title = "\n".join([f"{name} {number}", *(f"{key}: {value}" for key, value in facts.items())])
    shown = number if width > DIGIT * len(number) else ""
    outline = ' class="apart"' if width > OUTLINED else ""
    text = f'<text class="number" x="{left + width / 2:.3f}%" y="{top + 15}">{shown}</text>' if shown else ""
    return (
        f"<g><title>{html.escape(title)}</title>"
        f'<rect{outline} x="{left:.3f}%" y="{top}" width="{width:.3f}%" height="{LINE - 3}" fill="{color}"/>'
        f"{text}</g>"
    )


def _kind(span: Span) -> str:
    return span.name.rstrip("0123456789")


def _picture(title: str, height: int, shapes: Sequence[str], colors: Mapping[str, str]) -> str:
    """Shapes below a title and what their colours mean."""
    names = "".join(
        f'<span><i style="background: {c}"></i>{html.escape(n)}</span>' for n, c in colors.items()
    )
    svg = f'<svg width="100%" height="{height}" role="img">{"".join(shapes)}</svg>'
    return f"<figure><figcaption>{html.escape(title)}{names}</figcaption>{svg}</figure>"


def described(job: Job, documents: Documents) -> tuple[str, str]:
    """The corpus' name without its folder, as pages are shared, and the job and documents in words."""
    name = Path(documents.name).name
    return name, describe_job(job, replace(documents, name=name))


def command(name: str, typed: Sequence[str], *more: str) -> str:
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
