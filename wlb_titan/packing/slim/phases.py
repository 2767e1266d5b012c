"""Phases 1 and 2 of `slim`: a global batch becomes M MicroPacks of every data-parallel rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.workload import workload
from wlb_titan.errors import PlanError
from wlb_titan.packing.policy import Pack, Packing
from wlb_titan.packing.slim.asymmetric import Line, asymmetric
from wlb_titan.packing.slim.dp_merge import Merge, Shares, best_shares, numbers_of_packs, whole_shares
from wlb_titan.packing.slim.flow import PREDICTED_IN_STEP, Flows
from wlb_titan.packing.slim.micropacks import Placing, micropacks, place_greedily
from wlb_titan.packing.slim.slices import MicroPack, PrefixWork, Slice
from wlb_titan.plan import LENGTH, START

if TYPE_CHECKING:
    from wlb_titan.job import Job


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
        packs: list[tuple[Pack, Ints]] = []
        assigned: list[list[int]] = [[] for _ in found.own]

        def add(documents: Pack, pack: MicroPack, ranks: Sequence[int]) -> None:
            for rank in ranks:
                assigned[rank].append(len(packs))
            packs.append(_rows(documents, pack))

        for merge, pack in self._merged(batch, works, found, count):
            add(batch, pack, merge.ranks)
        for rank, own in enumerate(found.own):
            documents, room = batch[own], count - len(assigned[rank])
            if room:
                for pack in micropacks(documents[:, LENGTH], works[own], self._prefix_work[1], room, place):
                    add(documents, pack, [rank])
        return _packing(packs, assigned)

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
        passes: list[list[tuple[Pack, Ints]]] = [[], []]
        found = whole_shares(works, batch[:, LENGTH], self._job.replicas, self._job.degrees.context)
        for own in found.own:
            documents = batch[own]
            cut = asymmetric(documents[:, LENGTH], works[own], self._lines, count)
            for all_, packs in zip(passes, cut, strict=True):
                all_.extend(_rows(documents, pack) for pack in packs)
        numbers = np.arange(len(passes[0])).reshape(self._job.replicas, count).tolist()
        forward, backward = (replace(_packing(all_, numbers), one_pass=True) for all_ in passes)
        return replace(forward, regrouped=backward)


def _packing(packs: Sequence[tuple[Pack, Ints]], assigned: list[list[int]]) -> Packing:
    rows, slices = zip(*packs, strict=True)
    return Packing(list(rows), slices=list(slices), assigned=assigned)


def _rows(documents: Pack, pack: MicroPack) -> tuple[Pack, Ints]:
    """A pack's rows of documents and slices."""
    which, starts, stops = np.array(pack, dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    return rows, slices
