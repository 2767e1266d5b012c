"""Packs a global batch for each data-parallel rank: phase 1 of `slim`, then phase 2 (`micropacks.py`).

docs/slimpack.md ("DP-Merge") has the rules. A group of n ranks starts at a multiple of n, so two groups are
nested or have no rank in common. The heaviest documents come first, and have the largest groups: so a merged
pack has the same place on all of its ranks. Its work counts when the other documents are dealt.

Example: ranks have a capacity of C = 6. Ranks 0 and 1 share the first document, ranks 2 and 3 get two of the
others each. Without merging the step would take 12.

    >>> found = best_merging(np.array([12.0, 3, 3, 3, 3]), 4)
    >>> found.merges, [rows.tolist() for rows in found.own], found.loads.tolist()
    ((Merge(document=0, ranks=range(0, 2)),), [[], [], [1, 3], [2, 4]], [6.0, 6.0, 6.0, 6.0])

Merging can also do harm, as the other documents may not fill the ranks evenly. So `best_merging` tries to
merge fewer documents, and also those of more than C / 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.bins import Bins, split
from wlb_titan.cost.workload import workload
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import Least
from wlb_titan.packing.policy import Ask, Pack, Packing, group_sizes
from wlb_titan.packing.slices import MicroPack, PrefixWork, Slice
from wlb_titan.packing.slim.flow import PREDICTED_IN_STEP, Flows
from wlb_titan.packing.slim.micropacks import Placing, micropacks, place_greedily
from wlb_titan.plan import LENGTH, START, MicroBatch

MOST_MERGED = 16  # documents of a step
LIGHT = 1 / 8  # of C; to plan fast, lighter documents are ignored when choosing how many to merge


class Merge(NamedTuple):
    """A document that data-parallel ranks share."""

    document: int  # its row
    ranks: range


@dataclass(frozen=True, slots=True)
class Phase1:
    """Which data-parallel ranks get which documents."""

    own: list[Ints]  # rows of each rank's own documents
    merges: tuple[Merge, ...]  # heaviest first
    loads: Floats  # float64 (ranks,), work of each rank


def dealt(works: Floats, ranks: int, merged: int = 0, capacity: float | None = None) -> Phase1:
    """Phase 1 with the `merged` heaviest documents merged; `capacity` is C if these are not all documents."""
    order = np.argsort(-works, kind="stable")
    capacity = works.sum() / ranks if capacity is None else capacity
    loads = np.zeros(ranks)
    merges = []
    sizes = group_sizes(ranks)
    for document in order[:merged].tolist():
        size = next((size for size in sizes if works[document] <= size * capacity), sizes[-1])
        first = min(range(0, ranks - size + 1, size), key=lambda rank: loads[rank : rank + size].max())
        loads[first : first + size] += works[document] / size
        merges.append(Merge(document, range(first, first + size)))
    rest = order[merged:]
    bins = Bins(ranks, len(rest), loads.tolist())
    placed = bins.place(np.ones_like(rest), works[rest])
    return Phase1(split(rest, placed, ranks), tuple(merges), np.array(bins.loads))


def best_merging(works: Floats, ranks: int) -> Phase1 | None:
    """Phase 1 with the number of merged documents for which the busiest rank has least work; None if no
    document exceeds a rank's capacity."""
    capacity = float(works.sum()) / ranks
    if ranks == 1 or works.max() <= capacity:
        return None
    most = min(int((works > capacity / 2).sum()), MOST_MERGED)
    heavy = works[works > capacity * LIGHT]

    def busiest(merged: int) -> float:
        return max(float(dealt(heavy, ranks, merged, capacity).loads.max()), capacity)

    return dealt(works, ranks, min(range(1, most + 1), key=busiest))


def numbers_of_packs(works: Floats, most: Sequence[int], phase_1: Phase1, count: int) -> list[int]:
    """How many packs each merged document is cut into, so that a rank's packs have equal work.

    Args:
        works: float64 (n,), of all documents.
        most: slices that each merged document can be cut into.
        count: M, packs of a rank.
    """
    ranks = len(phase_1.own)
    target = works.sum() / ranks / count  # a rank's share of a pack
    alone = np.array([len(rows) == 0 for rows in phase_1.own])
    room = count - (~alone).astype(np.int64)  # a rank's own documents need a pack
    coming = np.zeros(ranks, dtype=np.int64)
    for merge in phase_1.merges:
        coming[merge.ranks] += 1
    numbers = []
    for merge, pieces in zip(phase_1.merges, most, strict=True):
        sharers = np.array(merge.ranks)
        coming[sharers] -= 1
        upto = min(int((room - coming)[sharers].min()), pieces)
        wanted = round(float(works[merge.document]) / len(sharers) / target)
        last = sharers[alone[sharers] & (coming[sharers] == 0)]  # ranks with nothing else to fill their packs
        number = int(room[last].max()) if len(last) else max(min(wanted, upto), 1)
        if number > upto:
            raise PlanError("A rank's packs cannot be filled with its share of merged documents.")
        room[sharers] -= number
        numbers.append(number)
    if room[alone].any():
        raise PlanError("A data-parallel rank is left without documents.")
    return numbers


