"""The order of a step's passes under `slim`, and by it the step's seconds and peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context import ALL_KEYS, after, whole
from wlb_titan.cost.passes import MicroBatches
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import Passes, RankMemory
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import ReplicaPacks, passes_of, sliced_document
from wlb_titan.pipeline.packflow import PackOrder, Packs, backward_order, forward_needed, packflow
from wlb_titan.plan import LENGTH, Action, Flow

if TYPE_CHECKING:
    from wlb_titan.job import Job


Timed = tuple[Packing, Floats, Floats]
"""A step's packs, and float64 (packs,) how long forward and backward passes of each take."""

PREDICTED = 64
"""Packs that as many ranks share and of which times are predicted, for the choice of settings."""

PREDICTED_IN_STEP = 4
"""The same, for a choice in every step."""


class Flows:
    """Which kind of pass runs when, on all data-parallel ranks, as the slowest of them needs.

    FSDP's ranks meet in collectives in forward and in backward passes (all without a pipeline, those of the
    head with one), so they have to run the same kinds of passes at the same places. Backward passes are
    numbered here in the order in which they run, whatever packs these are on a rank. Tokens in flight are the
    mean over the ranks.

    Attributes:
        limit: tokens that a pipeline rank may have in flight, the mean data-parallel rank's; None for no
            limit.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # What a token holds in memory, by how many data-parallel ranks share its pack.
        self._held = {1: 1.0} | {size: merging.held for size, merging in job.merging.items()}
        self.limit: float | None = job.most_in_flight

    def of(self, step: Timed, slack: int) -> PackOrder:
        """The order of a step's passes, with so many packs in flight beyond the need."""
        packing, forward, backward = step
        ranks = np.array(packing.assigned)
        orders, needed = map(np.array, dependencies(packing))
        weights = np.array([self._held[sharers] for sharers in packing.sharers.tolist()])
        tokens, freed = (
            (weights * [pack[:, LENGTH].sum() for pack in one.packs])[ranks] for one in packing.by_pass
        )

        def ran(values: NDArray[Any]) -> NDArray[Any]:
            most: NDArray[Any] = np.take_along_axis(values, orders, axis=1).max(axis=0)
            return most

        packs = Packs(
            forward=forward[ranks].max(axis=0),
            backward=ran(backward[ranks]),
            tokens=tokens.mean(axis=0),
            freed=np.take_along_axis(freed, orders, axis=1).mean(axis=0),
            order=range(ranks.shape[1]),
            needed=ran(needed).tolist(),
        )
        return packflow(packs, self._job.shape, slack=slack, limit=self.limit)

    def timed(self, packing: Packing, predicted: int = PREDICTED) -> Timed:
        """A step with predicted times.

        Of packs that as many ranks share, so many are predicted, from the least to the most work; the others
        take as long for their work as those next to them. To divide a pack over its ranks takes milliseconds,
        and a large job has thousands.
        """
        forward, backward = packing.pass_work(self._job.cost_model)
        for sharers in np.unique(packing.sharers):
            (own,) = np.nonzero(packing.sharers == sharers)
            places = np.unique(np.linspace(0, len(own) - 1, predicted).round().astype(int))
            some = own[np.argsort(forward[own], kind="stable")[places]]
            found = pack_seconds(self._job, packing, some)
            for times, seconds in zip((forward, backward), found, strict=True):
                rising = np.argsort(times[some])  # as np.interp wants it
                work = times[some][rising]
                times[own] *= np.interp(times[own], work, seconds[rising] / work)
                times[some] = seconds
        return packing, forward, backward

    def seconds(self, steps: Sequence[Timed], slack: int) -> float:
        """How long steps take whose slowest data-parallel rank is waited for."""
        return sum(self.of(step, slack).seconds for step in steps)

    def peak(self, step: Timed, slack: int) -> RankMemory | None:
        """The peak of a step's fullest GPU; None where memory is not predicted."""
        return step_peak(step[0], self.of(step, slack).flow, self._job)


def pack_seconds(job: Job, packing: Packing, packs: Ints) -> tuple[Floats, Floats]:
    """float64 (n,) each, forward and backward of the packs with these numbers through all stages."""
    forward, backward = np.empty((2, len(packs)))
    sharers = packing.sharers[packs]
    for ranks in np.unique(sharers).tolist():
        (own,) = np.nonzero(sharers == ranks)
        shared = job.merged[ranks]
        passing = packing.by_pass.each(_passing, shared, packs[own].tolist())
        times = shared.packing.pass_times(shared, passing)
        forward[own] = times.forward.sum(axis=0)[0]
        backward[own] = (times.inputs + times.weights).sum(axis=0)[0]
    return forward, backward


