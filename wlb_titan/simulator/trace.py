"""Passes, predicted or measured, as a trace that Perfetto opens; and those predicted for a step.

The file is JSON in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from wlb_titan.errors import UserError, reading
from wlb_titan.files import load, save
from wlb_titan.job import Job
from wlb_titan.packing.slices import kind
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.simulator.measured import ROWS, Pass
from wlb_titan.simulator.replicas import step_ends, step_passes

COMPUTED = "processor_seconds"  # fact of a pass on a CPU: its thread's own time, without waiting
LONGEST = 1e9  # seconds
NAME = re.compile(rf"({'|'.join(ROWS)})([0-9]+)")  # of a pass, by its kind and micro-batch: `F3`


def write_trace(passes: Iterable[Pass], path: str | os.PathLike[str]) -> None:
    """Writes a file with a process for each replica and a track for each rank, in the order of their first
    passes."""
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for each in passes:
        process = processes.setdefault(each.replica, len(processes) + 1)
        track = tracks.setdefault((each.replica, each.rank), len(tracks) + 1)
        times = {"ts": each.start * 1e6, "dur": each.seconds * 1e6}
        place = {"ph": "X", "name": f"{each.kind}{each.micro_batch}", "pid": process, "tid": track}
        events.append({**place, **times, "args": {"stage": each.stage, **each.facts}})
    names = [_name("process_name", number, 0, name) for name, number in processes.items()]
    names += [_name("thread_name", processes[p], number, name) for (p, name), number in tracks.items()]
    save(path, {"displayTimeUnit": "ms", "traceEvents": names + events})


def read_trace(path: str | os.PathLike[str]) -> list[Pass]:
    with reading(lambda reason: UserError(f"{path}: this is not a trace that wlb_titan wrote: {reason}.")):
        events = load(dict[str, Any], path)["traceEvents"]
        names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
        passes = []
        for event in (e for e in events if e["ph"] == "X"):
            named, facts = NAME.fullmatch(event["name"]), dict(event["args"])
            if named is None:
                raise ValueError(f"{event['name']!r} is not a pass")
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            replica = str(names["process_name", event["pid"], 0])
            rank = str(names["thread_name", event["pid"], event["tid"]])
            numbers = facts.pop("stage"), int(named[2]), start, seconds
            passes.append(Pass(named[1], *numbers, replica, rank, facts=facts))
        if not all(0 <= p.start < LONGEST and 0 <= p.seconds < LONGEST for p in passes):
            raise ValueError("some of its passes have no times")
        if not passes or {p.replica for p in passes} != {p.replica for p in passes if p.seconds}:
            raise ValueError("it has no passes that took time")
        return passes


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def step_timeline(job: Job, plan: Plan, name: str = "step", dp_rank: int | None = None) -> list[Pass]:
    """The predicted passes of one replica, by default the slowest, in a picture of this name."""
    passes = step_passes(job, plan)
    of_replicas = step_ends(job, plan, passes)
    if dp_rank is None:
        dp_rank = int(np.argmax([ends.max(axis=0).sum() for _, ends in of_replicas]))
    graph, ends = of_replicas[dp_rank]
    begins = np.cumsum(ends.max(axis=0)) - ends.max(axis=0)
    times, micro_batches = passes.of(dp_rank), plan.of_rank(dp_rank)
    n = len(micro_batches) // passes.runs
    drawn = []
    for rank in range(job.degrees.pipeline):
        numbers = [i for i, a in enumerate(graph.actions) if job.shape.rank_of(a.stage) == rank]
        for run, begin in enumerate(begins.tolist()):
            for number in numbers:
                action, end = graph.actions[number], float(ends[number, run])
                seconds = float(times.of(action)[run])
                place, start = run * n + action.place, begin + end - seconds
                what = action.kind, action.stage, place, start, seconds, name, f"pp {rank}"
                drawn.append(Pass(*what, facts=facts_of(micro_batches[place])))
    return drawn


def facts_of(micro_batch: MicroBatch) -> dict[str, Any]:
    """What pictures tell of a pass's micro-batch."""
    facts: dict[str, Any] = {
        "tokens": micro_batch.length,
        "documents": len(micro_batch.documents),
        "sharding": micro_batch.sharding or "none",
        "predicted_work": micro_batch.workload,
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
