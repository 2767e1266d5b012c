"""The order of a step's passes under `slim`, and by it the step's seconds and peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import RankMemory
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.predicted import pass_seconds, replica_memory
from wlb_titan.packing.slim.slices import last_needed, sliced_document
from wlb_titan.pipeline.packflow import PackOrder, Packs, backward_order, forward_needed, packflow
from wlb_titan.plan import Action, Flow, MicroBatch

if TYPE_CHECKING:
    from wlb_titan.job import Job


Timed = tuple[Packing, Floats, Floats]
"""A step's packs, and float64 (packs,) how long forward and backward passes of each take."""

PREDICTED = 64
"""Packs that as many ranks share and of which times are predicted, for the choice of settings."""

PREDICTED_IN_STEP = 4
"""The same, for a choice in every step."""

LOOKED_AT = 2
"""Data-parallel ranks of a step whose memory is predicted: those with most tokens in flight, and one more."""


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
        # What a token of a pack that ranks share holds on each of them, relative to one of a rank's own
        # pack: a share of the activations, and all of the document's keys and values.
        kept = job.token_bytes.kept_in_slices
        self._held = {n: shared.token_bytes.kept_in_slices / kept for n, shared in job.merged.items()}
        self.limit: float | None = job.most_in_flight

    def of(self, step: Timed, slack: int) -> PackOrder:
        """The order of a step's passes, with so many packs in flight beyond the need."""
        packing, forward, backward = step
        ranks = np.array(packing.assigned)
        orders, needed = map(np.array, dependencies(packing))
        ahead = ranks[:, : orders.shape[1]]
        back = np.take_along_axis(ranks, orders, axis=1)
        weights = np.array([self._held[sharers] for sharers in packing.sharers.tolist()])
        tokens = weights * pack_tokens(packing)
        packs = Packs(
            forward=forward[ahead].max(axis=0),
            backward=backward[back].max(axis=0),
            tokens=tokens[ahead].mean(axis=0),
            freed=tokens[back].mean(axis=0),
            needed=needed.max(axis=0).tolist(),
        )
        return packflow(packs, self._job.shape, slack=slack, limit=self.limit)

    def timed(self, packing: Packing, predicted: int = PREDICTED) -> Timed:
        """A step with predicted times.

        Of packs that as many ranks share, so many are predicted, from the least to the most work; the others
        take as long for their work as those next to them. To divide a pack over its ranks takes milliseconds,
        and a large job has thousands.
        """
        times = dict(zip("FB", packing.pass_work(self._job.cost_model), strict=True))
        alike: dict[tuple[int, str], list[int]] = {}
        for number, pack in enumerate(packing.packs):
            alike.setdefault((pack.sharers, pack.passes), []).append(number)
        for (_, passes), numbers in alike.items():
            own = np.array(numbers)
            places = np.unique(np.linspace(0, len(own) - 1, predicted).round().astype(int))
            some = own[np.argsort(times[passes[0]][own], kind="stable")[places]]
            found = self._seconds(packing, some)
            for kind in passes:
                _interpolated(times[kind], found[kind], own, some)
        return packing, times["F"], times["B"]

    def _seconds(self, packing: Packing, packs: Ints) -> dict[str, Floats]:
        """float64 (n,) for each kind of pass: that of the packs with these numbers through all stages."""
        sized = [self._job.sized(packing.packs[number]) for number in packs.tolist()]
        forward, inputs, weights = pass_seconds(self._job, list(map(self._job.sharded, sized)))
        return {"F": forward.sum(axis=0), "B": (inputs + weights).sum(axis=0)}

    def seconds(self, steps: Sequence[Timed], slack: int) -> float:
        """How long steps take whose slowest data-parallel rank is waited for."""
        return sum(self.of(step, slack).seconds for step in steps)

    def peak(self, packing: Packing, flow: Flow) -> RankMemory | None:
        """The predicted peak of a step's fullest GPU; None where memory is not predicted.

        Args:
            flow: the order of passes, as of `of`.
        """
        if self._job.memory_unknown:
            return None
        orders, _ = dependencies(packing)
        peaks = []
        for rank in _candidates(packing, flow, orders):
            packs = [self._job.sized(pack) for pack in packing.of_rank(rank)]
            peaks.append(fullest(replica_memory(self._job, packs, in_own_order(flow, orders[rank]))))
        return fullest(peaks)


def _interpolated(times: Floats, seconds: Floats, own: Ints, some: Ints) -> None:
    """Turns the work of the packs `own` into seconds, of which those of `some` were predicted."""
    rising = np.argsort(times[some])  # as np.interp wants it
    work = times[some][rising]
    times[own] *= np.interp(times[own], work, seconds[rising] / work)
    times[some] = seconds


def pack_tokens(packing: Packing) -> Ints:
    """int64 (packs,), tokens of documents."""
    return np.array([pack.lengths.sum() for pack in packing.packs])


def _candidates(packing: Packing, flow: Flow, orders: Sequence[Sequence[int]]) -> list[int]:
    """The data-parallel ranks of which one should be the fullest: by the most tokens in flight on the first
    pipeline rank, and by the longest pack."""
    assert packing.assigned is not None
    if len(packing.assigned) <= LOOKED_AT:
        return list(range(len(packing.assigned)))
    tokens = pack_tokens(packing)[np.array(packing.assigned)]
    freed = np.take_along_axis(tokens, np.array(orders), axis=1)
    changes = [tokens[:, a.place] if a.kind == "F" else -freed[:, a.place] for a in flow[0]]
    most = np.cumsum(changes, axis=0).max(axis=0)
    return list({*most.argsort()[-LOOKED_AT:].tolist(), int(freed.max(axis=1).argmax())})


def dependencies(packing: Packing) -> tuple[list[list[int]], list[list[int]]]:
    """What backward passes of each data-parallel rank run, in order, and the forward pass that each waits
    for."""
    assert packing.assigned is not None
    found = [_dependencies(packing.of_rank(rank)) for rank in range(len(packing.assigned))]
    return [order for order, _ in found], [needed for _, needed in found]


def _dependencies(packs: Sequence[MicroBatch]) -> tuple[list[int], list[int]]:
    order = [place for place, pack in enumerate(packs) if pack.passes == "B"]
    if order:
        return order, last_needed(packs)
    sliced = [sliced_document(pack) for pack in packs]
    order, needed = backward_order(sliced), forward_needed(sliced)
    return order, [needed[place] for place in order]


def in_own_order(flow: Flow, order: Sequence[int]) -> Flow:
    """A flow whose backward passes are numbered as they run, with the packs that they are on one rank."""
    return tuple(
        tuple(a if a.kind == "F" else Action("B", a.stage, order[a.place]) for a in actions)
        for actions in flow
    )
