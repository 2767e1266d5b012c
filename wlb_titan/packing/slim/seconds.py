"""Seconds of MicroPacks, for the choice of their number: what short packs lose counts here (`slim`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context import after, whole
from wlb_titan.cost.passes import MicroBatches
from wlb_titan.packing.policy import Packing
from wlb_titan.plan import LENGTH

if TYPE_CHECKING:
    from wlb_titan.job import Job


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
