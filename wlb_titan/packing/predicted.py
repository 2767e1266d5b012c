"""Predicted seconds of micro-batches' passes, a rank's memory, and what layers recompute under `as_needed`.

Micro-batches may be drafts, of policies that compare packings, or planned, in the simulator and timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context.layout import whole_sequence, with_prefix
from wlb_titan.context.strategy import ALL_KEYS, Figures, KeyShares
from wlb_titan.cost.passes import MicroBatches, repeated_seconds
from wlb_titan.memory.fits import runs
from wlb_titan.memory.mix import mixed
from wlb_titan.memory.rank import PackSize, Passes, RankMemory
from wlb_titan.memory.recompute import KINDS
from wlb_titan.memory.run import RunArrays
from wlb_titan.memory.slice_cache import CachedSlice
from wlb_titan.packing.slices import cache_rows
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
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
    figures = figures_of(micro_batches, job)
    pairs = zip(figures, micro_batches, strict=True)
    attention = np.array([_on_rank(of.seconds, m, context_rank) for of, m in pairs])
    tokens = np.array([m.shared_length for m in micro_batches], dtype=np.float64)
    exchange = np.array([job.exchanging.seconds(of.travelling) for of in figures])
    mixes = [m.mix for m in micro_batches if m.mix is not None]
    mix = np.stack(mixes, axis=-1).astype(np.float64) if len(mixes) == len(micro_batches) else None
    moving, repeated, latency = exchange.T
    return MicroBatches(tokens, attention[:, 0], attention[:, 1], moving, repeated, latency, mix)


def figures_of(micro_batches: Sequence[MicroBatch], job: Job) -> list[Figures]:
    """Of micro-batches that are divided by the job's strategy, or not at all."""
    if job.strategy is not None and all(m.ranks is not None for m in micro_batches):
        return job.strategy.figures([(m.ranks or (), m.shared_length, m.elsewhere) for m in micro_batches])
    whole = [with_prefix((whole_sequence(m.lengths),), m.prefix) for m in micro_batches]
    held = np.array([m.lengths.sum() for m in micro_batches])
    seconds = job.latency.seconds([shard for (shard,) in whole], held)
    return [Figures(each[None], (), ALL_KEYS) for each in seconds]


def attention_seconds(micro_batch: MicroBatch, job: Job) -> Floats:
    """float64 (ranks, 2), forward and backward seconds of one layer's attention on each rank."""
    return figures_of([micro_batch], job)[0].seconds


def _on_rank(attention: Floats, micro_batch: MicroBatch, context_rank: int | None) -> Floats:
    if context_rank is None or len(attention) == 1:
        return np.asarray(attention.max(axis=0))
    first = (micro_batch.dp_rank - micro_batch.merged.start) if micro_batch.merged else 0
    return np.asarray(attention[first * (len(attention) // micro_batch.sharers) + context_rank])


def keys_of(micro_batches: Sequence[MicroBatch], job: Job) -> list[KeyShares]:
    """Shares of micro-batches' keys; all of them for drafts."""
    result = [ALL_KEYS] * len(micro_batches)
    for sharers in {m.sharers for m in micro_batches if m.ranks is not None}:
        places = [place for place, m in enumerate(micro_batches) if m.sharers == sharers]
        figures = figures_of([micro_batches[place] for place in places], job.by_sharers[sharers])
        for place, of in zip(places, figures, strict=True):
            result[place] = of.keys
    return result


def pack_sizes(job: Job, micro_batches: Sequence[MicroBatch]) -> list[PackSize]:
    cached: list[tuple[CachedSlice, ...]] = [()] * len(micro_batches)
    if micro_batches[0].slices is not None:
        cached = [
            tuple(CachedSlice(*row) for key, *row in rows.tolist() if key >= 0)
            for rows in cache_rows(micro_batches)
        ]
    return [
        PackSize(m.length, m.sharers, keys, slices, m.mix)
        for m, keys, slices in zip(micro_batches, keys_of(micro_batches, job), cached, strict=True)
    ]


def replica_memory(
    job: Job, micro_batches: Sequence[MicroBatch], flow: Flow | None
) -> tuple[RankMemory, ...]:
    """The peak of each pipeline rank of one data-parallel rank; no `flow` is the schedule's order."""
    return job.fitting.peak(Passes(pack_sizes(job, micro_batches), flow))


FILLED = 0.99
"""Share that a mix may take of what predictions may fill: traces are up to 1 % above predictions."""


def with_mixes(
    job: Job,
    micro_batches: Sequence[MicroBatch],
    flow: Flow | None,
    ranks: Collection[int],
    seconds: Callable[[], Floats] | None = None,
) -> list[MicroBatch]:
    """A data-parallel rank's micro-batches of a step with their `mix`, chosen on these pipeline ranks.

    Ranks that meet inside a layer compute the choice from the same numbers, so they choose alike, and a
    micro-batch that data-parallel ranks share has no choice. Slack is that of a step that repeats nothing, so
    pipeline ranks need not know each other's choice; with slices hardly anything has any.

    Args:
        seconds: gives float64 (stages, kinds, micro-batches), what a layer repeats; by default as predicted.
    """
    free = [number for number, m in enumerate(micro_batches) if m.sharers == 1]
    begun = [0 if m.sharers == 1 else KINDS.index(job.memory.recompute) for m in micro_batches]
    mixes = np.zeros((len(begun), len(job.layers), len(KINDS)), dtype=np.int64)
    mixes[range(len(begun)), :, begun] = job.layers

    @cache  # most of the time, and not needed where all fits
    def repeated() -> Floats:
        result = np.zeros((len(job.layers), len(KINDS), len(micro_batches)))
        result[..., free] = repeated_seconds(job, passing([micro_batches[number] for number in free], job))
        return result

    for start, packs in runs(job, Passes(pack_sizes(job, micro_batches), flow)):
        run = slice(start, start + len(packs.packs))
        slack = cache(partial(_slack, job, micro_batches[run], flow))
        for number in ranks:
            rank = job.pipeline_ranks[number]
            own, arrays = list(rank.stages), RunArrays(rank, packs, flow, reduced=start > 0)
            room = FILLED * job.fitting.usable - job.fitting.with_dimensions(rank.still).total
            chosen = arrays.counts(0)
            if free and arrays.bytes_of(chosen).max() > room:
                again = (seconds or repeated)()[own, :, run].swapaxes(1, 2).reshape(chosen.shape)
                chosen = mixed(arrays, again, slack()[own].ravel(), room)
            mixes[run, own] = chosen.reshape(len(own), -1, len(KINDS)).swapaxes(0, 1)
    return [replace(m, mix=mix) for m, mix in zip(micro_batches, mixes, strict=True)]


def _slack(job: Job, micro_batches: Sequence[MicroBatch], flow: Flow | None) -> Floats:
    """float64 (stages, n), of the backward passes of a run if nothing is repeated."""
    result = np.zeros((len(job.layers), len(micro_batches)))
    if flow is None and job.shape.ranks > 1:
        graph = PipelineGraph(job.shape, len(micro_batches))
        of_actions = graph.slack(PassTimes(*pass_seconds(job, micro_batches)[..., None]))
        for (kind, stage, place), of_action in zip(graph.actions, of_actions[:, 0], strict=True):
            if kind in ("B", "I"):
                result[stage, place] = of_action
    return result
