"""The passes of planned micro-batches: what `cost.passes` predicts of them, and what goes between stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context import ALL_KEYS, KeyShares, after, whole
from wlb_titan.cost.analytic import BYTES
from wlb_titan.cost.passes import MicroBatches
from wlb_titan.job import Job
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import LENGTH, ByPass, MicroBatch


def passing(micro_batches: Sequence[MicroBatch], job: Job, context_rank: int | None = None) -> MicroBatches:
    """Planned micro-batches, as arrays (n,), on the slowest context-parallel rank or on a given one."""
    attention = np.array([_on_rank(attention_seconds(m, job), m, context_rank) for m in micro_batches])
    tokens = np.array([m.shared_length for m in micro_batches], dtype=np.float64)
    exchange = np.array([job.exchanging.seconds(travelling(m, job)) for m in micro_batches])
    return MicroBatches(tokens, attention[:, 0], attention[:, 1], *exchange.T)


def attention_seconds(micro_batch: MicroBatch, job: Job) -> Floats:
    """float64 (ranks, 2), seconds of one layer's attention on each context-parallel rank, both passes."""
    if job.strategy is None or micro_batch.ranks is None:
        documents = (whole(micro_batch.documents[:, LENGTH]),)
        return job.latency.seconds(after(documents, micro_batch.prefix))
    return job.strategy.seconds(after(micro_batch.ranks, micro_batch.prefix))


def _on_rank(attention: Floats, micro_batch: MicroBatch, context_rank: int | None) -> Floats:
    """Seconds of both passes, float64 (2,), of all ranks' as `attention_seconds` has them."""
    if context_rank is None or len(attention) == 1:
        return np.asarray(attention.max(axis=0))
    first = (micro_batch.dp_rank - micro_batch.merged.start) if micro_batch.merged else 0
    return np.asarray(attention[first * (len(attention) // micro_batch.sharers) + context_rank])


def travelling(micro_batch: MicroBatch, job: Job) -> tuple[int, ...]:
    """Tokens of a micro-batch that travel by each of the job's moves."""
    if job.strategy is None or micro_batch.ranks is None:
        return ()
    return job.strategy.travelling(micro_batch.ranks, micro_batch.shared_length, micro_batch.elsewhere)


def keys_of(micro_batch: MicroBatch, job: Job) -> KeyShares:
    """What of a micro-batch's keys a context-parallel rank has at the most."""
    strategy = job.merged[micro_batch.sharers].strategy
    if strategy is None or micro_batch.ranks is None:
        return ALL_KEYS
    return strategy.keys(micro_batch.ranks, micro_batch.shared_length, micro_batch.elsewhere)


def planned_times(
    job: Job, micro_batches: ByPass[Sequence[MicroBatch]], run: int
) -> tuple[PassTimes, ByPass[Floats]]:
    """The passes of planned micro-batches, `run` to a pipeline run.

    Returns:
        Seconds, float64 (stages, n, k), and tokens of each data-parallel rank, float64 (n, k).
    """

    def tokens(packs: Sequence[MicroBatch]) -> Floats:
        return np.array([m.length for m in packs], dtype=np.float64).reshape(-1, run).T

    return in_runs(pass_seconds(job, micro_batches), run), micro_batches.each(tokens)


def pass_seconds(
    job: Job, micro_batches: ByPass[Sequence[MicroBatch]], context_rank: int | None = None
) -> Floats:
    """float64 (3, stages, micro-batches), seconds of forward passes, inputs and weights, also of those that
    data-parallel ranks share; on the slowest context-parallel rank or on a given one."""
    sharers = np.array([m.sharers for m in micro_batches.forward])
    found = np.empty((3, len(job.layers), len(sharers)))
    for ranks in np.unique(sharers).tolist():
        (own,) = np.nonzero(sharers == ranks)
        shared = job.merged[ranks]
        packs = micro_batches.each(_some, own.tolist(), shared, context_rank)
        found[:, :, own] = [times[:, 0] for times in shared.packing.pass_times(shared, packs)]
    return found


def in_runs(seconds: Floats, run: int) -> PassTimes:
    """Seconds as of `pass_seconds`, `run` micro-batches to a pipeline run: arrays (stages, n, k)."""
    return PassTimes(*seconds.reshape(*seconds.shape[:2], -1, run).swapaxes(2, 3))


def _some(
    micro_batches: Sequence[MicroBatch], numbers: Sequence[int], job: Job, context_rank: int | None
) -> MicroBatches:
    return passing([micro_batches[number] for number in numbers], job, context_rank).in_runs(1)


def transfer_seconds(job: Job, tokens: Floats) -> Floats:
    """Seconds that a micro-batch's hidden states take from one pipeline rank to the next, shaped alike."""
    if job.degrees.pipeline == 1:
        return np.zeros_like(tokens)
    inner = job.degrees.tensor * job.degrees.context
    link = job.cluster.link(2, job.degrees.strides["pp"])
    # One pair of ranks: its own network card, without the neighbours of a ring.
    bandwidth = link.bandwidth if link == job.cluster.node else job.cluster.network.bandwidth
    return tokens * (job.model.hidden * BYTES / inner / bandwidth) + link.latency
