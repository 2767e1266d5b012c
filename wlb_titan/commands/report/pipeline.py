"""The passes of a pipeline's step, predicted or measured, time to scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wlb_titan.commands.report.charts import chart, hover, number, text
from wlb_titan.simulator.timeline import MEASURED
from wlb_titan.timeline import Span

PASSES = {
    "F": ("forward", "#6aa5de"),
    "B": ("backward", "#2f5f98"),
    "FB": ("forward and backward", "#4486d1"),
    "I": ("backward of inputs", "#2f5f98"),
    "W": ("backward of weights", "#8fb3a5"),
    "R": ("recomputed", "#4a7fb5"),
    "L": ("loss", "#cc932f"),
}
"""What passes are called, and their colours; those of what the palette has are near it."""


def pipeline_charts(timelines: Mapping[str, Sequence[Span]]) -> str:
    """A chart for each policy or run, a row for each rank, a box for each pass, all to one scale.

    They train on other documents in a step: times are relative to the work of a rank in it. Passes that did
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
    scale = {"domain": list(kinds), "range": list(kinds.values())}
    measured = {"test": f"datum.time == '{MEASURED}'", "value": 1}
    wide = {"test": f"(datum.to - datum.from) / {end} * width > 8 * length(datum.number)", "value": 1}
    box = {
        "mark": {"type": "bar", "height": {"band": 0.86}, "stroke": "var(--box)", "strokeWidth": 0.5},
        "encoding": {
            "x": time,
            "x2": {"field": "to"},
            "color": {"field": "pass", "type": "nominal", "scale": scale},
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
    return chart(
        f"{name}: {1 - 1 / max(box['to'] for box in boxes):.1%} bubble",
        {
            "data": {"values": list(boxes)},
            "encoding": {"y": text("rank"), "tooltip": hover(*shown)},
            "layer": [box, label],
        },
        24 * len({box["rank"] for box in boxes}),
    )
