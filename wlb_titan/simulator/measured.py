"""The passes of a step from measurements of some of its ranks.

A rank that ran alone (`wlb-titan rehearse`) tells how long its passes compute; what it would wait for within
them, tensor- and context-parallel collectives, is added as it is predicted. A pass of a rank that did not run
takes what is predicted, times measured over predicted of the same micro-batch on the stage that is most like
its own: stages of equal layers take the same. Where that micro-batch was not run either, all of the stage's
decide. Of context-parallel ranks the slowest counts; if it did not run, the one that did is scaled to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.cost.passes import MicroBatches
from wlb_titan.job import Job
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import ByPass, MicroBatch, Plan, micro_batches_of
from wlb_titan.simulator.planned import attention_seconds, passing

HALVES = {"F": [0], "L": [0], "FB": [0, 1, 2], "B": [1, 2], "R": [1, 2], "I": [1], "W": [2]}
"""What a kind of pass is of forward passes, inputs and weights; several it is in the shares predicted."""
TINY = 1e-30  # seconds; in the place of none in a denominator


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: F forward, R a backward pass put together, L loss, B backward, I and W the backward passes of
            inputs and of weights alone, FB a whole micro-batch without pipeline parallelism.
        stage: from 0.
        micro_batch: from 0 in the order in which this data-parallel rank runs the step's.
        start: seconds since the timer was switched on.
        seconds: duration.
        computed: processor time of the thread that ran it; None on an accelerator.
    """

    kind: str
    stage: int
    micro_batch: int
    start: float
    seconds: float
    computed: float | None = None


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
        times: times of all passes, float64 (stages, micro-batches of all steps, 1), in the plans' order.
        known: bool (stages, micro-batches of all steps), whether a rank with this pass ran.
        step: int64 (micro-batches of all steps,), the step of each, from 0.
        optimizer: float64 (steps,), of the slowest rank that ran.
    """

    times: PassTimes
    known: NDArray[np.bool_]
    step: NDArray[np.int64]
    optimizer: Floats

    def in_runs(self, n: int) -> PassTimes:
        """float64 (stages, n, k), n micro-batches a run, as the simulator has them."""
        arrays = (self.times.forward, self.times.inputs, self.times.weights)
        return PassTimes(*(a.reshape(len(a), -1, n).swapaxes(1, 2) for a in arrays))

    def of(self, steps: Sequence[int]) -> Measured:
        """Some of the steps, by rising number."""
        own = np.isin(self.step, steps)
        arrays = (self.times.forward, self.times.inputs, self.times.weights)
        numbers = np.searchsorted(steps, self.step[own])
        times = PassTimes(*(a[:, own] for a in arrays))
        return Measured(times, self.known[:, own], numbers, self.optimizer[list(steps)])


def measured(job: Job, plans: Sequence[Plan], steps: Sequence[Sequence[MeasuredStep]]) -> Measured:
    """The passes of planned steps.

    Args:
        job: the job.
        plans: plans of the steps.
        steps: ranks that ran each plan, at least one.
    """
    quiet = job.on(without_waiting(job.cluster))
    packs = _Packs.of(plans)
    slowest, waiting = _predicted(quiet, packs), _predicted(job, packs)
    found = _Found(packs, len(job.layers))
    own = {cp: _predicted(quiet, packs, cp) for cp in {rank.cp for ranks in steps for rank in ranks}}
    for number, ranks in enumerate(steps):
        for rank in ranks:
            found.add(number, rank, own[rank.cp])
    passes = found.scaled(np.stack(slowest))
    seconds = np.stack([_filled(*one, job.layers) for one in zip(passes, slowest, strict=True)])
    forward, inputs, weights = seconds + np.stack(waiting) - np.stack(slowest)
    return Measured(
        times=PassTimes(forward[..., None], inputs[..., None], weights[..., None]),
        known=np.asarray(np.isfinite(passes).all(axis=0)),
        step=np.array(packs.step),
        optimizer=np.array([max(rank.optimizer for rank in ranks) for ranks in steps]),
    )


def without_waiting(cluster: Cluster) -> Cluster:
    """This cluster with communication that takes no time."""
    free = Link(float("inf"), 0.0)
    return replace(cluster, node=free, network=free)


class _Packs(NamedTuple):
    """The micro-batches of all steps, in the plans' order, and their steps."""

    by_pass: ByPass[list[MicroBatch]]
    step: list[int]

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> _Packs:
        step = [number for number, plan in enumerate(plans) for _ in plan.micro_batches]
        return cls(micro_batches_of(plans), step)

    def places(self) -> dict[tuple[int, int, int], int]:
        """Where a micro-batch stands, by step, data-parallel rank and place in the rank's order."""
        numbered = enumerate(zip(self.step, self.by_pass.forward, strict=True))
        return {(step, m.dp_rank, m.index): place for place, (step, m) in numbered}


