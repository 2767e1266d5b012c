"""Spans of time, predicted or measured, as a trace that Perfetto opens; and those predicted for a step.

The file is JSON in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wlb_titan.errors import UserError, reading
from wlb_titan.files import load, save
from wlb_titan.job import Job
from wlb_titan.packing.slices import kind
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.simulator.measured import ROWS
from wlb_titan.simulator.replicas import step_ends, step_passes

PARTS = "predicted_parts"  # argument of a measured span, as of `pass_parts`
LONGEST = 1e9  # seconds
COMPUTED = "processor_seconds"  # argument of a span: its thread's own time on a CPU, without waiting


@dataclass(frozen=True, slots=True)
class Span:
    process: str  # the first level of the picture: `step 12`, `wlb`
    track: str  # the line within it: `pp 0`
    name: str  # for a pass its kind and place: `F3`
    start: float  # seconds from the start of the trace
    duration: float
    args: Mapping[str, Any] = field(default_factory=dict)  # what a click on the span shows


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
    save(path, {"displayTimeUnit": "ms", "traceEvents": names + events})


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    with reading(lambda reason: UserError(f"{path}: this is not a trace that wlb_titan wrote: {reason}.")):
        events = load(dict[str, Any], path)["traceEvents"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
        spans = [
            Span(
                str(names["process_name", e["pid"], 0]),
                str(names["thread_name", e["pid"], e["tid"]]),
                str(e["name"]),
                e["ts"] / 1e6,
                e["dur"] / 1e6,
                dict(e["args"]),
            )
            for e in events
            if e["ph"] == "X"
        ]
        for span in spans:
            if not re.fullmatch(rf"({'|'.join(ROWS)})[0-9]+", span.name):
                raise ValueError(f"{span.name!r} is not a pass")
        if not all(0 <= s.start < LONGEST and 0 <= s.duration < LONGEST for s in spans):
            raise ValueError("some of its passes have no times")
        if not spans or {s.process for s in spans} != {s.process for s in spans if s.duration}:
            raise ValueError("it has no passes that took time")
        return spans


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def step_timeline(job: Job, plan: Plan, name: str = "step", dp_rank: int | None = None) -> list[Span]:
    """A span for each pass of one replica, by default the slowest, on its pipeline rank's track."""
    passes = step_passes(job, plan)
    of_replicas = step_ends(job, plan, passes)
    if dp_rank is None:
        dp_rank = int(np.argmax([ends.max(axis=0).sum() for _, ends in of_replicas]))
    graph, ends = of_replicas[dp_rank]
    begins = np.cumsum(ends.max(axis=0)) - ends.max(axis=0)
    times, micro_batches = passes.of(dp_rank), plan.of_rank(dp_rank)
    n = len(micro_batches) // passes.runs
    spans = []
    for rank in range(job.degrees.pipeline):
        numbers = [i for i, a in enumerate(graph.actions) if job.shape.rank_of(a.stage) == rank]
        for run, begin in enumerate(begins.tolist()):
            for number in numbers:
                action, end = graph.actions[number], float(ends[number, run])
                seconds = float(times.of(action)[run])
                place = run * n + action.place
                facts = {"pass": NAMES[action.kind], "stage": action.stage, **_facts(micro_batches[place])}
                start = begin + end - seconds
                spans.append(Span(name, f"pp {rank}", f"{action.kind}{place}", start, seconds, facts))
    return spans


def _facts(micro_batch: MicroBatch) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tokens": micro_batch.length,
        "documents": len(micro_batch.documents),
        "sharding": micro_batch.sharding or "none",
    }
    if micro_batch.slices is not None:
        facts["MicroPack"] = kind(micro_batch)
        lengths = micro_batch.lengths.tolist()
        if slices := ", ".join(
            f"{prefix}-{prefix + length} of {total}"
            for length, (prefix, total) in zip(lengths, micro_batch.slices.tolist(), strict=True)
            if total > length
        ):
            facts["slice"] = slices
    if merged := micro_batch.merged:
        facts["merged"] = f"dp {merged[0]}-{merged[-1]}"
    return facts
