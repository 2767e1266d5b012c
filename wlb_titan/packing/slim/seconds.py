"""Seconds of MicroPacks, for the choice of their number: what short packs lose counts here (`slim`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context import ContextStrategy, after, whole
from wlb_titan.context.exchange import ExchangeCost
from wlb_titan.cost.passes import MicroBatches, PassJob
from wlb_titan.packing.policy import Packing, PackingPolicy
from wlb_titan.plan import LENGTH


class PackJob(PassJob, Protocol):
    """What of a job decides about the time of packs."""

    @property
    def packing(self) -> PackingPolicy.Config: ...
    @property
    def divisor(self) -> int: ...
    @property
    def strategy(self) -> ContextStrategy | None: ...
    @property
    def exchanging(self) -> ExchangeCost: ...
    @property
    def merged(self) -> Mapping[int, Any]:
        """The job as micro-batches see it that so many data-parallel ranks share."""
        ...


@dataclass(frozen=True, slots=True)
class PackSeconds:
    """Predicts the passes of packs, as of `PassSeconds`."""

    job: PackJob

    def __call__(self, packing: Packing, packs: Ints) -> tuple[Floats, Floats]:
        """float64 (n,) each, forward and backward of the numbered packs through all stages."""
        forward, backward = np.empty((2, len(packs)))
        sharers = packing.sharers[packs]
        for ranks in np.unique(sharers).tolist():
            (own,) = np.nonzero(sharers == ranks)
            job: PackJob = self.job.merged[ranks]
            times = job.packing.pass_times(job, packing.by_pass.each(_passing, job, packs[own].tolist()))
            forward[own] = times.forward.sum(axis=0)[0]
            backward[own] = (times.inputs + times.weights).sum(axis=0)[0]
        return forward, backward


def _passing(packing: Packing, job: PackJob, numbers: Sequence[int]) -> MicroBatches:
    """Some of a packing's packs, as arrays (1, packs)."""
    return MicroBatches(*np.array([_pack(job, packing, number) for number in numbers]).T[:, None])


def _pack(job: PackJob, packing: Packing, number: int) -> tuple[float, ...]:
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
