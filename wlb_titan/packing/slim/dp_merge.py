"""Phase 1 of `slim`: which data-parallel rank gets which documents, and which documents ranks share.

Every data-parallel rank has the same capacity, C = total work / ranks. Documents go, heaviest first, to the
rank with the least work (SlimPack, section 4.1.1). A document of more work than C would make its rank the
slowest, whatever the others get. So (DP-Merge) 2, 4, ... consecutive ranks share its MicroPacks, as few as
bring each rank's share of it down to C: all their context-parallel ranks together divide these packs. A
rank's share of merged documents counts as its work when the others are dealt. Weights and optimizer states
stay where they are.

A group of n ranks starts at a multiple of n, so two groups are nested or have no rank in common. Packs of
merged documents come first on their ranks, the heaviest document's first, and heavier documents have larger
groups: so a merged pack has the same place on all of its ranks.

Example: documents of work 12, 3, 3, 3, 3 on 4 ranks: C = 6, the first goes over ranks 0 and 1, 6 on each, and
ranks 2 and 3 get two of the others each. Without merging the step would take 12.

Merging can also do harm, as the other documents may not fill the ranks evenly. So `best_merging` tries to
merge fewer documents, and also those of more than C / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.bins import Bins, split
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import Least

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


def group_sizes(ranks: int) -> tuple[int, ...]:
    """How many ranks may be merged: the powers of two from 2 to `ranks`."""
    return tuple(2**power for power in range(1, ranks.bit_length()))


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


def without_merging(works: Floats, lengths: Ints, ranks: int, least: int) -> Phase1:
    """Phase 1 without merging, in which every rank gets at least `least` tokens."""
    found = dealt(works, ranks)
    rows = np.concatenate(found.own)
    rank_of = np.repeat(np.arange(ranks), [len(own) for own in found.own])
    better = Least(ranks, least).topped_up(rank_of, lengths[rows])
    if better is rank_of:
        return found
    return replace(found, own=split(rows, better, ranks))


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
        own = np.array(merge.ranks)
        coming[own] -= 1
        upto = min(int((room - coming)[own].min()), pieces)
        wanted = round(float(works[merge.document]) / len(own) / target)
        last = own[alone[own] & (coming[own] == 0)]  # ranks with nothing else to fill their packs
        number = int(room[last].max()) if len(last) else max(min(wanted, upto), 1)
        if number > upto:
            raise PlanError("A rank's packs cannot be filled with its share of merged documents.")
        room[own] -= number
        numbers.append(number)
    if room[alone].any():
        raise PlanError("A data-parallel rank is left without documents.")
    return numbers
