"""Charts of the pages, each the HTML of a Vega-Lite specification (https://vega.github.io/vega-lite/docs/).

Colours of text and lines are the page's own variables, so that they follow its light and dark look.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from wlb_titan.commands.report.estimate import Estimate

PALETTE = ("#8b929c", "#12967f", "#4486d1", "#cc932f", "#a06cc0", "#d95f56", "#6fa64a", "#c76f9f", "#4aa3b5")
"""On white and on dark; the first is the baseline's."""

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
    "rule": {"color": "var(--ink)"},
}
SHORT = {"labelExpr": "abs(datum.value) < 1000 ? datum.label : format(datum.value, '.3~s')"}
"""The one way in which numbers are shortened: 1.5M, on axes. Tables and what hovers have every digit."""

Curves = Mapping[str, tuple[Iterable[float], Iterable[float]]]
"""By name the places on the axis, and the values."""


def chart(title: str, spec: Mapping[str, Any], height: float) -> str:
    """As wide as there is room; the plot is `height` pixels high, and `spec` has the data."""
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    text = json.dumps({**size, "config": CONFIG, **_rounded(spec)}, separators=(",", ":"))
    safe = text.replace("<", r"\u003c")
    drawn = f'<div class="chart"><script type="application/json">{safe}</script></div>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>"


def _rounded(value: Any) -> Any:
    """Floats to five digits, so that pages are small; none where there is no finite one."""
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):  # JSON has neither NaN nor infinity
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def color(number: int) -> str:
    """Of the policy or run that is listed there."""
    return PALETTE[number % len(PALETTE)]


def number(field: str, title: str | None = None, **scale: Any) -> dict[str, Any]:
    """An axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, "axis": SHORT, "scale": scale}


def text(field: str, **more: Any) -> dict[str, Any]:
    """An axis of names in their own order; the parts of a policy's name stand below each other."""
    split = {"labelExpr": "split(datum.label, ':')", "labelLimit": 150}
    return {"field": field, "type": "nominal", "sort": None, "title": None, "axis": split, **more}


def colors(field: str, names: Iterable[str], palette: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """The colour of a name: that of its place among all names of a page, unless a palette is given."""
    domain = list(names)
    scale = {"domain": domain, "range": [*palette[: len(domain)]] or [color(i) for i in range(len(domain))]}
    return {"field": field, "type": "nominal", "scale": scale, **more}


def hover(*fields: str) -> list[dict[str, str]]:
    """What is shown of a mark under the pointer."""
    return [{"field": field} for field in fields]


def lines(
    title: str, x: str, curves: Curves, *, zero: bool = False, dots: Curves | None = None, **mark: Any
) -> str:
    """Values over `x`, a line a name, and dots; nothing where all are 0 or there is none.

    Args:
        title, x: titles of the chart and its axis.
        curves, dots: by all names of a page in its order.
        zero: whether the axis of values begins at 0.
    """

    def layer(of: Curves, mark: Mapping[str, Any]) -> dict[str, Any]:
        points = [(name, *point) for name, curve in of.items() for point in zip(*curve, strict=True)]
        return {"data": {"values": [{"name": n, x: at, "value": v} for n, at, v in points]}, "mark": mark}

    line = {"type": "line", "strokeWidth": 1.8, "point": {"opacity": 0, "size": 90}, **mark}
    layers = [layer(curves, line)]
    if not any(row["value"] for row in layers[0]["data"]["values"]):
        return ""
    if dots is not None and any(len(list(xs)) for xs, _ in dots.values()):
        layers.append(layer(dots, {"type": "circle", "size": 40, "opacity": 1}))
    axes = {"x": number(x, x, zero=False), "y": number("value", zero=zero)}
    encoding = {**axes, "color": colors("name", curves), "tooltip": hover("name", x, "value")}
    return chart(title, {"encoding": encoding, "layer": layers}, 200)


def bars(title: str, values: Mapping[str, Estimate | None], begin: float = 0) -> str:
    """A bar a name, of all of a page in its order, from `begin` on, and on it its standard error; nothing
    where no name has a value."""
    rows = [{"name": n, "value": e.value, title: e.text(".4g"), **_ends(e)} for n, e in values.items() if e]
    bar = {"x": number("value", zero=False), "x2": {"datum": begin}}
    bar["color"] = colors("name", values, legend=None)
    encoding = {"y": text("name"), "tooltip": hover("name", title)}
    layers = [{"mark": BAR, "encoding": bar}, RULE]
    spec = {"data": {"values": rows}, "encoding": encoding, "layer": layers}
    return chart(title, spec, 38 * len(rows)) if rows else ""


BAR = {"type": "bar", "height": {"band": 0.7}}
RULE = {
    "mark": {"type": "rule", "strokeWidth": 2},
    "encoding": {"x": number("low"), "x2": {"field": "high"}, "y": text("name")},
}


def _ends(one: Estimate) -> dict[str, float]:
    return {"low": one.value - (one.error or 0), "high": one.value + (one.error or 0)}


def stacked(
    title: str,
    unit: str,
    values: Mapping[str, Mapping[str, float]],
    *,
    totals: Mapping[str, Estimate] | None = None,
    limit: float | None = None,
    palette: Sequence[str] = (*PALETTE[2:], *PALETTE[:2]),
) -> str:
    """A bar a name, made of parts.

    Args:
        title, unit: titles of the chart and its axis.
        totals: by name, of which the standard errors are drawn.
        limit: where a line stands that says how much there is.
    """
    parts = list(dict.fromkeys(part for own in values.values() for part in own))
    rows = [
        {"name": name, "part": part, "place": parts.index(part), unit: value}
        for name, own in values.items()
        for part, value in own.items()
    ]
    where = {"x": number(unit, unit, zero=True), "y": text("name"), "order": {"field": "place"}}
    look = {"color": colors("part", parts, palette), "tooltip": hover("name", "part", unit)}
    layers: list[dict[str, Any]] = [{"data": {"values": rows}, "mark": BAR, "encoding": where | look}]
    if totals is not None:
        ends = {"data": {"values": [{"name": name, **_ends(one)} for name, one in totals.items()]}}
        layers.append(ends | RULE)
    if limit is not None:
        layers.append(line_at(limit))
    return chart(title, {"layer": layers}, 38 * len(values))


def line_at(x: float) -> dict[str, Any]:
    """A layer: a line from top to bottom."""
    mark = {"type": "rule", "strokeDash": [4, 3]}
    return {"data": {"values": [{}]}, "mark": mark, "encoding": {"x": {"datum": x}}}