class Packer:
    """Packs batches of documents of at most `window` tokens; `place` puts short ones beside slices."""

    def __init__(self, ask: Ask, window: int, flows: Flows, *, always_merges: bool = False) -> None:
        self.place: Placing = place_greedily
        self._ask, self._flows, self._always_merges = ask, flows, always_merges
        self._workload = partial(workload, ask.cost_model)
        # Lengths are rounded to a multiple that depends on how many data-parallel ranks share a pack.
        self._tables = {
            ranks: PrefixWork(self._workload, window, shared.divisor, shared.degrees.context)
            for ranks, shared in flows.by_sharers.items()
        }

    def at_most(self, batch: Pack, count: int) -> Packing:
        """`packed` with at most `count` packs, halved while the documents have too few tokens."""
        while True:
            try:
                return self.packed(batch, count)
            except PlanError:
                if count == 1:
                    raise
                count //= 2

    def packed(self, batch: Pack, count: int) -> Packing:
        """`count` packs for each data-parallel rank."""
        works, whole = self._phase_1(batch)
        merged = best_merging(works, self._ask.replicas) if len(self._tables) > 1 else None
        if merged is None:
            return self._phase_2(batch, works, whole, count, self.place)
        chosen, packing = self._better(batch, works, merged, whole, count)
        if self.place is place_greedily:
            return packing
        return self._phase_2(batch, works, chosen, count, self.place)

    def _phase_1(self, batch: Pack) -> tuple[Floats, Phase1]:
        """Work of the documents, and phase 1 without merging, in which every rank gets enough tokens."""
        works, ranks = self._workload(batch[:, LENGTH]), self._ask.replicas
        phase_1 = dealt(works, ranks)
        rows = np.concatenate(phase_1.own)
        rank_of = np.repeat(np.arange(ranks), [len(part) for part in phase_1.own])
        better = Least(ranks, self._ask.context).topped_up(rank_of, batch[rows, LENGTH])
        return works, phase_1 if better is rank_of else replace(phase_1, own=split(rows, better, ranks))

    def _better(
        self, batch: Pack, works: Floats, merged: Phase1, whole: Phase1, count: int
    ) -> tuple[Phase1, Packing]:
        """`merged`, if it can be packed and, unless merging is always wanted, is predicted to take less time;
        else `whole`. And its packs, placed greedily."""
        try:
            sharing = self._phase_2(batch, works, merged, count, place_greedily)
        except PlanError:
            return whole, self._phase_2(batch, works, whole, count, place_greedily)
        if self._always_merges:
            return merged, sharing
        alone = self._phase_2(batch, works, whole, count, place_greedily)
        merging, not_merging = (
            self._flows.seconds([self._flows.timed(way, PREDICTED_IN_STEP)], 0) for way in (sharing, alone)
        )
        return (merged, sharing) if merging < not_merging else (whole, alone)

    def _phase_2(self, batch: Pack, works: Floats, phase_1: Phase1, count: int, place: Placing) -> Packing:
        """Packs of merged documents, then those of each rank's own."""
        packs: list[MicroBatch] = []
        assigned: list[list[int]] = [[] for _ in phase_1.own]
        for merge, pack in self._merged(batch, works, phase_1, count):
            for rank in merge.ranks:
                assigned[rank].append(len(packs))
            packs += drafts_of(batch, [pack], merged=merge.ranks)
        for rows, numbers in zip(phase_1.own, assigned, strict=True):
            documents, room = batch[rows], count - len(numbers)
            if room:
                made = micropacks(documents[:, LENGTH], works[rows], self._tables[1], room, place)
                numbers.extend(range(len(packs), len(packs) + room))
                packs += drafts_of(documents, made)
        return Packing(packs, assigned=assigned)

    def _merged(
        self, batch: Pack, works: Floats, phase_1: Phase1, count: int
    ) -> Iterator[tuple[Merge, MicroPack]]:
        """The packs of merged documents, in slices of equal work."""
        tables = [self._tables[len(merge.ranks)] for merge in phase_1.merges]
        lengths = [int(batch[merge.document, LENGTH]) for merge in phase_1.merges]
        if any(length < table.least for length, table in zip(lengths, tables, strict=True)):
            raise PlanError("A document has fewer tokens than there are ranks to share it.")
        # The last slice is about half as long as the mean one, and each rank must get some of it.
        most = [max(length // (2 * table.grain), 1) for length, table in zip(lengths, tables, strict=True)]
        numbers = numbers_of_packs(works, most, phase_1, count)
        for merge, length, table, number in zip(phase_1.merges, lengths, tables, numbers, strict=True):
            work = works[merge.document]
            cuts = table.cuts(length, work, np.full(number, work / number))
            for start, stop in itertools.pairwise(cuts):
                yield merge, [Slice(merge.document, start, stop)]


def drafts_of(documents: Pack, packs: Sequence[MicroPack], **others: Any) -> list[MicroBatch]:
    """Packs of these documents as drafts; `others` are fields of `MicroBatch`."""
    which, starts, stops = np.array([each for pack in packs for each in pack], dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    ends = np.cumsum([len(pack) for pack in packs])[:-1]
    pairs = zip(np.split(rows, ends), np.split(slices, ends), strict=True)
    return [MicroBatch(own, cut, **others) for own, cut in pairs]