def _passing(packing: Packing, job: Job, numbers: Sequence[int]) -> MicroBatches:
    """Some of a packing's packs, as arrays (1, packs)."""
    return MicroBatches(*np.array([_pack(job, packing, number) for number in numbers]).T[:, None])


def _pack(job: Job, packing: Packing, number: int) -> tuple[float, ...]:
    """The fields of `MicroBatches` for a pack."""
    lengths, slices = packing.packs[number][:, LENGTH], packing.elsewhere(number)
    prefix = None if slices is None else slices.prefix
    total = -(-int(lengths.sum()) // job.divisor) * job.divisor
    travelling: tuple[int, ...] = ()
    if job.strategy is None:
        seconds = job.latency.seconds(after((whole(lengths),), prefix))
    else:
        _, sharding = job.strategy.shard(lengths, total, slices=slices)
        seconds = job.strategy.seconds(after(sharding, prefix))
        travelling = job.strategy.travelling(sharding, total, slices)
    forward, backward = seconds.max(axis=0).tolist()
    return total, forward, backward, *job.exchanging.seconds(travelling)


LOOKED_AT = 2
"""Data-parallel ranks of a step that are predicted: those with most tokens in flight, and one more."""


def step_peak(packing: Packing, flow: Flow, job: Job) -> RankMemory | None:
    """The predicted peak of a step's fullest GPU; None where memory is not predicted."""
    if job.memory_unknown:
        return None
    orders, _ = dependencies(packing)
    return fullest(
        [
            fullest(job.fitting.peak(_passes(packing, rank, in_own_order(flow, orders[rank]), job)))
            for rank in _candidates(packing, flow, orders)
        ]
    )


def _candidates(packing: Packing, flow: Flow, orders: Sequence[Sequence[int]]) -> list[int]:
    """The data-parallel ranks of which one should be the fullest: by the most tokens in flight on the first
    pipeline rank, and by the longest pack."""
    assert packing.assigned is not None
    if len(packing.assigned) <= LOOKED_AT:
        return list(range(len(packing.assigned)))
    ranks = np.array(packing.assigned)
    added, freed = (np.array([pack[:, LENGTH].sum() for pack in one.packs])[ranks] for one in packing.by_pass)
    freed = np.take_along_axis(freed, np.array(orders), axis=1)
    changes = [added[:, a.place] if a.kind == "F" else -freed[:, a.place] for a in flow[0]]
    most = np.cumsum(changes, axis=0).max(axis=0)
    return list({*most.argsort()[-LOOKED_AT:].tolist(), int(freed.max(axis=1).argmax())})


def _passes(packing: Packing, rank: int, flow: Flow, job: Job) -> Passes:
    """What one data-parallel rank runs."""
    return passes_of(packing.by_pass.each(lambda one: _packs(one, rank, job)), flow)


def _packs(packing: Packing, rank: int, job: Job) -> ReplicaPacks:
    assert packing.assigned is not None
    numbers = packing.assigned[rank]
    sharers = packing.sharers[numbers].tolist()
    lengths = [
        job.padded(int(packing.packs[number][:, LENGTH].sum()), ranks) // ranks
        for number, ranks in zip(numbers, sharers, strict=True)
    ]
    return ReplicaPacks(lengths, sharers, [ALL_KEYS] * len(lengths), packing.parts(numbers))


def dependencies(packing: Packing) -> tuple[list[list[int]], list[list[int]]]:
    """The order of each data-parallel rank's backward passes, and the forward pass that each waits
    for."""
    assert packing.assigned is not None
    if packing.regrouped is not None:
        needed = [last_needed(packing.parts(own), packing.regrouped.parts(own)) for own in packing.assigned]
        return [list(range(len(own))) for own in packing.assigned], needed
    sliced = [[sliced_document(*part) for part in packing.parts(own)] for own in packing.assigned]
    return [backward_order(own) for own in sliced], [forward_needed(own) for own in sliced]


def in_own_order(flow: Flow, order: Sequence[int]) -> Flow:
    """A flow whose backward passes are numbered as they run, with the packs that they are on one rank."""
    return tuple(
        tuple(a if a.kind == "F" else Action("B", a.stage, order[a.place]) for a in actions)
        for actions in flow
    )
