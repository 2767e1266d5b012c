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

from wlb_titan.simulator.trace import MEASURED, Span

PALETTE = ("#8b929c", "#12967f", "#4486d1", "#cc932f", "#a06cc0", "#d95f56", "#6fa64a", "#c76f9f", "#4aa3b5")
"""Of policies and runs, on white and on dark; the first is the baseline's."""
PARTS = (PALETTE[2], PALETTE[0], *PALETTE[3:], PALETTE[1])
"""The same colours for the parts of a bar."""

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
"""The one way in which numbers are shortened: 1.5M, on axes. Tables and tooltips have every digit."""
NAMES = {
    "type": "nominal",
    "sort": None,
    "title": None,
    "axis": {"labelExpr": "split(datum.label, ':')", "labelLimit": 150},
}
"""An axis of names in their own order; the parts of a policy's name stand below each other."""

Curves = Mapping[str, tuple[Iterable[float], Iterable[float]]]
"""By name the places on the axis, and the values."""

PASSES = {
    "F": ("forward", "#6aa5de"),
    "B": ("backward", "#2f5f98"),
    "FB": ("forward and backward", "#4486d1"),
    "I": ("backward of inputs", "#2f5f98"),
    "W": ("backward of weights", "#8fb3a5"),
    "R": ("recomputed", "#4a7fb5"),
    "L": ("loss", "#cc932f"),
}
"""What passes are called, and their colours."""


def chart(title: str, spec: Mapping[str, Any], height: float) -> str:
    """A chart as wide as there is room; the plot is `height` pixels high, and `spec` has the data."""
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    text = json.dumps({**size, "config": CONFIG, **_rounded(spec)}, separators=(",", ":"))
    safe = text.replace("<", r"\u003c")
    drawn = f'<div class="chart"><script type="application/json">{safe}</script></div>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>"


def _rounded(value: Any) -> Any:
    """Floats to five digits, so that pages are small; None where there is no finite one."""
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):  # JSON has neither NaN nor infinity
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def number(field: str, title: str | None = None, **scale: Any) -> dict[str, Any]:
    """An axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, "axis": SHORT, "scale": scale}


def _colors(field: str, names: Iterable[str], palette: Sequence[str]) -> dict[str, Any]:
    """The colour of a name: that of its place among all names of a chart."""
    domain = list(names)
    colors = [palette[place % len(palette)] for place in range(len(domain))]
    return {"field": field, "type": "nominal", "scale": {"domain": domain, "range": colors}}


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
        zero: whether the axis of values starts at 0.
    """
    points, seen = _points(x, curves), _points(x, dots or {})
    if not any(point["value"] for point in points):
        return ""
    line = {"type": "line", "strokeWidth": 1.8, "point": {"opacity": 0, "size": 90}, **mark}
    layers: list[dict[str, Any]] = [{"data": {"values": points}, "mark": line}]
    if seen:
        layers.append({"data": {"values": seen}, "mark": {"type": "circle", "size": 40, "opacity": 1}})
    axes = {"x": number(x, x, zero=False), "y": number("value", zero=zero)}
    encoding = {**axes, "color": _colors("name", curves, PALETTE), "tooltip": hover("name", x, "value")}
    return chart(title, {"encoding": encoding, "layer": layers}, 200)


def _points(x: str, curves: Curves) -> list[dict[str, Any]]:
    return [
        {"name": name, x: place, "value": value}
        for name, (places, values) in curves.items()
        for place, value in zip(places, values, strict=True)
    ]


def stacked(
    title: str, unit: str, values: Mapping[str, Mapping[str, float]], limit: float | None = None
) -> str:
    """A bar a name, made of parts.

    Args:
        unit: title of the axis.
        limit: where a line stands that says how much there is.
    """
    parts = list(dict.fromkeys(part for of_name in values.values() for part in of_name))
    rows = [
        {"name": name, "part": part, "place": parts.index(part), unit: value}
        for name, of_name in values.items()
        for part, value in of_name.items()
    ]
    encoding = {
        "x": number(unit, unit, zero=True),
        "y": {"field": "name", **NAMES},
        "order": {"field": "place"},
        "color": _colors("part", parts, PARTS),
        "tooltip": hover("name", "part", unit),
    }
    bar = {"type": "bar", "height": {"band": 0.7}}
    layers: list[dict[str, Any]] = [{"data": {"values": rows}, "mark": bar, "encoding": encoding}]
    if limit is not None:
        rule = {"mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": {"datum": limit}}}
        layers.append({"data": {"values": [{}]}, **rule})
    return chart(title, {"layer": layers}, 38 * len(values))


def pipeline_charts(timelines: Mapping[str, Sequence[Span]]) -> str:
    """A step's passes to scale: a chart for each policy or run, a row for each rank, a box for each pass.

    Steps of policies have other documents: times are relative to the work of a rank in them. Passes that did
    not run themselves, where others did, are pale.
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
    time = number("from", "time / work of a rank", domain=[0, end], nice=False)
    measured = {"test": f"datum.time == '{MEASURED}'", "value": 1}
    wide = {"test": f"(datum.to - datum.from) / {end} * width > 8 * length(datum.number)", "value": 1}
    box = {
        "mark": {"type": "bar", "height": {"band": 0.86}, "stroke": "var(--box)", "strokeWidth": 0.5},
        "encoding": {
            "x": time,
            "x2": {"field": "to"},
            "color": _colors("pass", kinds, list(kinds.values())),
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
    shown = [key for key in boxes[0] if key not in ("from", "to")]
    spec = {
        "data": {"values": list(boxes)},
        "encoding": {"y": {"field": "rank", **NAMES}, "tooltip": hover(*shown)},
        "layer": [box, label],
    }
    title = f"{name}: {1 - 1 / max(box['to'] for box in boxes):.1%} bubble"
    return chart(title, spec, 24 * len({box["rank"] for box in boxes}))
