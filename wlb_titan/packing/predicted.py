"""Predicted seconds of micro-batches' passes, and a rank's memory.

Micro-batches may be drafts, of policies that compare packings, or planned, in the simulator and timelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context.layout import whole_sequence, with_prefix
from wlb_titan.context.strategy import ALL_KEYS, KeyShares
from wlb_titan.cost.passes import MicroBatches
from wlb_titan.memory.rank import PackSize, Passes, RankMemory
from wlb_titan.memory.slice_cache import CachedSlice
from wlb_titan.packing.slices import cache_rows
from wlb_titan.plan import Flow, MicroBatch

if TYPE_CHECKING:
    from wlb_titan.job import Job


def pass_seconds(job: Job, micro_batches: Sequence[MicroBatch], context_rank: int | None = None) -> Floats:
    """float64 (3, stages, micro-batches), seconds of forward passes, gradients of inputs and of weights.

    Args:
        context_rank: the rank whose attention counts; None takes the slowest for each micro-batch.
    """
    sharers = np.array([m.sharers for m in micro_batches])
    seconds = np.empty((3, len(job.layers), len(sharers)))
    for ranks in np.unique(sharers).tolist():
        (group,) = np.nonzero(sharers == ranks)
        shared = job.by_sharers[ranks]
        packs = passing([micro_batches[number] for number in group.tolist()], shared, context_rank)
        seconds[:, :, group] = [times[:, 0] for times in shared.packing.pass_times(shared, packs.in_runs(1))]
    return seconds


def passing(micro_batches: Sequence[MicroBatch], job: Job, context_rank: int | None = None) -> MicroBatches:
    """Tokens, attention and exchange of micro-batches, as arrays (n,)."""
    attention = np.array([_on_rank(attention_seconds(m, job), m, context_rank) for m in micro_batches])
    tokens = np.array([m.shared_length for m in micro_batches], dtype=np.float64)
    exchange = np.array([job.exchanging.seconds(travelling(m, job)) for m in micro_batches])
    mixes = [m.mix for m in micro_batches if m.mix is not None]
    mix = np.stack(mixes, axis=-1).astype(np.float64) if len(mixes) == len(micro_batches) else None
    moving, repeated, latency = exchange.T
    return MicroBatches(tokens, attention[:, 0], attention[:, 1], moving, repeated, latency, mix)


def attention_seconds(micro_batch: MicroBatch, job: Job) -> Floats:
    """float64 (ranks, 2), forward and backward seconds of one layer's attention on each rank."""
    if job.strategy is None or micro_batch.ranks is None:
        return job.latency.seconds(with_prefix((whole_sequence(micro_batch.lengths),), micro_batch.prefix))
    return job.strategy.seconds(with_prefix(micro_batch.ranks, micro_batch.prefix))


def _on_rank(attention: Floats, micro_batch: MicroBatch, context_rank: int | None) -> Floats:
    if context_rank is None or len(attention) == 1:
        return np.asarray(attention.max(axis=0))
    first = (micro_batch.dp_rank - micro_batch.merged.start) if micro_batch.merged else 0
    return np.asarray(attention[first * (len(attention) // micro_batch.sharers) + context_rank])


def travelling(micro_batch: MicroBatch, job: Job) -> tuple[int, ...]:
    if job.strategy is None or micro_batch.ranks is None:
        return ()
    return job.strategy.travelling(micro_batch.ranks, micro_batch.shared_length, micro_batch.elsewhere)


def keys_of(micro_batch: MicroBatch, job: Job) -> KeyShares:
    """Shares of a micro-batch's keys; all of them for a draft."""
    strategy = job.by_sharers[micro_batch.sharers].strategy
    if strategy is None or micro_batch.ranks is None:
        return ALL_KEYS
    return strategy.keys(micro_batch.ranks, micro_batch.shared_length, micro_batch.elsewhere)


def pack_sizes(job: Job, micro_batches: Sequence[MicroBatch]) -> list[PackSize]:
    cached: list[tuple[CachedSlice, ...]] = [()] * len(micro_batches)
    if micro_batches[0].slices is not None:
        cached = [
            tuple(CachedSlice(*row) for key, *row in rows.tolist() if key >= 0)
            for rows in cache_rows(micro_batches)
        ]
    return [
        PackSize(m.length, m.sharers, keys_of(m, job), slices, m.mix)
        for m, slices in zip(micro_batches, cached, strict=True)
    ]


def replica_memory(
    job: Job, micro_batches: Sequence[MicroBatch], flow: Flow | None
) -> tuple[RankMemory, ...]:
    """The peak of each pipeline rank of one data-parallel rank; no `flow` is the schedule's order."""
    return job.fitting.peak(Passes(pack_sizes(job, micro_batches), flow))