class _Found:
    """What ranks measured of forward passes, inputs and weights, the longest of each pass.

    Attributes:
        passes: float64 (3, stages, micro-batches), nan where none ran.
        predicted: what is predicted of the ranks that ran it, the most of them, in the same shape.
    """

    def __init__(self, packs: _Packs, stages: int) -> None:
        self.passes = np.full((3, stages, len(packs.step)), np.nan)
        self.predicted = np.zeros_like(self.passes)
        self._places = packs.places()
        self._apart = not packs.by_pass.same

    def add(self, step: int, rank: MeasuredStep, own: Sequence[Floats]) -> None:
        """One step of one rank.

        Args:
            step: from 0.
            rank: what it measured.
            own: what is predicted of its passes.
        """
        sums: dict[tuple[int, int, int], float] = defaultdict(float)
        for kind, stage, micro_batch, _, seconds, _ in rank.passes:
            place = self._places[step, rank.dp, micro_batch]
            # A loss is of forward passes, unless backward passes have micro-batches of their own.
            halves = HALVES["R" if kind == "L" and self._apart else kind]
            shares = np.array([own[half][stage, place] for half in halves])
            for half, share in zip(halves, (shares / shares.sum()).tolist(), strict=True):
                sums[half, stage, place] += share * seconds
        for where, seconds in sums.items():
            self.passes[where] = np.fmax(self.passes[where], seconds)
            half, stage, place = where
            self.predicted[where] = max(self.predicted[where], own[half][stage, place])

    def scaled(self, slowest: Floats) -> Floats:
        """The passes, of the slowest context-parallel rank where only others ran: float64 (3, stages,
        micro-batches).

        Args:
            slowest: what is predicted of it, of the same shape.
        """
        mine = np.where(self.predicted > 0, self.predicted, slowest)
        return self.passes * np.maximum(slowest / np.maximum(mine, TINY), 1.0)


def _filled(found: Floats, predicted: Floats, layers: Sequence[int]) -> Floats:
    """float64 (stages, micro-batches), with what did not run in place of nan."""
    filled = found.copy()
    ran = np.isfinite(found)
    sources = [stage for stage in range(len(layers)) if ran[stage].any()]
    assert sources, "no rank ran"
    for stage in range(len(layers)):
        source = min(sources, key=lambda other: _unlike(stage, other, layers))
        some = ran[source]
        total = found[source, some].sum() / max(predicted[source, some].sum(), TINY)
        ratio = np.where(some, found[source] / np.maximum(predicted[source], TINY), total)
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
    forward = packs.by_pass.forward
    result = np.empty((3, len(job.layers), len(forward)))
    for sharers in {m.sharers for m in forward}:
        own = [i for i, m in enumerate(forward) if m.sharers == sharers]
        shared = job.merged[sharers]
        found = packs.by_pass.each(_passing, own, shared, context_rank)
        times = shared.packing.pass_times(shared, found)
        for half, array in enumerate((times.forward, times.inputs, times.weights)):
            result[half][:, own] = array[..., 0]
    of_forward, inputs, weights = result
    return of_forward, inputs, weights


def _passing(
    all_: Sequence[MicroBatch], numbers: Sequence[int], job: Job, context_rank: int | None
) -> MicroBatches:
    """Some of the micro-batches, as arrays (n, 1)."""
    micro_batches = [all_[number] for number in numbers]
    found = passing(micro_batches, job).in_runs(len(micro_batches))
    if context_rank is None:
        return found
    own = []
    for m in micro_batches:
        attention = attention_seconds(m, job)
        before = (m.dp_rank - m.merged.start) * (len(attention) // m.sharers) if m.merged else 0
        own.append(attention[before + context_rank if len(attention) > 1 else 0])
    forward, backward = np.array(own).T[..., None]
    return replace(found, forward=forward, backward=backward)
