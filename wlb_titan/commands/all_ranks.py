"""All ranks of a job, of which those that do the same are run once: `wlb-titan dryrun --rank all`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wlb_titan.cost.degrees import Degrees
from wlb_titan.job import Job
from wlb_titan.plan import LENGTH, MicroBatch, Plan
from wlb_titan.simulator.calls import RankCalls

SHARED = ("tp", "dp_replicate", "dp_shard")
"""Axes along which ranks of the same step have the same calls, each within groups of its own."""


def alike(job: Job, plan: Plan) -> dict[int, int]:
    """For each global rank the first one that does the same in a step.

    Ranks differ in tensor parallelism only by the values that they have, and data-parallel ranks do so where
    their micro-batches have one length after the other in common, and all that context parallelism exchanges.
    """
    layout = job.degrees.layout
    first: dict[object, int] = {}
    found = {}
    for rank in range(job.degrees.ranks):
        place = _place(rank, layout)
        apart = tuple(number for axis, number in place.items() if axis not in SHARED)
        replica = _replica(job.degrees, place)
        packs = plan.of_rank(replica)
        flow = None if plan.flows is None else plan.flows[replica]
        merged = replica if any(pack.merged for pack in packs) else None
        steps = tuple(_shapes(job, pack, replica, place["cp"]) for pack in packs)
        found[rank] = first.setdefault((apart, steps, flow, merged), rank)
    return found


def calls_of_all(
    ran: Mapping[int, RankCalls], same: Mapping[int, int], degrees: Degrees
) -> dict[int, RankCalls]:
    """The calls of each rank, by those of the first that does the same.

    Args:
        ran: calls of the ranks that were run.
        same: as of `alike`.
    """
    return {rank: _moved(ran[first], first, rank, degrees.layout) for rank, first in same.items()}


def _replica(degrees: Degrees, place: Mapping[str, int]) -> int:
    """The data-parallel rank at a place."""
    number = 0
    for one in degrees.dimensions:
        if one.divides == "data":
            number = number * one.degree + place[one.axis]
    return number


def _shapes(job: Job, pack: MicroBatch, replica: int, context_rank: int) -> tuple[object, ...]:
    """What the sizes of a rank's calls for a micro-batch follow from."""
    strategy = job.merged[pack.sharers].strategy
    if strategy is None or pack.ranks is None:
        return (pack.length,)
    before = replica - pack.merged.start if pack.merged else 0
    rank = before * job.degrees.context + context_rank
    lengths = pack.documents[:, LENGTH]
    mask = strategy.mask(pack.ranks, lengths, pack.shared_length, rank, pack.elsewhere)
    return pack.length, *_sizes(mask.exchange)


def _sizes(exchange: tuple[Any, ...]) -> Iterator[int]:
    """The numbers in `ContextMask.exchange`, and the lengths of its arrays."""
    for part in exchange:
        if isinstance(part, tuple):
            yield from _sizes(part)
        else:
            yield len(part) if isinstance(part, np.ndarray) else int(part)


def _moved(calls: RankCalls, from_: int, to: int, layout: Mapping[str, int]) -> RankCalls:
    """The calls of a rank as another one makes them that does the same.

    A group keeps the places of its ranks on the axes along which they differ, and has those of the other rank
    on all others.
    """
    if from_ == to:
        return calls
    places = np.array(np.unravel_index([from_, to], tuple(layout.values())))

    def moved(ranks: Sequence[int]) -> tuple[int, ...]:
        along = np.array(np.unravel_index(ranks, tuple(layout.values())))
        same = (along == places[:, :1]).all(axis=1, keepdims=True)
        result = np.ravel_multi_index(tuple(np.where(same, places[:, 1:], along)), tuple(layout.values()))
        return tuple(result.tolist())

    peers = {call.peer: moved([from_, call.peer])[1] for call in calls.calls if call.peer >= 0}
    return replace(
        calls,
        groups=[moved(members) for members in calls.groups],
        calls=[call._replace(peer=peers.get(call.peer, -1)) for call in calls.calls],
    )


def _place(rank: int, layout: Mapping[str, int]) -> dict[str, int]:
    return dict(zip(layout, map(int, np.unravel_index(rank, tuple(layout.values()))), strict=True))
