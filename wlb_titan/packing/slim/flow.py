"""The order of passes of a step of MicroPacks, for all data-parallel ranks of a job together (`slim`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.memory.rank import RankMemory
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.slim.dependencies import dependencies
from wlb_titan.packing.slim.seconds import pack_seconds
from wlb_titan.packing.slim.step_peak import step_peak
from wlb_titan.pipeline.packflow import PackOrder, Packs, packflow
from wlb_titan.plan import LENGTH

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
