"""Spans of time, predicted or measured, as a trace that Perfetto opens; and a replay of a traced step.

The file is JSON in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.

Processes that share cores slow each other down, and so does all else that runs on their machine. A pass's own
processor time does not include that. So a replay puts a step together from these times, as the simulator does
from predicted ones: every rank runs its passes in their traced order, each as soon as its data is there.
Transfers take no time.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wlb_titan.errors import UserError
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import Action

COMPUTED = "processor_seconds"  # argument of a span: its thread's own time on a CPU, without waiting

MEASURED = "measured"  # value of the argument `time` of a pass that ran, where others did not


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


PASS = re.compile(r"(FB|[FLBIW])(\d+)")


def replayed_seconds(spans: Sequence[Span]) -> float | None:
    """Seconds of a traced step's passes, as if each process had a device of its own; None where a pass has no
    processor time (on an accelerator) or is neither forward, backward nor loss."""
    replicas: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if COMPUTED not in span.args or not PASS.fullmatch(span.name):
            return None
        replicas[span.process].append(span)
    if not replicas:
        return None
    if all(span.name.startswith("FB") for span in spans):  # replicas meet in every micro-batch
        most: dict[str, float] = defaultdict(float)
        for span in spans:
            most[span.name] = max(most[span.name], float(span.args[COMPUTED]))
        return sum(most.values())
    return max(_pipeline(own) for own in replicas.values())


def _pipeline(spans: Sequence[Span]) -> float:
    """Seconds of one replica; of ranks that share a pipeline rank's passes the slowest counts."""
    ranks: dict[int, dict[Action, float]] = defaultdict(dict)
    losses: dict[tuple[int, int], float] = defaultdict(float)
    for span in sorted(spans, key=lambda one: one.start):
        found = PASS.fullmatch(span.name)
        assert found is not None
        kind, place, stage = found[1], int(found[2]), int(span.args["stage"])
        seconds = float(span.args[COMPUTED])
        if kind == "L":
            losses[stage, place] = max(losses[stage, place], seconds)
            continue
        passes = ranks[_rank(span.track)]
        action = Action(kind, stage, place)  # type: ignore[arg-type]
        passes[action] = max(passes.get(action, 0.0), seconds)
    stages = 1 + max(action.stage for passes in ranks.values() for action in passes)
    n = 1 + max(action.place for passes in ranks.values() for action in passes)
    times = PassTimes(*np.zeros((3, stages, n, 1)))
    for passes in ranks.values():
        for action, seconds in passes.items():
            of_kind = {"F": times.forward, "W": times.weights}.get(action.kind, times.inputs)
            of_kind[action.stage, action.place] = seconds
    for (stage, place), seconds in losses.items():
        times.forward[stage, place] += seconds
    shape = PipelineShape(_schedule(ranks), len(ranks), stages // len(ranks))
    graph = PipelineGraph(shape, n, [list(ranks[rank]) for rank in sorted(ranks)])
    return float(graph.ends(times).max())


def _rank(track: str) -> int:
    words = track.split()
    return int(words[words.index("pp") + 1]) if "pp" in words else 0


def _schedule(ranks: dict[int, dict[Action, float]]) -> str:
    """A schedule with these ranks' layout of stages: in turn, or there and back again."""
    back = any(action.stage == len(ranks) for action in ranks[len(ranks) - 1]) and len(ranks) > 1
    return "ZBVZeroBubble" if back else "1F1B"
