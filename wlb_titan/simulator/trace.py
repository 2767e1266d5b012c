"""Spans of time, predicted or measured, as a trace that Perfetto opens; and a replay of a traced step.

The file is in the trace event format of Chrome, JSON that ui.perfetto.dev and chrome://tracing read.

Processes that share cores wait for each other where they would not have to, and what else runs on a machine
slows them down. Each pass' own processor time has neither in it. So a replay puts a step together from these
times as the simulator puts one together from predicted ones: every rank runs its passes in the order in which
it ran them, each as soon as its data is there, which takes no time on its way.
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

COMPUTED = "processor_seconds"
"""The argument of a span with its thread's own time on a CPU: waiting and others' work are not in it."""

MEASURED = "measured"
"""The argument `time` of a pass that ran itself, where others did not."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work."""

    process: str  # the first level of the picture, such as `step 12` or `wlb`
    track: str  # the line within it, such as `pp 0`
    name: str  # such as `F3`
    start: float  # seconds from the start of the trace
    duration: float
    args: Mapping[str, float | int | str] = field(default_factory=dict)  # what a click on the span shows


def write_trace(spans: Iterable[Span], path: str | os.PathLike[str]) -> None:
    """Writes the spans to `path`; processes and tracks appear in the order of their first spans."""
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
    new = f"{os.fspath(path)}.new"  # who reads never finds a part
    with open(new, "w") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": names + events}, file)
    os.replace(new, path)


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    """The spans that `write_trace` wrote to `path`, in its order."""
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
    """Seconds of the passes of a traced step, as if each process had a device of its own.

    None where it cannot be told: passes without processor time (those of an accelerator), or others than
    forward and backward ones.
    """
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
    """Seconds of one replica. Ranks that share a pipeline rank's passes count as the slowest of them."""
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
    """The pipeline rank that a track names; 0 without a pipeline."""
    words = track.split()
    return int(words[words.index("pp") + 1]) if "pp" in words else 0


def _schedule(ranks: dict[int, dict[Action, float]]) -> str:
    """A schedule that lays stages out as these ranks have them: in turn, or there and back again."""
    back = any(action.stage == len(ranks) for action in ranks[len(ranks) - 1]) and len(ranks) > 1
    return "ZBVZeroBubble" if back else "1F1B"
