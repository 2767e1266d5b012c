"""Phases 1 and 2 of `slim`: a global batch becomes M MicroPacks of every data-parallel rank.

Phase 1 gives every data-parallel rank the same capacity, C = total work / ranks. A document of more work
than that would make its rank the slowest, whatever the others get. So (DP-Merge) 2, 4, ... consecutive ranks
are merged for its MicroPacks, as few as bring a rank's share of it down to C: all their context-parallel
ranks together divide these packs. The other documents go, heaviest first, to the rank with the least work,
counting what it has of merged ones. Weights and optimizer states stay where they are.

A group of n ranks begins at a multiple of n, so that of two groups one lies in the other, or they have no
rank in common. Packs of merged documents come first on their ranks, the heaviest document's first, and
heavier documents have larger groups: so a merged pack stands at one and the same place on all of its ranks.

Example: documents of work 12, 3, 3, 3, 3 on 4 ranks: C = 6, the first goes over ranks 0 and 1, 6 on each, and
two of the others each to ranks 2 and 3. Without merging the step would take 12.

Merging can also do harm: what is left may not fill ranks evenly. `best_shares` therefore tries to merge only
some of the documents, and those of more than C / 2 besides.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context import ContextStrategy
from wlb_titan.cost.workload import workload
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import topped_up
from wlb_titan.packing.policy import Pack, Packing
from wlb_titan.packing.slim.asymmetric import Line, asymmetric
from wlb_titan.packing.slim.flow import PREDICTED_IN_STEP, Flows
from wlb_titan.packing.slim.micropacks import Placing, micropacks, place_greedily
from wlb_titan.packing.slim.slices import MicroPack, PrefixWork, Slice
from wlb_titan.plan import LENGTH, START, MicroBatch

if TYPE_CHECKING:
    from wlb_titan.job import Job


MOST_MERGED = 16
"""Documents of a step that are merged at the most."""

LIGHT = 1 / 8
"""Of C: documents of less work do not decide on how many are merged, which steps of very many documents are
planned quickly by."""


@dataclass(frozen=True, slots=True)
class Merging:
    """What it means that so many data-parallel ranks share a pack.

    Attributes:
        strategy: divides the pack over the context-parallel ranks of all of them.
        divisor: packs are padded up to a multiple of it.
        held: what a token of the pack holds in memory on each of these ranks, relative to one of a rank's
            own pack: a share of the activations, and all of the document's keys and values.
    """

    strategy: ContextStrategy
    divisor: int
    held: float


class Merge(NamedTuple):
    """A document that ranks share.

    Attributes:
        document: its row.
        ranks: consecutive data-parallel ranks.
    """

    document: int
    ranks: range


@dataclass(frozen=True, slots=True)
class Shares:
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


def shares(works: Floats, ranks: int, merged: int = 0, capacity: float | None = None) -> Shares:
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
    return Shares([np.array(rows, dtype=np.int64) for rows in own], tuple(merges), loads)


def whole_shares(works: Floats, lengths: Ints, ranks: int, least: int) -> Shares:
    """Phase 1 without merging, in which every rank gets at least so many tokens.

    Args:
        lengths: int64 (n,), tokens of the documents; enough for all ranks (`least.fills`).
    """
    found = shares(works, ranks)
    assigned = np.repeat(np.arange(ranks), [len(rows) for rows in found.own])
    rows = np.concatenate(found.own)
    better = topped_up(assigned, lengths[rows], ranks, least)
    return (
        found if better is assigned else replace(found, own=[rows[better == rank] for rank in range(ranks)])
    )


def best_shares(works: Floats, ranks: int) -> Shares | None:
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
        return max(float(shares(heavy, ranks, merged, capacity).loads.max()), capacity)

    return shares(works, ranks, min(range(1, most + 1), key=busiest))


def numbers_of_packs(works: Floats, most: Sequence[int], found: Shares, count: int) -> list[int]:
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


class Packer(Protocol):
    """Packs a batch into so many packs for each data-parallel rank."""

    def __call__(self, batch: Pack, count: int, place: Placing = place_greedily) -> Packing: ...


def at_most(packer: Packer, batch: Pack, count: int, place: Placing = place_greedily) -> Packing:
    """The packs of a batch, half as many on all ranks, and half of these, while it has too few tokens."""
    while True:
        try:
            return packer(batch, count, place)
        except PlanError:
            if count == 1:
                raise
            count //= 2


class SymmetricPacker:
    """Packs of which both passes run, those of documents that ranks share (`dp_merge.py`) among them.

    Args:
        window: tokens of the longest document.
        merges: whether ranks share documents: where they can, or where steps get shorter.
        flows: predicts steps.
    """

    def __init__(self, job: Job, window: int, merges: bool | Literal["auto"], flows: Flows) -> None:
        self._job, self._merges, self._flows = job, merges, flows
        # By how many data-parallel ranks share a pack, as that decides on what lengths are rounded to.
        self._prefix_work = {1: PrefixWork(job.cost_model, window, job.divisor, job.degrees.context)} | {
            size: PrefixWork(job.cost_model, window, merging.divisor, merging.strategy.ranks)
            for size, merging in job.merging.items()
        }

    def __call__(self, batch: Pack, count: int, place: Placing = place_greedily) -> Packing:
        works = workload(self._job.cost_model, batch[:, LENGTH])
        found = whole_shares(works, batch[:, LENGTH], self._job.replicas, self._job.degrees.context)
        merged = best_shares(works, self._job.replicas) if self._job.merging else None
        if merged is not None:
            found, packing = self._better(batch, works, merged, found, count)
            if place is place_greedily:
                return packing
        return self._packed(batch, works, found, count, place)

    def _better(
        self, batch: Pack, works: Floats, merged: Shares, whole: Shares, count: int
    ) -> tuple[Shares, Packing]:
        """Merged documents where ranks can share them, and are predicted to take less time so where that is
        asked; and their packs, placed greedily."""
        try:
            sharing = self._packed(batch, works, merged, count, place_greedily)
        except PlanError:
            return whole, self._packed(batch, works, whole, count, place_greedily)
        if self._merges is True:
            return merged, sharing
        alone = self._packed(batch, works, whole, count, place_greedily)
        merging, not_merging = (
            self._flows.seconds([self._flows.timed(one, PREDICTED_IN_STEP)], 0) for one in (sharing, alone)
        )
        return (merged, sharing) if merging < not_merging else (whole, alone)

    def _packed(self, batch: Pack, works: Floats, found: Shares, count: int, place: Placing) -> Packing:
        """Phase 2: packs of merged documents, and behind them those of each rank's own."""
        packs: list[MicroBatch] = []
        assigned: list[list[int]] = [[] for _ in found.own]

        def add(pack: MicroBatch, ranks: Sequence[int]) -> None:
            for rank in ranks:
                assigned[rank].append(len(packs))
            packs.append(pack)

        for merge, pack in self._merged(batch, works, found, count):
            add(_draft(batch, pack, merged=merge.ranks), merge.ranks)
        for rank, own in enumerate(found.own):
            documents, room = batch[own], count - len(assigned[rank])
            if room:
                for pack in micropacks(documents[:, LENGTH], works[own], self._prefix_work[1], room, place):
                    add(_draft(documents, pack), [rank])
        return Packing(packs, assigned=assigned)

    def _merged(
        self, batch: Pack, works: Floats, found: Shares, count: int
    ) -> Iterator[tuple[Merge, MicroPack]]:
        """The packs of merged documents, each a slice of equal work."""
        tables = [self._prefix_work[len(merge.ranks)] for merge in found.merges]
        lengths = [int(batch[merge.document, LENGTH]) for merge in found.merges]
        if any(length < table.least for length, table in zip(lengths, tables, strict=True)):
            raise PlanError("A document has fewer tokens than there are ranks to share it.")
        # The last slice is about half as long as the mean one, and each rank must get something of it.
        most = [max(length // (2 * table.grain), 1) for length, table in zip(lengths, tables, strict=True)]
        numbers = numbers_of_packs(works, most, found, count)
        for merge, length, table, number in zip(found.merges, lengths, tables, numbers, strict=True):
            cuts = table.cuts(length, np.full(number, works[merge.document] / number))
            for start, stop in itertools.pairwise(cuts):
                yield merge, [Slice(merge.document, start, stop)]


class AsymmetricPacker:
    """Packs of forward and packs of backward passes (`asymmetric.py`). There is nothing to place."""

    def __init__(self, job: Job, window: int) -> None:
        self._job = job
        model, divisor = job.cost_model, job.divisor
        self._lines = (
            Line(model.forward, window, divisor, job.degrees.context),
            Line(model.recomputed, window, divisor, job.degrees.context),
        )

    def __call__(self, batch: Pack, count: int, place: Placing = place_greedily) -> Packing:
        works = workload(self._job.cost_model, batch[:, LENGTH])
        packs: list[MicroBatch] = []
        found = whole_shares(works, batch[:, LENGTH], self._job.replicas, self._job.degrees.context)
        for own in found.own:
            documents = batch[own]
            forward, backward = asymmetric(documents[:, LENGTH], works[own], self._lines, count)
            packs += [_draft(documents, pack, passes="F") for pack in forward]
            packs += [_draft(documents, pack, passes="B") for pack in backward]
        return Packing(packs, assigned=np.arange(len(packs)).reshape(self._job.replicas, -1).tolist())


def _draft(documents: Pack, pack: MicroPack, **others: Any) -> MicroBatch:
    """A draft of a pack of these documents."""
    which, starts, stops = np.array(pack, dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    return MicroBatch(rows, slices, **others)
