"""Filling micro-batches by least work, and dealing packs to data-parallel ranks.

`pack_by_work` is lines 18 to 35 of the paper's Algorithm 1; all else uses `Bins.place`, also for documents of
ranks. Both give a document to the micro-batch of least work, and differ in where it goes if there is no room
for it.

Heaps keep the micro-batches sorted by work and by length. Both only grow, so outdated entries are corrected
when they reach the top. Ties go to the lower index. n documents and N micro-batches take O(n log N).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.plan import imbalance_degree

REMAINS = -1
PORTIONS = 9  # ceilings that `Bins.portions` compares


def pack_by_work(lengths: Ints, works: Floats, micro_batches: int, max_length: int) -> Ints:
    """Assigns documents to micro-batches as Algorithm 1 does.

    Each document goes to the micro-batch of least work; if it does not fit there, to the shortest one; if it
    does not fit there either, it remains.

    >>> pack_by_work(np.array([6, 4, 3, 3]), np.array([6.0, 4, 3, 3]), 2, max_length=8).tolist()
    [0, 1, 1, -1]

    Args:
        lengths: int64 (n,), tokens in the order of packing, mostly longest first.
        works: float64 (n,), W_a + W_l of each document, positive.

    Returns:
        int64 (n,), micro-batch of each document, or REMAINS.
    """
    bins = Bins(micro_batches, max_length)  # line 21
    by_work = [(0.0, index) for index in range(micro_batches)]
    by_length = list(by_work)
    assigned = []
    for tokens, work in zip(lengths.tolist(), works.tolist(), strict=True):  # 22
        index = _least(by_work, bins.loads)  # 24
        if not bins.fits(index, tokens):  # 26
            index = _least(by_length, bins.lengths)  # 25
        if bins.fits(index, tokens):  # 26, 29
            bins.push(index, tokens, work)  # 27, 30
            assigned.append(index)
        else:
            assigned.append(REMAINS)  # 32
    return np.array(assigned, dtype=np.int64)


def _least(heap: list[tuple[float, int]], values: Sequence[float]) -> int:
    """Index of the least of values that only grow, by a heap of (value, index) with outdated values."""
    while heap[0][0] != values[heap[0][1]]:
        index = heap[0][1]
        heapq.heapreplace(heap, (values[index], index))
    return heap[0][1]


class Bins:
    """N micro-batches of at most `max_length` tokens."""

    def __init__(self, count: int, max_length: int, loads: Sequence[float] = ()) -> None:
        self.loads = list(loads) or [0.0] * count
        self.lengths = [0] * count
        self._max_length = max_length

    def fits(self, index: int, tokens: int) -> bool:
        return self.lengths[index] + tokens <= self._max_length

    def push(self, index: int, tokens: int, work: float) -> None:
        self.lengths[index] += tokens
        self.loads[index] += work

    def place(self, lengths: Ints, works: Floats) -> Ints:
        """Puts each document into the micro-batch of least work among those with room for it.

        Arguments and result as of `pack_by_work`. A bin without room for a document is put aside, into a heap
        by room, until one comes that fits. That is rare, as documents come mostly longest first.
        """
        by_load = [(load, index) for index, load in enumerate(self.loads)]
        heapq.heapify(by_load)
        aside: list[tuple[int, int]] = []  # (-room, bin)
        assigned = []
        for tokens, work in zip(lengths.tolist(), works.tolist(), strict=True):
            while aside and -aside[0][0] >= tokens:
                index = heapq.heappop(aside)[1]
                heapq.heappush(by_load, (self.loads[index], index))
            while by_load and not self.fits(by_load[0][1], tokens):
                index = heapq.heappop(by_load)[1]
                heapq.heappush(aside, (self.lengths[index] - self._max_length, index))
            if not by_load:
                assigned.append(REMAINS)
                continue
            index = by_load[0][1]
            self.push(index, tokens, work)
            heapq.heapreplace(by_load, (self.loads[index], index))
            assigned.append(index)
        return np.array(assigned, dtype=np.int64)

    def pour(self, lengths: Ints, works: Floats, ceiling: float = np.inf) -> Ints:
        """Puts in many short documents at once, like a liquid, one class of similar length after the other.

        A class fills the bins up to a common `level`: each bin below it gets a run of the documents. That
        misses the level by less than one document, and the next class, of half the length, evens it out.
        200,000 documents take some 20 ms.

        Lengths descend. Bins are filled up to `ceiling` of work; what lies above it or has no room REMAINS.
        """
        assigned = np.full(len(lengths), REMAINS, dtype=np.int64)
        octave = np.log2(np.maximum(lengths, 32)).astype(np.int64)
        stops = np.flatnonzero(np.diff(octave, append=-1)) + 1
        start = 0
        for stop in stops.tolist():
            assigned[start:stop] = self._pour_class(lengths[start:stop], works[start:stop], ceiling)
            start = stop
        return assigned

    def _pour_class(self, lengths: Ints, works: Floats, ceiling: float) -> Ints:
        loads, filled = np.array(self.loads), np.array(self.lengths)
        # A run may overshoot by one document, so room for one is set aside.
        least = float((works / lengths).min())  # work per token; the more tokens, the less
        room = np.maximum(self._max_length - filled - float(works.max()) / least, 0.0)
        capacities = np.maximum(np.minimum(loads + room * least, ceiling), loads)
        surface = level(loads, capacities, float(works.sum()))
        lacking = np.clip(surface, loads, capacities) - loads
        middles = np.cumsum(works) - works / 2
        assigned = np.searchsorted(np.cumsum(lacking), middles, side="right")
        count = len(loads)
        # What does not fit, or lies past the end by a rounding error, waits for the next step.
        fits = assigned < count
        self.loads = (loads + np.bincount(assigned[fits], works[fits], count)).tolist()
        grown = filled + np.bincount(assigned[fits], lengths[fits], count).astype(np.int64)
        self.lengths = grown.tolist()
        return np.where(fits, assigned, REMAINS)

    def portions(self, work: float, tokens: int) -> tuple[Floats, Floats, Floats]:
        """Compares pouring all of a liquid of this work and these tokens into the bins with pouring less.

        Bins that are full of tokens may lag behind in work. What is still poured then lifts only the others,
        and it may be better to leave some.

        Returns:
            float64 (n,) each, for n rising ceilings up to which bins are filled: the ceiling, the imbalance
            of the bins, and the tokens left. The last ceiling is infinite.
        """
        loads = np.array(self.loads)
        highest = loads.max()
        if not tokens:
            return np.array([np.inf]), np.array([imbalance_degree(loads)]), np.zeros(1)
        density = work / tokens
        capacities = loads + (self._max_length - np.array(self.lengths)) * density
        full = level(loads, capacities, min(work, float((capacities - loads).sum())))
        full = min(full, float(capacities.max()))
        ceilings = np.linspace(highest, full, PORTIONS) if full > highest else np.array([full])
        poured = np.clip(ceilings[:, None], loads, capacities).sum(axis=1) - loads.sum()
        total = np.maximum(loads.sum() + poured, np.finfo(np.float64).tiny)  # nothing is in balance
        imbalance = np.maximum(ceilings, highest) * len(loads) / total
        ceilings[-1] = np.inf
        return ceilings, imbalance, np.maximum(work - poured, 0.0) / density


def level(loads: Floats, capacities: Floats, work: float) -> float:
    """The level to which bins are filled if `work` is poured where the load is least.

    A bin below the level is filled up to it, or to its capacity. Exact: the work that fits below a level is
    piecewise linear, with corners at the loads and capacities.

    >>> [level(np.array([1.0, 4, 2]), np.array([9, 9, 2.5]), work) for work in (4.5, 100.0)]
    [4.5, inf]

    Loads and capacities are float64 (bins,), no capacity below its load. The level is infinite if the work
    does not fit.
    """
    corners = np.concatenate([loads, capacities])
    slopes = np.concatenate([np.ones(len(loads)), -np.ones(len(capacities))])
    order = np.argsort(corners, kind="stable")
    corners, filling = corners[order], np.cumsum(slopes[order])
    below = np.concatenate([[0.0], np.cumsum(np.diff(corners) * filling[:-1])])  # work that fits below
    segment = int(np.searchsorted(below, work, side="left")) - 1
    if segment < 0:
        return float(corners[0])
    if segment >= len(corners) - 1:
        return float("inf")
    return float(corners[segment] + (work - below[segment]) / filling[segment])


def split(rows: Ints, assigned: Ints, bins: int) -> list[Ints]:
    """The rows of each bin, in their order; `assigned` has the bin of each row."""
    order = np.argsort(assigned, kind="stable")
    ends = np.cumsum(np.bincount(assigned, minlength=bins))
    return np.split(rows[order], ends[:-1])


def in_order(packs: int, ranks: int) -> list[list[int]]:
    """Consecutive packs go to one rank, as in a plain data loader."""
    order: list[list[int]] = np.arange(packs).reshape(ranks, -1).tolist()
    return order


def balanced(workloads: Floats, ranks: int) -> list[list[int]]:
    """Equal counts and nearly equal sums: the heaviest pack left goes to the least loaded rank with room.

    Each rank runs its packs heaviest first. Under FSDP ranks meet in a collective at every layer of every
    micro-batch, so not only their sums but also their k-th packs should be alike. Equal packs keep their
    order, so all ranks find the same result.

    >>> balanced(np.array([5.0, 1, 4, 2]), 2)
    [[0, 1], [2, 3]]
    """
    order = np.argsort(-workloads, kind="stable")
    placed = Bins(ranks, len(workloads) // ranks).place(np.ones_like(order), workloads[order])
    return [packs.tolist() for packs in split(order, placed, ranks)]
