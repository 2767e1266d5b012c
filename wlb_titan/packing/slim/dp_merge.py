"""Phase 1 of `slim`: which data-parallel rank gets which documents, and which documents ranks share.

Every data-parallel rank has the same capacity, C = total work / ranks. Documents go, heaviest first, to the
rank with the least work (SlimPack, section 4.1.1). A document of more work than C would make its rank the
slowest, whatever the others get. So (DP-Merge) 2, 4, ... consecutive ranks are merged for its MicroPacks, as
few as bring a rank's share of it down to C: all their context-parallel ranks together divide these packs.
What a rank has of merged documents counts where the others go. Weights and optimizer states stay where they
are.

A group of n ranks starts at a multiple of n, so that of two groups one lies in the other, or they have no
rank in common. Packs of merged documents come first on their ranks, the heaviest document's first, and
heavier documents have larger groups: so a merged pack stands at one and the same place on all of its ranks.

Example: documents of work 12, 3, 3, 3, 3 on 4 ranks: C = 6, the first goes over ranks 0 and 1, 6 on each, and
two of the others each to ranks 2 and 3. Without merging the step would take 12.

Merging can also do harm: what is left may not fill ranks evenly. `best_merging` therefore tries to merge only
some of the documents, and those of more than C / 2 besides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import Least

MOST_MERGED = 16
"""Documents of a step that are merged at the most."""

LIGHT = 1 / 8
"""Documents of less work than this share of C are ignored when choosing how many to merge: it keeps planning
fast."""


class Merge(NamedTuple):
    """A document that ranks share.

    Attributes:
        document: its row.
        ranks: consecutive data-parallel ranks.
    """

    document: int
    ranks: range


@dataclass(frozen=True, slots=True)
class Assignment:
    """Phase 1: who gets which documents.

    Attributes:
        own: rows of each data-parallel rank's own documents, int64 (n,).
        merges: documents that ranks share, heaviest first.
        loads: float64 (ranks,), work of each rank.
    """

    own: list[Ints]
    merges: tuple[Merge, ...]
    loads: Floats


def group_sizes(ranks: int) -> tuple[int, ...]:
    """How many ranks may be merged: the powers of two from 2 to `ranks`."""
    return tuple(2**power for power in range(1, ranks.bit_length()))


def assignment(works: Floats, ranks: int, merged: int = 0, capacity: float | None = None) -> Assignment:
    """Phase 1 with the heaviest documents merged.

    Args:
        works: float64 (n,).
        merged: how many of the heaviest documents are merged; at a degree of 1 none.
        capacity: C; None where these are all documents of the step.
    """
    order = np.argsort(-works, kind="stable").tolist()
    capacity = works.sum() / ranks if capacity is None else capacity
    loads = np.zeros(ranks)
    merges = []
    sizes = group_sizes(ranks)
    for document in order[:merged]:
        size = next((size for size in sizes if works[document] <= size * capacity), sizes[-1])
        first = min(range(0, ranks - size + 1, size), key=lambda rank: loads[rank : rank + size].max())
        loads[first : first + size] += works[document] / size
        merges.append(Merge(document, range(first, first + size)))
    own: list[list[int]] = [[] for _ in range(ranks)]
    least = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(least)
    for document in order[merged:]:
        load, rank = least[0]
        own[rank].append(document)
        heapq.heapreplace(least, (load + float(works[document]), rank))
    for load, rank in least:
        loads[rank] = load
    return Assignment([np.array(rows, dtype=np.int64) for rows in own], tuple(merges), loads)


def without_merging(works: Floats, lengths: Ints, ranks: int, least: int) -> Assignment:
    """Phase 1 without merging, in which every rank gets at least so many tokens.

    Args:
        lengths: int64 (n,), tokens of the documents; enough for all ranks (`Arrivals`).
    """
    found = assignment(works, ranks)
    rows = np.concatenate(found.own)
    rank_of = np.repeat(np.arange(ranks), [len(own) for own in found.own])
    better = Least(ranks, least).topped_up(rank_of, lengths[rows])
    if better is rank_of:
        return found
    return replace(found, own=[rows[better == rank] for rank in range(ranks)])


def best_merging(works: Floats, ranks: int) -> Assignment | None:
    """Phase 1 with as many documents merged as makes the busiest rank's work least.

    Returns:
        None where no document has more work than a rank's capacity.
    """
    capacity = float(works.sum()) / ranks
    if ranks == 1 or works.max() <= capacity:
        return None
    most = min(int((works > capacity / 2).sum()), MOST_MERGED)
    heavy = works[works > capacity * LIGHT]  # what is lighter fills ranks up, wherever there is room

    def busiest(merged: int) -> float:
        return max(float(assignment(heavy, ranks, merged, capacity).loads.max()), capacity)

    return assignment(works, ranks, min(range(1, most + 1), key=busiest))


def numbers_of_packs(works: Floats, most: Sequence[int], found: Assignment, count: int) -> list[int]:
    """How many packs each merged document is cut into: as many as give a rank packs of equal work.

    Args:
        works: float64 (n,), of all documents.
        most: slices that each merged document can be cut into.
        count: M, packs of a rank.
    """
    ranks = len(found.own)
    target = works.sum() / ranks / count  # of a rank's pack
    alone = np.array([len(rows) == 0 for rows in found.own])
    room = count - (~alone).astype(np.int64)  # a rank's own documents have a pack at least
    coming = np.zeros(ranks, dtype=np.int64)
    for merge in found.merges:
        coming[merge.ranks] += 1
    numbers = []
    for merge, pieces in zip(found.merges, most, strict=True):
        own = np.array(merge.ranks)
        coming[own] -= 1
        upto = min(int((room - coming)[own].min()), pieces)
        wanted = round(float(works[merge.document]) / len(own) / target)
        last = own[alone[own] & (coming[own] == 0)]  # ranks that have nothing else to fill their packs
        number = int(room[last].max()) if len(last) else max(min(wanted, upto), 1)
        if number > upto:
            raise PlanError("A rank's packs cannot be filled with its share of merged documents.")
        room[own] -= number
        numbers.append(number)
    if room[alone].any():
        raise PlanError("A data-parallel rank is left without documents.")
    return numbers
