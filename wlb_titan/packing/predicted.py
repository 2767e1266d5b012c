"""Predicted seconds of micro-batches' passes, a rank's memory, and what layers recompute under `as_needed`.

Micro-batches may be drafts, of policies that compare packings, or planned, in the simulator and timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Literal

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.layout import whole_sequence, with_prefix
from wlb_titan.context.strategy import ALL_KEYS, Figures, KeyShares
from wlb_titan.layers.groups import hidden
from wlb_titan.layers.passes import Loads, pass_parts, pass_times, repeated_seconds
from wlb_titan.layers.rates import Rates
from wlb_titan.layers.recompute import KINDS
from wlb_titan.memory.fits import Fitting, runs
from wlb_titan.memory.mix import mixed
from wlb_titan.memory.rank import PackSize, Passes, RankMemory, kept_states
from wlb_titan.memory.run import RunArrays
from wlb_titan.memory.slice_cache import CachedSlice
from wlb_titan.packing.slices import cache_rows
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import Flow, MicroBatch


def pass_seconds(
    rates: Rates, micro_batches: Sequence[MicroBatch], context_rank: int | None = None
) -> Floats:
    """float64 (3, stages, micro-batches), seconds of forward passes, gradients of inputs and of weights.

    Args:
        context_rank: the rank whose attention counts; None takes the slowest for each micro-batch.
    """
    seconds = np.empty((3, len(rates.layers), len(micro_batches)))
    for group, own, shared in _by_sharers(rates, micro_batches):
        packs = passing(own, shared, context_rank).in_runs(1)
        times = (pass_times if own[0].passes == "FB" else regrouped_times)(shared, packs)
        seconds[:, :, group] = [each[:, 0] for each in times]
    return seconds


def part_seconds(rates: Rates, micro_batches: Sequence[MicroBatch]) -> dict[str, Floats]:
    """The parts of `pass_seconds`, which add up to it. "slowest CP rank" is what the attention of the slowest
    context-parallel rank takes longer than that of their mean."""
    result: dict[str, Floats] = {}
    for group, own, shared in _by_sharers(rates, micro_batches):
        slowest, mean = (passing(own, shared, rank) for rank in (None, "mean"))
        parts, even = pass_parts(shared, slowest), pass_parts(shared, mean)["attention"]
        parts |= {"attention": even, "slowest CP rank": parts["attention"] - even}
        if own[0].passes != "FB":
            head = parts["head"]
            parts["head"] = np.stack([0 * head[0], head[0] + head[1], head[2]])
            received = np.zeros_like(head)
            received[1] = _received(shared) * slowest.tokens
            parts["kept states"] = received
        for name, seconds in parts.items():
            result.setdefault(name, np.zeros((*seconds.shape[:2], len(micro_batches))))[..., group] = seconds
    return result


def _by_sharers(
    rates: Rates, micro_batches: Sequence[MicroBatch]
) -> Iterator[tuple[Ints, list[MicroBatch], Rates]]:
    """The numbers of the micro-batches that as many data-parallel ranks share, these, and their rates."""
    sharers = np.array([m.sharers for m in micro_batches])
    for ranks in np.unique(sharers).tolist():
        (group,) = np.nonzero(sharers == ranks)
        yield group, [micro_batches[number] for number in group.tolist()], rates.shared(ranks)


def regrouped_times(rates: Rates, micro_batches: Loads) -> PassTimes:
    """`pass_times` of micro-batches of which only forward or only backward passes run."""
    times, tokens = pass_times(rates, micro_batches), micro_batches.tokens
    head = np.zeros((len(rates.layers), 1, 1))
    head[-1] = rates.token.head
    return PassTimes(
        forward=times.forward - head * tokens,
        inputs=times.inputs + (head + _received(rates)[..., None]) * tokens,
        weights=times.weights,
    )


def _received(rates: Rates) -> Floats:
    """float64 (stages, 1), seconds of a token's hidden states that the ranks of its backward pass receive."""
    sharing = rates.degrees.context * rates.degrees.tensor
    states = np.array(kept_states(rates.layers))[:, None]
    size = rates.model.hidden * rates.memory.compute_bytes
    return states * rates.cluster.all_to_all(size / sharing, sharing)


def passing(
    micro_batches: Sequence[MicroBatch], rates: Rates, context_rank: int | Literal["mean"] | None = None
) -> Loads:
    """Tokens, attention and exchange of micro-batches, as arrays (n,); attention as (stages, n)."""
    attended = {}
    for windows, own in rates.by_windows.items():
        figures = figures_of(micro_batches, own)
        pairs = zip(figures, micro_batches, strict=True)
        attended[windows] = np.array([_on_rank(of.seconds, m, context_rank) for of, m in pairs])
    attention = np.stack([attended[windows] for windows in rates.stage_windows])
    tokens = np.array([m.shared_length for m in micro_batches], dtype=np.float64)
    exchange = np.array([rates.exchanging.seconds(of.travelling) for of in figures])
    mixes = [m.mix for m in micro_batches if m.mix is not None]
    mix = np.stack(mixes, axis=-1).astype(np.float64) if len(mixes) == len(micro_batches) else None
    moving, repeated, latency = exchange.T
    groups = np.array([m.groups for m in micro_batches])
    latency = groups * latency
    forward, backward = np.moveaxis(attention, -1, 0)
    waits, units = moving + latency, rates.latency.units
    beside = np.stack([hidden(seconds, waits, groups, units) for seconds in (forward, backward)])
    return Loads(tokens, forward, backward, moving, repeated, latency, mix, beside)


