"""The HTML pages: an answer, cards, what to try next, sections of tables and charts.

A page is one file that opens without a network. It contains Vega's JavaScript, from vl-convert, which draws
each chart in the browser from its Vega-Lite specification (https://vega.github.io/vega-lite/docs/).
Colours of text and lines are the page's own variables, so charts follow its light and dark look.
"""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb_titan.commands.command_line import Rows, describe_job, writing
from wlb_titan.simulator.trace import MEASURED, Span
from wlb_titan.summary import Estimate

if TYPE_CHECKING:
    from wlb_titan.documents import Documents
    from wlb_titan.job import Job
    from wlb_titan.simulator.choice import Choice

STYLE = Path(__file__).with_name("style.css")
DRAW = """
for (const one of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(one.querySelector("script").textContent);
  vegaEmbed(one, spec, {renderer: "svg", actions: false, tooltip: {theme: "custom"}});
}
"""
PALETTE = ("#8b929c", "#12967f", "#4486d1", "#cc932f", "#a06cc0", "#d95f56", "#6fa64a", "#c76f9f", "#4aa3b5")
"""For policies and runs, on white and on dark; the first is the baseline's."""

AXIS = {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "gridColor": "var(--line)"}
LEGEND = {"labelColor": "var(--ink)", "titleColor": "var(--soft)", "orient": "top", "symbolType": "square"}
LABEL = {"expr": "max(80, width / (width > 420 ? 3 : 2) - 25)"}
CONFIG = {
    "background": None,
    "font": "system-ui, sans-serif",
    "axis": {**AXIS, "labelPadding": 6, "domain": False, "ticks": False, "titleFontWeight": 400},
    "axisQuantitative": {"tickCount": 6},
    "axisBand": {"grid": False},
    "legend": {**LEGEND, "title": None, "columns": {"expr": "width > 420 ? 3 : 2"}, "labelLimit": LABEL},
    "view": {"stroke": None},
}
SHORT = {"labelExpr": "abs(datum.value) < 1000 ? datum.label : format(datum.value, '.3~s')"}
"""The only way numbers are shortened: 1.5M, on axes. Tables and tooltips have every digit."""

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
    sections: Sequence[str],
) -> Path:
    """Writes `folder`/report.html, and returns its path; the folder is made if need be.

    Args:
        about: small print below the answer, which is one sentence.
        cards: rows of a table in the palette's order; their first cells are the names.
        figure, facts: the heading of what matters most in a row, and those of what stands below it.
        tries: what to do next and why, and the command or the lines of TOML for it.
    """
    import vl_convert

    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    shown = (_card(row, figure, facts, PALETTE[place % len(PALETTE)]) for place, row in enumerate(cards))
    commands = "".join(f"<p>{_safe(why)}</p><pre>{_safe(what)}</pre>" for why, what in tries)
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(title)}</title><style>{STYLE.read_text()}</style></head><body><main>"
        f'<h1>{_safe(title)}</h1><p class="answer">{_safe(answer)}</p><p class="about">{_safe(about)}</p>'
        f'<div class="cards">{"".join(shown)}</div>'
        f"<section><h2>Try next</h2>{commands}</section>{''.join(sections)}</main>"
        f"<script>{bundle}</script><script>{DRAW}</script></body></html>\n"
    )
    path = folder / "report.html"
    with writing(f"--report: {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def _safe(text: str) -> str:
    """As HTML; policies' names may be broken after a colon."""
    return html.escape(text).replace(":", ":<wbr>")


def _card(row: Mapping[str, str], figure: str, facts: Sequence[str], color: str) -> str:
    name = next(iter(row.values()))
    value, _, error = row[figure].partition(" ")
    lines_ = [figure, *(f"{fact} {row[fact]}" for fact in facts if fact in row)]
    return (
        f'<div class="card" style="--its: {color}"><b>{_safe(name)}</b>'
        f"<strong>{_safe(value)} <small>{error}</small></strong>"
        + "".join(f"<span>{_safe(line)}</span>" for line in lines_)
        + "</div>"
    )


def section(title: str, text: str, *bodies: str) -> str:
    """A titled box: text, and HTML bodies side by side where there is room; nothing without bodies."""
    shown = [body for body in bodies if body]
    body = f'<div class="charts">{"".join(shown)}</div>' if len(shown) > 1 else "".join(shown)
    return f"<section><h2>{html.escape(title)}</h2><p>{_safe(text)}</p>{body}</section>" if shown else ""


def choice_section(choice: Choice) -> str:
    """What `auto` stands for, and the predictions for all candidates."""
    return section("Choosing", " ".join(choice.remarks()), table(choice.rows()))


def table(rows: Rows) -> str:
    """Rows with the same headings, on a phone each as a list; nothing if there are none."""
    if not rows:
        return ""
    top = "".join(f"<th>{_safe(heading)}</th>" for heading in rows[0])
    body = "".join(f"<tr>{''.join(_cell(*one) for one in row.items())}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(heading: str, cell: str) -> str:
    kind = ' class="text"' if len(cell) > 40 else ""
    return f'<td data-label="{html.escape(heading)}"{kind}>{_safe(cell)}</td>'


def lines(
    title: str,
    x: str,
    curves: Curves,
    *,
    dots: Curves | None = None,
    zero: bool = False,
    top: float | None = None,
    **mark: Any,
) -> str:
    """A line for each name, and dots; nothing if all values are 0 or there are none.

    `curves` and `dots` are by all names of a page, in its order. `zero` starts the axis of values at 0, and
    `top` ends it.
    """
    dots = dots or {}
    points, seen = _points(x, curves), _points(x, dots)
    if not any(point["value"] for point in points):
        return ""
    line = {"type": "line", "strokeWidth": 1.8, "point": {"opacity": 0, "size": 90}, **mark}
    layers: list[dict[str, Any]] = [{"data": {"values": points}, "mark": line}]
    if seen:
        layers.append({"data": {"values": seen}, "mark": {"type": "circle", "size": 20, "opacity": 1}})
    scale: dict[str, Any] = {"zero": zero} if top is None else {"zero": zero, "domainMax": top}
    encoding = {
        "x": _number(x, x, zero=False),
        "y": _number("value", **scale),
        "color": _colors("name", [*curves, *(name for name in dots if name not in curves)], PALETTE),
        "tooltip": _hover("name", x, "value"),
    }
    return _chart(title, {"encoding": encoding, "layer": layers}, 200)


def _points(x: str, curves: Curves) -> list[dict[str, Any]]:
    return [
        {"name": name, x: place, "value": value}
        for name, (places, values) in curves.items()
        for place, value in zip(places, values, strict=True)
    ]


def pipeline_charts(timelines: Mapping[str, Sequence[Span]]) -> str:
    """A step's passes to scale: a chart for each policy or run, a row for each rank, a box for each pass.

    Documents differ between policies, so times are relative to a rank's work. Passes that did not run
    themselves, where others did, are pale.
    """
    drawn = {name: _boxes(spans) for name, spans in timelines.items()}
    end = max(box["to"] for boxes in drawn.values() for box in boxes)
    return "".join(_timeline(name, boxes, end) for name, boxes in drawn.items())


def _boxes(spans: Sequence[Span]) -> list[dict[str, Any]]:
    unit = sum(s.duration for s in spans) / len({s.track for s in spans})
    return [
        {
            "rank": s.track,
            "from": s.start / unit,
            "to": (s.start + s.duration) / unit,
            "pass": PASSES[s.name.rstrip("0123456789")][0],
            "number": s.name.lstrip("FBIWRL"),
            "ms": s.duration * 1e3,
            "time": MEASURED,
            **{key: value for key, value in s.args.items() if key != "pass"},
        }
        for s in sorted(spans, key=lambda s: (len(s.track), s.track))  # pp 2 before pp 10
    ]


def _timeline(name: str, boxes: Sequence[Mapping[str, Any]], end: float) -> str:
    kinds = {kind: color for kind, color in PASSES.values() if any(box["pass"] == kind for box in boxes)}
    time = _number("from", "time / work of a rank", domain=[0, end], nice=False)
    measured = {"test": f"datum.time == '{MEASURED}'", "value": 1}
    wide = {"test": f"(datum.to - datum.from) / {end} * width > 8 * length(datum.number)", "value": 1}
    box = {
        "mark": {"type": "bar", "height": {"band": 0.86}, "stroke": "var(--box)", "strokeWidth": 0.5},
        "encoding": {
            "x": time,
            "x2": {"field": "to"},
            "color": _colors("pass", list(kinds), list(kinds.values())),
            "opacity": {"condition": measured, "value": 0.45},
        },
    }
    label = {
        "transform": [{"calculate": "(datum.from + datum.to) / 2", "as": "middle"}],
        "mark": {"type": "text", "color": "white", "fontSize": 10},
        "encoding": {
            "x": time | {"field": "middle"},
            "text": {"field": "number"},
            "opacity": {"condition": wide, "value": 0},
        },
    }
    ranks = {"field": "rank", "type": "nominal", "sort": None, "title": None}
    shown = (key for key in boxes[0] if key not in ("from", "to"))
    spec = {
        "data": {"values": list(boxes)},
        "encoding": {"y": ranks, "tooltip": _hover(*shown)},
        "layer": [box, label],
    }
    title = f"{name}: {1 - 1 / max(box['to'] for box in boxes):.1%} bubble"
    return _chart(title, spec, 24 * len({box["rank"] for box in boxes}))


def _chart(title: str, spec: Mapping[str, Any], height: float) -> str:
    """A chart as wide as there is room and `height` pixels high; `spec` has the data."""
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    text = json.dumps({**size, "config": CONFIG, **_rounded(spec)}, separators=(",", ":"))
    safe = text.replace("<", r"\u003c")
    drawn = f'<div class="chart"><script type="application/json">{safe}</script></div>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>"


def _rounded(value: Any) -> Any:
    """Floats to five digits, to keep pages small; None for those that are not finite."""
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):  # JSON has neither NaN nor infinity
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def _number(field: str, title: str | None = None, **scale: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, "axis": SHORT, "scale": scale}


def _colors(field: str, names: Sequence[str], palette: Sequence[str]) -> dict[str, Any]:
    """A name's colour is that of its place among all names of a chart."""
    colors = [palette[place % len(palette)] for place in range(len(names))]
    return {"field": field, "type": "nominal", "scale": {"domain": names, "range": colors}}


def _hover(*fields: str) -> list[dict[str, str]]:
    return [{"field": field} for field in fields]


def described(job: Job, documents: Documents) -> tuple[str, str]:
    """The corpus' name without its folder, as pages are shared, and the job and documents in words."""
    name = Path(documents.name).name
    return name, describe_job(job, replace(documents, name=name))


def command(name: str, typed: Sequence[str], *more: str) -> str:
    """A command for the same job, to be called in this folder; paths in it are relative. `typed` is a TOML
    file, with overrides and options that the command has too."""
    below = f"{Path.cwd()}/"
    return shlex.join(["wlb-titan", name, *(word.removeprefix(below) for word in typed), *more])


def search_command(typed: Sequence[str], gpus: int) -> str:
    """The search for other degrees, without those that were typed."""
    kept, words = [], iter(typed)
    for word in words:
        key, equals, _ = word.partition("=")
        if key.endswith("_parallel_degree"):
            _ = equals or next(words)
        else:
            kept.append(word)
    return command("simulate", kept, "--search", "--gpus", str(gpus))


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
