"""Spans of time, predicted or measured, as a trace that Perfetto opens.

The file is JSON in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wlb_titan.errors import UserError

COMPUTED = "processor_seconds"  # argument of a span: its thread's own time on a CPU, without waiting


@dataclass(frozen=True, slots=True)
class Span:
    process: str  # the first level of the picture: `step 12`, `wlb`
    track: str  # the line within it: `pp 0`
    name: str  # for a pass its kind and place: `F3`
    start: float  # seconds from the start of the trace
    duration: float
    args: Mapping[str, float | int | str] = field(default_factory=dict)  # what a click on the span shows


def write_trace(spans: Iterable[Span], path: str | os.PathLike[str]) -> None:
    """Writes a file with processes and tracks in the order of their first spans."""
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        process = processes.setdefault(span.process, len(processes) + 1)
        track = tracks.setdefault((span.process, span.track), len(tracks) + 1)
        times = {"ts": span.start * 1e6, "dur": span.duration * 1e6}
        place = {"ph": "X", "name": span.name, "pid": process, "tid": track}
        events.append({**place, **times, "args": dict(span.args)})
    names = [_name("process_name", number, 0, name) for name, number in processes.items()]
    names += [_name("thread_name", processes[p], number, name) for (p, name), number in tracks.items()]
    new = f"{os.fspath(path)}.new"  # readers never find half a file
    with open(new, "w") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": names + events}, file)
    os.replace(new, path)


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    try:
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
        return [
            Span(
                names["process_name", e["pid"], 0],
                names["thread_name", e["pid"], e["tid"]],
                e["name"],
                e["ts"] / 1e6,
                e["dur"] / 1e6,
                e["args"],
            )
            for e in events
            if e["ph"] == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: this is not a trace that wlb_titan wrote: {error!r}.") from error


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
