"""From the documents of one data-parallel rank to M MicroPacks of equal work (SlimPack, 4.1.1, phase 2).

docs/slimpack.md ("How a step is planned") has the method. A document that is cut into k slices, each of
which leads a pack of its own, is a slot of size k, a pack without one a slot of size 1. Short documents go
where the level comes out lowest:

    level of a slot = work in it / size

No pack has slices of two documents: that would chain their backward passes, and keep both in memory.

Example: M = 4, packs of 3.5 each would be equal. The first document is cut in 3, the others fill one pack and
the mix: levels (9 + 2) / 3 and 3 / 1, packs of 3.67, 3.67, 1.67 + 2 and 2 + 1.

    >>> lengths, line = np.array([45, 10, 10, 5]), PrefixWork(lambda lengths: lengths / 5, 45, grain=1)
    >>> [[tuple(part) for part in pack] for pack in micropacks(lengths, lengths / 5, line, 4)]
    [[(0, 0, 18)], [(0, 18, 37)], [(0, 37, 45), (2, 0, 10)], [(1, 0, 10), (3, 0, 5)]]
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError
from wlb_titan.packing.fixed import Milp
from wlb_titan.packing.policy import AskRank0, ask_locally
from wlb_titan.packing.slices import MicroPack, PrefixWork, Slice

WIDER = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)
"""Targets relative to total / M: with a wider one documents are cut into fewer slices."""

TRIED = 3  # how many of the targets that lead to M packs are tried
MOST_TRIED = TRIED + 1  # with the target that cuts the fewest documents
LEVEL = 1.005  # largest over mean level that is good enough


@dataclass(frozen=True, slots=True)
class Slots:
    """Where short documents can go."""

    work: Floats  # float64 (slots,), of the cut document in each, 0 where there is none
    size: Ints  # int64 (slots,), packs


Placing = Callable[[Slots, Floats], Ints | None]
"""(slots, work of short documents, falling) -> int64 (n,), the slot of each document; None where they do not
fit beside last slices."""


def place_greedily(slots: Slots, works: Floats) -> Ints | None:
    """Longest processing time first: each document where the level comes out lowest."""
    placed = np.empty(len(works), dtype=np.int64)
    load, beside = slots.work.copy(), np.zeros(len(slots.size))
    shared = slots.size > 1
    for number, work in enumerate(works.tolist()):
        levels = (load + work) / slots.size
        # Some of the cut document must be left for its last slice.
        levels[shared & (beside + work >= levels)] = np.inf
        slot = int(levels.argmin())
        if levels[slot] == np.inf:
            return None
        placed[number] = slot
        load[slot] += work
        beside[slot] += work
    return placed


def micropacks(
    lengths: Ints, works: Floats, prefix_work: PrefixWork, count: int, place: Placing = place_greedily
) -> list[MicroPack]:
    """The M = `count` MicroPacks of one rank's documents, heaviest document first: the order of their forward
    passes. Each holds at least `prefix_work.least` tokens."""
    prefix_work.check(lengths, count)
    most = prefix_work.most_slices(lengths)
    order = np.lexsort((-works, most == 0))
    most = most[order]
    sorted_works = works[order]
    best: list[MicroPack] = []
    lowest = np.inf
    for parts in _numbers_of_slices(sorted_works, most, count):
        whole = parts <= 1
        slots = Slots(
            np.append(sorted_works[~whole], np.zeros(count - int(parts[~whole].sum()))),
            np.append(parts[~whole], np.ones(count - int(parts[~whole].sum()), dtype=np.int64)),
        )
        placed = _placed(slots, sorted_works[whole], lengths[order][whole], prefix_work.least, place)
        if placed is None:
            continue
        levels = (slots.work + np.bincount(placed, sorted_works[whole], len(slots.size))) / slots.size
        if levels.max() < lowest:
            lowest = levels.max()
            best = _packs(order, lengths, works, parts, slots, placed, prefix_work)
        if lowest <= LEVEL * works.sum() / count:
            break
    if not best:
        raise PlanError(
            f"Documents too short for a MicroPack find no place beside others in {count} of them."
        )
    return best


def _numbers_of_slices(works: Floats, most: Ints, count: int) -> Iterator[Ints]:
    """Ways to cut documents, the last one with the fewest cuts: int64 (n,), slices of every document.

    Cut documents take at most `count` packs, and whole documents that can have a pack to themselves (`most`
    is not 0) are enough for the other packs.
    """
    ways = 0
    for wider in (*WIDER, np.inf):
        target = wider * works.sum() / count
        parts = np.minimum(np.maximum(np.ceil(works / target * (1 - 1e-9)).astype(np.int64), 1), most)
        if int(parts[parts > 1].sum()) > count:
            continue
        heaviest = [(-works[one] / parts[one], one) for one in np.flatnonzero(parts < most).tolist()]
        heapq.heapify(heaviest)
        for _ in range(min(count, int(most.sum())) - int(parts.sum())):
            _, one = heapq.heappop(heaviest)
            parts[one] += 1
            if parts[one] < most[one]:
                heapq.heappush(heaviest, (-works[one] / parts[one], one))
        ways += 1
        if ways <= TRIED or wider == np.inf:
            yield parts


def _placed(slots: Slots, works: Floats, lengths: Ints, least: int, place: Placing) -> Ints | None:
    """`place`, but None also where a pack would have too few tokens."""
    alone = np.flatnonzero(slots.size == 1)
    leading = int((lengths >= least).sum())  # these come first
    if leading == len(alone):
        taken = slots.work.copy()
        taken[alone] = works[:leading]
        rest = works[leading:]
        behind = place(Slots(taken, slots.size), rest) if len(rest) else alone[:0]
        return None if behind is None else np.concatenate([alone, behind])
    if (placed := place(slots, works)) is None:
        return None
    filled = np.bincount(placed, lengths, len(slots.size))
    return placed if (filled[alone] >= least).all() else None


def _packs(
    order: Ints,
    lengths: Ints,
    works: Floats,
    parts: Ints,
    slots: Slots,
    placed: Ints,
    prefix_work: PrefixWork,
) -> list[MicroPack]:
    """The packs of cut documents, heaviest first, then those of whole ones."""
    riders: list[list[int]] = [[] for _ in slots.size]
    for document, slot in zip(order[parts <= 1].tolist(), placed.tolist(), strict=True):
        riders[slot].append(document)
    beside = [float(works[documents].sum()) for documents in riders]
    packs: list[MicroPack] = []
    for number, document in enumerate(order[parts > 1].tolist()):
        size = int(slots.size[number])
        level = (float(works[document]) + beside[number]) / size
        shares = np.full(size, level)  # the last slice gets the rest
        cuts = prefix_work.cuts(int(lengths[document]), float(works[document]), shares)
        packs.extend([Slice(document, start, stop)] for start, stop in itertools.pairwise(cuts))
        packs[-1].extend(Slice(other, 0, int(lengths[other])) for other in riders[number])
    cut = int((parts > 1).sum())
    rest = sorted(range(cut, len(riders)), key=lambda slot: -beside[slot])
    packs.extend([Slice(other, 0, int(lengths[other])) for other in riders[slot]] for slot in rest)
    return packs


SLIVER = 1e-5  # of the mean level, the least that is left for a last slice


class SolvedPlacing:
    """Puts short documents into slots with a solver; if it finds nothing in time, greedily.

    Args:
        time_limit: seconds for all placings of a step.
        gap: relative distance between solution and bound at which to stop.
        placings: how many share the time. A step may have more, while there is time.
        on_one_rank: runs the solver on one rank for all, as it stops at a time.
    """

    def __init__(
        self, time_limit: float, gap: float, placings: int = 1, on_one_rank: AskRank0 = ask_locally
    ) -> None:
        self._milp = Milp(time_limit / placings, gap, user="The solver of slim", setting="packing.solver")
        self._time_limit, self._end = time_limit, np.inf
        self._on_one_rank = on_one_rank
        self.gap = 0.0  # how far the step's placings may be from the best, relatively

    def start_step(self) -> None:
        """Starts the clock for the placings of a step."""
        self._end, self.gap = time.perf_counter() + self._time_limit, 0.0

    def __call__(self, slots: Slots, works: Floats) -> Ints | None:
        placed: Ints | None
        placed, gap = self._on_one_rank(lambda: self.solved(slots, works))
        self.gap = max(self.gap, gap)
        return placed

    def solved(self, slots: Slots, works: Floats) -> tuple[Ints | None, float]:
        """The placing, and how far it may be from the best, relatively."""
        greedy = place_greedily(slots, works)
        if not len(works):
            return greedy, 0.0
        unit = (slots.work.sum() + works.sum()) / slots.size.sum()
        share, load = works / unit, slots.work / unit

        def level(placed: Ints | None) -> float:
            if placed is None:
                return np.inf
            beside = np.bincount(placed, works, len(slots.size))
            levels = (slots.work + beside) / slots.size
            left = (beside < levels) | (slots.size == 1)  # some of each cut document for its last slice
            return float(levels.max() / unit) if left.all() else np.inf

        beside = np.where(slots.size > 1, load / np.maximum(slots.size - 1, 1) - SLIVER, np.inf)
        solved, bound = None, 0.0
        if time.perf_counter() < self._end:
            solved, bound = self._milp(share, share, (load, slots.size, beside), start=greedy)
        best = min(greedy, solved, key=level)
        if (reached := level(best)) == np.inf:
            return None, 0.0
        return best, max(1 - max(bound, 1.0) / reached, 0.0)  # the mean level is a bound too
