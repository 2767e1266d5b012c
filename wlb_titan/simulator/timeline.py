"""The predicted timeline of one step: the passes of each pipeline rank, and its memory over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Floats
from wlb_titan.job import Job
from wlb_titan.memory.rank import weighted_tokens
from wlb_titan.packing.predicted import pack_sizes
from wlb_titan.packing.slim.slices import kind
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import Action, MicroBatch, Plan
from wlb_titan.simulator.measured import MeasuredPasses
from wlb_titan.simulator.replicas import (
    Replica,
    cache_bytes,
    ends_together,
    in_runs,
    planned_times,
    replicas_of,
    transfer_seconds,
)
from wlb_titan.simulator.trace import MEASURED, Span

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Activations of one pipeline rank over a step."""

    rank: int
    seconds: Floats  # (actions,), when each of its actions ends
    bytes_: Floats  # (actions,), that it holds from then on


Step = tuple[list[Span], list[MemoryCurve]]


def step_timeline(
    job: Job,
    plan: Plan,
    name: str = "step",
    dp_rank: int | None = None,
    measured: MeasuredPasses | None = None,
) -> Step:
    """A span for each pass of one data-parallel replica, by default the slowest, on its pipeline rank's
    track, and ranks' memory. `measured` passes replace predicted ones; those of ranks that ran say so."""
    number = len(plan.of_rank(0))
    run = number if plan.flows is not None else job.run or number
    times, tokens = planned_times(job, plan.micro_batches, run)
    if measured is not None:
        times = in_runs(measured.seconds, run)
    delays = transfer_seconds(job, tokens)
    pictures = [_Picture(job, name) for _ in range(job.degrees.data)]
    for first in range(0, number, run):
        k = slice(first // run, None, number // run)  # of every replica
        own = PassTimes(*(array[..., k] for array in times))
        replicas = replicas_of(job, plan, own, delays[:, k], slice(first, first + run))
        for rank, ends in enumerate(ends_together(replicas)):
            before = rank * number + first
            known = None if measured is None else measured.known[:, before : before + run]
            pictures[rank].add(replicas[rank], ends, known)
    steps = [picture.step() for picture in pictures]
    if dp_rank is not None:
        return steps[dp_rank]
    return max(steps, key=lambda step: max(piece.start + piece.duration for piece in step[0]))


class _Picture:
    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._spans: list[Span] = []
        self._seconds: list[list[float]] = [[0.0] for _ in range(job.degrees.pipeline)]
        self._bytes: list[list[float]] = [[0.0] for _ in range(job.degrees.pipeline)]
        self._begin = 0.0
        self._first = 0

    def step(self) -> Step:
        curves = zip(map(np.array, self._seconds), map(np.array, self._bytes), strict=True)
        return self._spans, [MemoryCurve(rank, *curve) for rank, curve in enumerate(curves)]

    def add(self, replica: Replica, ends: Floats, known: Bools | None) -> None:
        job, memory, here = self._job, self._job.packing.rank_memory, replica.micro_batches
        packs = pack_sizes(job, here)
        kept = [
            memory.layer_bytes(job.token_bytes_of(m.sharers, m.keys)) * m.length * m.sharers for m in packs
        ]
        for rank in range(job.degrees.pipeline):
            numbers = [i for i, a in enumerate(replica.graph.actions) if job.shape.rank_of(a.stage) == rank]
            actions = [replica.graph.actions[i] for i in numbers]
            live = weighted_tokens(actions, kept, memory.kept_layers(job.layers))
            cached = cache_bytes(job, actions, packs)
            self._seconds[rank].extend(self._begin + ends[i] for i in numbers)
            self._bytes[rank].extend(own + more for own, more in zip(live, cached, strict=True))
            for action, end in zip(actions, ends[numbers].tolist(), strict=True):
                seconds = float(replica.times.of(action)[0])
                micro_batch = here[action.place]
                self._spans.append(
                    Span(
                        process=self._name,
                        track=f"pp {rank}",
                        name=f"{action.kind}{self._first + action.place}",
                        start=self._begin + end - seconds,
                        duration=seconds,
                        args={
                            "pass": NAMES[action.kind],
                            "stage": action.stage,
                            **_origin(action, known),
                            **_facts(micro_batch),
                        },
                    )
                )
        self._begin += float(ends.max())
        self._first += len(here)


def _origin(action: Action, known: Bools | None) -> dict[str, str]:
    if known is None:
        return {}
    return {"time": MEASURED if known[action.stage, action.place] else "of a like pass"}


def _facts(micro_batch: MicroBatch) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tokens": micro_batch.length,
        "documents": len(micro_batch.documents),
        "sharding": micro_batch.sharding or "none",
        **_slices_of(micro_batch),
    }
    if merged := micro_batch.merged:
        facts["merged"] = f"dp {merged[0]}-{merged[-1]}"
    return facts


def _slices_of(micro_batch: MicroBatch) -> dict[str, Any]:
    if micro_batch.slices is None:
        return {}
    lengths = micro_batch.lengths
    state = {"MicroPack": kind(micro_batch)}
    slices = ", ".join(
        f"{prefix}-{prefix + length} of {total}"
        for length, (prefix, total) in zip(lengths.tolist(), micro_batch.slices.tolist(), strict=True)
        if total > length
    )
    return state | ({"slice": slices} if slices else {})
