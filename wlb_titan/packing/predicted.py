"""Predicted seconds of micro-batches' passes, a rank's memory, and what layers recompute under `as_needed`.

Micro-batches may be drafts, of policies that compare packings, or planned, in the simulator and timelines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context.layout import whole_sequence, with_prefix
from wlb_titan.context.strategy import ALL_KEYS, Figures, KeyShares
from wlb_titan.cost.passes import MicroBatches, repeated_seconds
from wlb_titan.memory.mix import UNCHOSEN, Moments, mixed, unmixed
from wlb_titan.memory.rank import Moment, PackSize, Passes, RankMemory
from wlb_titan.memory.recompute import KINDS
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
    job: Job, micro_batches: Sequence[MicroBatch], flow: Flow | None, ranks: Collection[int]
) -> list[MicroBatch]:
    """A data-parallel rank's micro-batches of a step with their `mix`, chosen on these pipeline ranks.

    All ranks of a stage must repeat alike what they wait for together. So all that the choice follows from is
    the same on tensor- and context-parallel ranks, and micro-batches that data-parallel ranks share have no
    choice. Slack is that of a step that repeats nothing, so ranks need not know each other's choice; with
    slices hardly anything has any.
    """
    sizes, each = pack_sizes(job, micro_batches), len(micro_batches)
    length = each if flow is not None or job.run is None else job.run
    free = np.array([m.sharers == 1 for m in micro_batches])
    mixes = np.zeros((each, len(job.layers), len(KINDS)), dtype=np.int64)
    mixes[free, :, 0], mixes[~free, :, UNCHOSEN] = job.layers, job.layers
    begun = mixes.copy()

    @cache  # most of the time, and not needed where all fits
    def seconds() -> Floats:
        """float64 (stages, micro-batches, kinds), which a layer repeats."""
        repeated = np.zeros((len(job.layers), each, len(KINDS)))
        mixed_ones = passing([m for m in micro_batches if m.sharers == 1], job)
        repeated[:, free] = repeated_seconds(job, mixed_ones).swapaxes(1, 2)
        return repeated

    @cache
    def slack(first: int) -> Floats:
        """float64 (stages, micro-batches of the run), of backward passes under `none`."""
        slacks = np.zeros((len(job.layers), length))
        if flow is None and job.shape.ranks > 1:
            graph = PipelineGraph(job.shape, length)
            run = slice(first, first + length)
            nothing_repeated = zip(micro_batches[run], begun[run], strict=True)
            times = pass_seconds(job, [replace(m, mix=mix) for m, mix in nothing_repeated])
            of_actions = graph.slack(PassTimes(*times[..., None]))
            for (kind, stage, place), of_action in zip(graph.actions, of_actions[:, 0], strict=True):
                if kind in ("B", "I"):
                    slacks[stage, place] = of_action
        return slacks

    for number in ranks:
        rank = job.packing.rank_memory(job, number)
        for first in range(0, each, length):
            run = slice(first, first + length)
            moments = Moments.of(rank, Passes(sizes[run], flow), reduced=first > 0)
            there = job.fitting.with_dimensions(rank.at(Moment(), 0.0, 0)).total
            stages, room = len(rank.stages), FILLED * job.fitting.usable - there
            chosen = unmixed(moments, np.tile(free[run], stages))
            if free.any() and moments.bytes_of(chosen).max() > room:
                repeated = np.concatenate(seconds()[list(rank.stages), run])
                waits = slack(first)[list(rank.stages)]
                chosen = mixed(moments, chosen, repeated, waits.ravel(), room)
            mixes[run, rank.stages] = chosen.reshape(stages, -1, len(KINDS)).swapaxes(0, 1)
    return [replace(m, mix=mix) for m, mix in zip(micro_batches, mixes, strict=True)]
