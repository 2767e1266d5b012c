"""The passes of a step from measurements of some of its ranks.

A rank that ran alone (`wlb-titan rehearse`) tells how long its passes compute; what it would wait for within
them, tensor- and context-parallel collectives, is added as it is predicted. A pass of a rank that did not run
takes what is predicted, times measured over predicted of the same micro-batch on the stage that is most like
its own: stages of equal layers take the same. Where that micro-batch was not run either, all of the stage's
decide. Of context-parallel ranks the slowest counts; if it did not run, the one that did is scaled to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.job import Job
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.simulator.passes import MicroBatches, attention_seconds, both_times, pass_times

Floats = NDArray[np.float64]
BACKWARD = {"B": 0, "R": 0, "I": 0, "W": 1}
"""Kinds of backward passes, and which half they are of what `PassTimes` has in two."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: F forward, R a backward pass put together, L loss, B backward, I and W the backward passes of
            inputs and of weights alone, FB a whole micro-batch without pipeline parallelism.
        stage: from 0.
        micro_batch: from 0 in the order in which this data-parallel rank runs the step's.
        start: seconds since the timer was switched on.
        seconds: duration.
    """

    kind: str
    stage: int
    micro_batch: int
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of one rank.

    Attributes:
        dp, cp: its data- and its context-parallel rank.
        passes: all that it ran, with no communication in them.
        optimizer: seconds from the last pass to the step's end.
    """

    dp: int
    cp: int
    passes: Sequence[Pass]
    optimizer: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What takes the place of predicted passes.

    Attributes:
        times: of all passes, float64 (stages, micro-batches of all steps, 1), in the plans' order.
        known: bool (stages, micro-batches of all steps), whether a rank with this pass ran.
        optimizer: float64 (steps,), of the slowest rank that ran.
    """

    times: PassTimes
    known: NDArray[np.bool_]
    optimizer: Floats

    def in_runs(self, n: int) -> PassTimes:
        """float64 (stages, n, k), n micro-batches a run, as the simulator has them."""
        arrays = (self.times.forward, self.times.inputs, self.times.weights)
        return PassTimes(*(a.reshape(len(a), -1, n).swapaxes(1, 2) for a in arrays))

    def of_step(self, step: int) -> Measured:
        """One of the steps, from 0."""
        each = self.known.shape[1] // len(self.optimizer)
        own = slice(step * each, (step + 1) * each)
        arrays = (self.times.forward, self.times.inputs, self.times.weights)
        return Measured(
            PassTimes(*(a[:, own] for a in arrays)), self.known[:, own], self.optimizer[step : step + 1]
        )


def measured(job: Job, plans: Sequence[Plan], steps: Sequence[Sequence[MeasuredStep]]) -> Measured:
    """The passes of planned steps.

    Args:
        job: the job.
        plans: of the steps.
        steps: of each plan the ranks that ran it, at least one.
    """
    quiet = job.on(without_waiting(job.cluster))
    packs = _Packs.of(plans)
    slowest, waiting = _predicted(quiet, packs), _predicted(job, packs)
    found = _Found(packs, len(job.layers))
    for number, ranks in enumerate(steps):
        for rank in ranks:
            found.add(number, rank, slowest, _predicted(quiet, packs, rank.cp))
    seconds = np.stack([_filled(*one, job.layers) for one in zip(found.passes, slowest, strict=True)])
    forward, inputs, weights = seconds + np.stack(waiting) - np.stack(slowest)
    return Measured(
        times=PassTimes(forward[..., None], inputs[..., None], weights[..., None]),
        known=np.isfinite(found.passes).all(axis=0),
        optimizer=np.array([max(rank.optimizer for rank in ranks) for ranks in steps]),
    )


def without_waiting(cluster: Cluster) -> Cluster:
    """The same cluster with communication that takes no time."""
    free = Link(float("inf"), 0.0)
    return replace(cluster, node=free, network=free)


class _Packs(NamedTuple):
    """The micro-batches of all steps, in the plans' order; `backward` are those of backward passes."""

    forward: list[MicroBatch]
    backward: list[MicroBatch] | None
    steps: int

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> _Packs:
        forward = [m for plan in plans for m in plan.micro_batches]
        backward = [m for plan in plans for m in plan.backward or ()]
        return cls(forward, backward or None, len(plans))

    def places(self) -> dict[tuple[int, int, int], int]:
        """Of step, data-parallel rank and place in the rank's order, where a micro-batch stands."""
        each = len(self.forward) // self.steps
        return {(i // each, m.dp_rank, m.index): i for i, m in enumerate(self.forward)}


class _Found:
    """Measured passes, float64 (3, stages, micro-batches): forward, inputs, weights; nan where none ran."""

    def __init__(self, packs: _Packs, stages: int) -> None:
        self.passes = np.full((3, stages, len(packs.forward)), np.nan)
        self._places = packs.places()
        self._apart = packs.backward is not None

    def add(self, step: int, rank: MeasuredStep, slowest: Sequence[Floats], own: Sequence[Floats]) -> None:
        """One step of one rank; where another rank ran the same pass, the longer counts.

        Args:
            step: from 0.
            rank: what it measured.
            slowest, own: what is predicted of the slowest context-parallel rank and of this one.
        """
        sums: dict[tuple[int, int, int], float] = defaultdict(float)
        for kind, stage, micro_batch, _, seconds in rank.passes:
            place = self._places[step, rank.dp, micro_batch]
            if kind == "FB":  # in the shares that are predicted
                shares = np.array([one[stage, place] for one in own])
                for half, share in enumerate((shares / shares.sum()).tolist()):
                    sums[half, stage, place] += share * seconds
            elif kind in BACKWARD:
                sums[1 + BACKWARD[kind], stage, place] += seconds
                sums[2, stage, place] += 0.0
            else:  # a loss is of forward passes, unless backward passes have micro-batches of their own
                sums[int(kind == "L" and self._apart), stage, place] += seconds
        for where, seconds in sums.items():
            half, stage, place = where
            whole = half == 1 and not sums.get((2, stage, place))
            longer, mine = (one[half][stage, place] + whole * one[2][stage, place] for one in (slowest, own))
            self.passes[where] = np.fmax(self.passes[where], seconds * max(longer / mine, 1.0))


def _filled(found: Floats, predicted: Floats, layers: Sequence[int]) -> Floats:
    """float64 (stages, micro-batches), with what did not run in place of nan."""
    filled = found.copy()
    ran = np.isfinite(found)
    sources = [stage for stage in range(len(layers)) if ran[stage].any()]
    assert sources, "no rank ran"
    for stage in range(len(layers)):
        source = min(sources, key=lambda other: _unlike(stage, other, layers))
        some = ran[source]
        total = found[source, some].sum() / max(predicted[source, some].sum(), 1e-30)
        ratio = np.where(some, found[source] / np.maximum(predicted[source], 1e-30), total)
        missing = ~ran[stage]
        filled[stage, missing] = (predicted[stage] * ratio)[missing]
    return filled


def _unlike(stage: int, other: int, layers: Sequence[int]) -> tuple[bool, bool, int, int]:
    """How different two stages are: in being the last, which has the head, in layers, in place."""
    last = len(layers) - 1
    return stage != other, (stage == last) != (other == last), abs(layers[stage] - layers[other]), other


def _predicted(job: Job, packs: _Packs, context_rank: int | None = None) -> tuple[Floats, Floats, Floats]:
    """Seconds of forward, inputs and weights, float64 (stages, micro-batches) each, on the slowest
    context-parallel rank or on one of them."""
    if packs.backward is not None:
        passing, back = (_passing(job, each, context_rank) for each in (packs.forward, packs.backward))
        times = both_times(job, passing, back)
        return times.forward[..., 0], times.inputs[..., 0], times.weights[..., 0]
    result = np.empty((3, len(job.layers), len(packs.forward)))
    for sharers in {m.sharers for m in packs.forward}:
        own = [i for i, m in enumerate(packs.forward) if m.sharers == sharers]
        shared = job.merged[sharers]
        times = pass_times(shared, _passing(shared, [packs.forward[i] for i in own], context_rank))
        for half, array in enumerate((times.forward, times.inputs, times.weights)):
            result[half][:, own] = array[..., 0]
    forward, inputs, weights = result
    return forward, inputs, weights


def _passing(job: Job, micro_batches: Iterable[MicroBatch], context_rank: int | None) -> MicroBatches:
    """As arrays (n, 1)."""
    rows = []
    for m in micro_batches:
        attention = attention_seconds(m, job)
        if context_rank is None or len(attention) == 1:
            forward, backward = attention.max(axis=0).tolist()
        else:
            before = (m.dp_rank - m.merged.start) * (len(attention) // m.sharers) if m.merged else 0
            forward, backward = attention[before + context_rank].tolist()
        rows.append((float(m.shared_length), forward, backward))
    return MicroBatches(*np.array(rows).T[..., None])