def figures_of(micro_batches: Sequence[MicroBatch], rates: Rates) -> list[Figures]:
    """Of micro-batches that are divided by the job's strategy, or not at all."""
    if rates.strategy is not None and all(m.ranks is not None for m in micro_batches):
        found: list[Figures] = [Figures(np.zeros(0), (), ALL_KEYS)] * len(micro_batches)
        for groups in {m.groups for m in micro_batches}:
            strategy = rates.of_group(groups).strategy
            places = [place for place, m in enumerate(micro_batches) if m.groups == groups]
            packs = [
                (m.ranks or (), m.shared_length, m.elsewhere) for m in map(micro_batches.__getitem__, places)
            ]
            for place, of in zip(places, strategy.figures(packs) if strategy else (), strict=True):
                found[place] = of._replace(seconds=groups * of.seconds)
        return found
    whole = [with_prefix((whole_sequence(m.lengths),), m.prefix) for m in micro_batches]
    held = np.array([m.lengths.sum() for m in micro_batches])
    seconds = rates.latency.seconds([shard for (shard,) in whole], held)
    return [Figures(each[None], (), ALL_KEYS) for each in seconds]


def attention_seconds(micro_batch: MicroBatch, rates: Rates) -> Floats:
    """float64 (ranks, 2), forward and backward seconds of one layer's attention on each rank."""
    return figures_of([micro_batch], rates)[0].seconds


def _on_rank(attention: Floats, micro_batch: MicroBatch, context_rank: int | str | None) -> Floats:
    if isinstance(context_rank, str):
        return np.asarray(attention.mean(axis=0))
    if context_rank is None or len(attention) == 1:
        return np.asarray(attention.max(axis=0))
    first = (micro_batch.dp_rank - micro_batch.merged.start) if micro_batch.merged else 0
    return np.asarray(attention[first * (len(attention) // micro_batch.sharers) + context_rank])


def keys_of(micro_batches: Sequence[MicroBatch], rates: Rates) -> list[KeyShares]:
    """Shares of micro-batches' keys; all of them for drafts."""
    strategies = [rates.shared(m.sharers).strategy for m in micro_batches]
    return [
        ALL_KEYS if m.ranks is None or own is None else own.keys(m.ranks, m.shared_length, m.elsewhere)
        for m, own in zip(micro_batches, strategies, strict=True)
    ]


def pack_sizes(rates: Rates, micro_batches: Sequence[MicroBatch]) -> list[PackSize]:
    cached: list[tuple[CachedSlice, ...]] = [()] * len(micro_batches)
    if micro_batches[0].slices is not None:
        cached = [
            tuple(CachedSlice(*row) for key, *row in rows.tolist() if key >= 0)
            for rows in cache_rows(micro_batches)
        ]
    return [
        PackSize(m.length, m.sharers, keys, slices, m.mix)
        for m, keys, slices in zip(micro_batches, keys_of(micro_batches, rates), cached, strict=True)
    ]


def replica_memory(
    fitting: Fitting, micro_batches: Sequence[MicroBatch], flow: Flow | None
) -> tuple[RankMemory, ...]:
    """The peak of each pipeline rank of one data-parallel rank; no `flow` is the schedule's order."""
    return fitting.peak(Passes(pack_sizes(fitting.rates, micro_batches), flow))


FILLED = 0.99
"""Share that a mix may take of what predictions may fill: traces are up to 1 % above predictions."""


def with_mixes(
    fitting: Fitting,
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
    rates = fitting.rates
    free = [number for number, m in enumerate(micro_batches) if m.sharers == 1]
    begun = [0 if m.sharers == 1 else KINDS.index(rates.memory.recompute) for m in micro_batches]
    mixes = np.zeros((len(begun), len(rates.layers), len(KINDS)), dtype=np.int64)
    mixes[range(len(begun)), :, begun] = rates.layers

    @cache  # most of the time, and not needed where all fits
    def repeated() -> Floats:
        result = np.zeros((len(rates.layers), len(KINDS), len(micro_batches)))
        result[..., free] = repeated_seconds(
            rates, passing([micro_batches[number] for number in free], rates)
        )
        return result

    for start, packs in runs(rates, Passes(pack_sizes(rates, micro_batches), flow)):
        run = slice(start, start + len(packs.packs))
        slack = cache(partial(_slack, rates, micro_batches[run], flow))
        for number in ranks:
            rank = fitting.pipeline_ranks[number]
            own, arrays = list(rank.stages), RunArrays(rank, packs, flow, reduced=start > 0)
            room = FILLED * fitting.usable - fitting.with_dimensions(rank.still).total
            chosen = arrays.counts(0)
            if free and arrays.bytes_of(chosen).max() > room:
                again = (seconds or repeated)()[own, :, run].swapaxes(1, 2).reshape(chosen.shape)
                chosen = mixed(arrays, again, slack()[own].ravel(), room)
            mixes[run, own] = chosen.reshape(len(own), -1, len(KINDS)).swapaxes(0, 1)
    return [replace(m, mix=mix) for m, mix in zip(micro_batches, mixes, strict=True)]


def _slack(rates: Rates, micro_batches: Sequence[MicroBatch], flow: Flow | None) -> Floats:
    """float64 (stages, n), of the backward passes of a run if nothing is repeated."""
    result = np.zeros((len(rates.layers), len(micro_batches)))
    if flow is None and rates.shape.ranks > 1:
        graph = PipelineGraph(rates.shape, len(micro_batches))
        of_actions = graph.slack(PassTimes(*pass_seconds(rates, micro_batches)[..., None]))
        for (kind, stage, place), of_action in zip(graph.actions, of_actions[:, 0], strict=True):
            if kind in ("B", "I"):
                result[stage, place] = of_action
    return result
