"""The predicted timeline of one step: the passes of each pipeline rank, and its memory over time."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Floats
from wlb_titan.job import Job
from wlb_titan.memory.peak import weighted_tokens
from wlb_titan.packing.slim.slices import ReplicaPacks, kind, passes_of
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import LENGTH, Action, MicroBatch, Plan
from wlb_titan.simulator.measured import Measured
from wlb_titan.simulator.meeting import Replica, ends_together
from wlb_titan.simulator.planned import keys_of, planned_times, transfer_seconds
from wlb_titan.simulator.replicas import cache_bytes, replicas_of
from wlb_titan.timeline import Span

MEASURED = "measured"
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Activations of one pipeline rank over a step.

    Attributes:
        rank: pipeline-parallel rank.
        seconds: float64 (actions,), when each of its actions ends.
        bytes_: float64 (actions,), of activations that it holds from then on.
    """

    rank: int
    seconds: Floats
    bytes_: Floats


Step = tuple[list[Span], list[MemoryCurve]]


def step_timeline(
    job: Job,
    plan: Plan,
    name: str = "step",
    dp_rank: int | None = None,
    measured: Measured | None = None,
) -> Step:
    """The step of one data-parallel replica.

    Args:
        dp_rank: the replica; None takes the one that takes longest.
        measured: the step's passes, in place of predicted ones; those of ranks that ran say so.

    Returns:
        A slice for each pass, on the track of its pipeline rank, and each rank's memory.
    """
    if plan.flows is not None:
        steps = _together(job, plan, name, measured)
        steps = steps if dp_rank is None else [steps[dp_rank]]
    else:
        ranks = range(job.degrees.data) if dp_rank is None else [dp_rank]
        steps = [_in_runs(job, plan, name, rank, measured) for rank in ranks]
    return max(steps, key=lambda step: max(piece.start + piece.duration for piece in step[0]))


def _together(job: Job, plan: Plan, name: str, measured: Measured | None) -> list[Step]:
    """Every replica of a step of MicroPacks, of which they may share some."""
    run = len(plan.of_rank(0))
    times, tokens = planned_times(job, plan.by_pass, run)
    if measured is not None:
        times = measured.in_runs(run)
    replicas = replicas_of(job, plan, times, *tokens.each(partial(transfer_seconds, job)))
    steps = []
    for rank, (replica, ends) in enumerate(zip(replicas, ends_together(replicas), strict=True)):
        picture = _Picture(job, name)
        picture.add(replica, ends, _known(measured, rank * run, run))
        steps.append(picture.step())
    return steps


def _in_runs(job: Job, plan: Plan, name: str, dp_rank: int, measured: Measured | None) -> Step:
    """One replica, run after run."""
    micro_batches = plan.replica(dp_rank)
    number = len(micro_batches.forward)
    run = job.run or number
    graph = PipelineGraph(job.shape, run)
    picture = _Picture(job, name)
    for first in range(0, number, run):
        here = micro_batches.each(operator.getitem, slice(first, first + run))
        times, tokens = planned_times(job, here, run)
        before = dp_rank * number + first
        if measured is not None:
            k = slice(before // run, before // run + 1)
            every = measured.in_runs(run)
            times = PassTimes(*(a[:, :, k] for a in (every.forward, every.inputs, every.weights)))
        replica = Replica(graph, times, *tokens.each(partial(transfer_seconds, job)), here)
        (ends,) = ends_together([replica])
        picture.add(replica, ends, _known(measured, before, run))
    return picture.step()


def _known(measured: Measured | None, first: int, n: int) -> Bools | None:
    """bool (stages, n), which passes of these micro-batches ran."""
    return None if measured is None else measured.known[:, first : first + n]


class _Picture:
    """Spans and curves of a replica, run after run."""

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
        """A run, behind those before it."""
        job, memory, here = self._job, self._job.packing.rank_memory, replica.micro_batches
        keys = partial(keys_of, job=job)
        passes = passes_of(here.each(ReplicaPacks.of, keys), None)
        kept = here.each(
            lambda packs: [
                memory.layer_bytes(job.merged[m.sharers].token_bytes_with(keys(m))) * m.shared_length
                for m in packs
            ]
        )
        for rank in range(job.degrees.pipeline):
            numbers = [i for i, a in enumerate(replica.graph.actions) if job.shape.rank_of(a.stage) == rank]
            actions = [replica.graph.actions[i] for i in numbers]
            held = weighted_tokens(actions, kept, memory.weights(job.layers))
            cached = cache_bytes(job, actions, passes)
            self._seconds[rank].extend(self._begin + ends[i] for i in numbers)
            self._bytes[rank].extend(own + more for own, more in zip(held, cached, strict=True))
            for action, end in zip(actions, ends[numbers].tolist(), strict=True):
                seconds = float(replica.times.of(action)[0])
                micro_batch = here.of(action.kind)[action.place]
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
        self._first += len(here.forward)


def _origin(action: Action, known: Bools | None) -> dict[str, str]:
    """Where the time of a pass is from, where some were measured."""
    if known is None:
        return {}
    return {"time": MEASURED if known[action.stage, action.place] else "of a like pass"}


def _facts(micro_batch: MicroBatch) -> dict[str, Any]:
    """What a timeline says of a micro-batch."""
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
    """What a timeline says of a MicroPack: its formation state and the tokens of its slices."""
    if micro_batch.slices is None:
        return {}
    lengths = micro_batch.documents[:, LENGTH]
    state = {"MicroPack": kind(micro_batch.slices, lengths)}
    slices = ", ".join(
        f"{prefix}-{prefix + length} of {total}"
        for length, (prefix, total) in zip(lengths.tolist(), micro_batch.slices.tolist(), strict=True)
        if total > length
    )
    return state | ({"slice": slices} if slices else {})
