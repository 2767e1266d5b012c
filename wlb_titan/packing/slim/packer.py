"""Packs a global batch for each data-parallel rank: phase 1 (`dp_merge`), then phase 2 (`micropacks`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.workload import workload
from wlb_titan.errors import PlanError
from wlb_titan.packing.policy import Pack, Packing
from wlb_titan.packing.slim.dp_merge import Merge, Phase1, best_merging, numbers_of_packs, without_merging
from wlb_titan.packing.slim.flow import PREDICTED_IN_STEP, Flows
from wlb_titan.packing.slim.micropacks import Placing, micropacks, place_greedily
from wlb_titan.packing.slim.slices import MicroPack, PrefixWork, Slice
from wlb_titan.plan import LENGTH, START, MicroBatch

if TYPE_CHECKING:
    from wlb_titan.job import Job


class Packer:
    """Packs batches of documents of at most `window` tokens; `place` puts short ones beside slices."""

    def __init__(self, job: Job, window: int, flows: Flows) -> None:
        self.place: Placing = place_greedily
        self._job, self._flows = job, flows
        self._workload = partial(workload, job.cost_model)
        # Lengths are rounded to a multiple that depends on how many data-parallel ranks share a pack.
        self._tables = {
            ranks: PrefixWork(self._workload, window, shared.divisor, shared.degrees.context)
            for ranks, shared in job.by_sharers.items()
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
        merged = best_merging(works, self._job.replicas) if len(self._job.by_sharers) > 1 else None
        if merged is None:
            return self._phase_2(batch, works, whole, count, self.place)
        chosen, packing = self._better(batch, works, merged, whole, count)
        if self.place is place_greedily:
            return packing
        return self._phase_2(batch, works, chosen, count, self.place)

    def _phase_1(self, batch: Pack) -> tuple[Floats, Phase1]:
        """Work of the documents, and phase 1 without merging."""
        works = self._workload(batch[:, LENGTH])
        ranks, least = self._job.replicas, self._job.degrees.context
        return works, without_merging(works, batch[:, LENGTH], ranks, least)

    def _better(
        self, batch: Pack, works: Floats, merged: Phase1, whole: Phase1, count: int
    ) -> tuple[Phase1, Packing]:
        """`merged`, if it can be packed and, unless merging is always wanted, is predicted to take less time;
        else `whole`. And its packs, placed greedily."""
        try:
            sharing = self._phase_2(batch, works, merged, count, place_greedily)
        except PlanError:
            return whole, self._phase_2(batch, works, whole, count, place_greedily)
        if self._job.packing.merges is True:
            return merged, sharing
        alone = self._phase_2(batch, works, whole, count, place_greedily)
        merging, not_merging = (
            self._flows.seconds([self._flows.timed(one, PREDICTED_IN_STEP)], 0) for one in (sharing, alone)
        )
        return (merged, sharing) if merging < not_merging else (whole, alone)

    def _phase_2(self, batch: Pack, works: Floats, phase_1: Phase1, count: int, place: Placing) -> Packing:
        """Packs of merged documents, then those of each rank's own."""
        packs: list[MicroBatch] = []
        assigned: list[list[int]] = [[] for _ in phase_1.own]
        for merge, pack in self._merged(batch, works, phase_1, count):
            for rank in merge.ranks:
                assigned[rank].append(len(packs))
            packs.append(draft(batch, pack, merged=merge.ranks))
        for own, numbers in zip(phase_1.own, assigned, strict=True):
            documents, room = batch[own], count - len(numbers)
            if room:
                made = micropacks(documents[:, LENGTH], works[own], self._tables[1], room, place)
                numbers.extend(range(len(packs), len(packs) + room))
                packs.extend(draft(documents, pack) for pack in made)
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
            cuts = table.cuts(length, np.full(number, works[merge.document] / number))
            for start, stop in itertools.pairwise(cuts):
                yield merge, [Slice(merge.document, start, stop)]


def draft(documents: Pack, pack: MicroPack, **others: Any) -> MicroBatch:
    """A pack of these documents as a draft; `others` are fields of `MicroBatch`."""
    which, starts, stops = np.array(pack, dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    return MicroBatch(rows, slices, **others)
