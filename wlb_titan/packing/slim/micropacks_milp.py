"""Short documents in the rests of packs, as a mixed-integer program for HiGHS (SlimPack, section 4.1.1).

The variables are z, the largest level, and x_ib, document i in slot b. Cuts are continuous and need no
variables: whatever work a slot gets, its packs share it equally (`micropacks.py`), if what rides with a cut
document leaves something of a pack for its last slice:

    minimise z   subject to   sum_b x_ib = 1,   work_b + sum_i w_i x_ib <= size_b z,
                              (size_b - 1) sum_i w_i x_ib < work_b   where size_b > 1
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.packing.milp import Milp, Row
from wlb_titan.packing.slim.micropacks import Slots, place_greedily

SLIVER = 1e-5  # of a level, that is left for a last slice


class SolvedPlacing:
    """Puts short documents into slots by a solver; where it finds nothing in time, greedily.

    Args:
        time_limit: seconds for all placings of a step.
        gap: relative distance between solution and bound at which to stop.
        placings: among which the time is shared out. A step may have more, while there is time.
    """

    def __init__(self, time_limit: float, gap: float, placings: int = 1) -> None:
        self._milp = Milp(time_limit / placings, gap, user="The solver of slim", setting="packing.solver")
        self._time_limit, self._end = time_limit, np.inf

    def begin(self) -> None:
        """Begins a step: from now on its time counts."""
        self._end = time.perf_counter() + self._time_limit

    def __call__(self, slots: Slots, works: Floats) -> tuple[Ints | None, float]:
        """As `Placing`, and how far the placing may be from the best, relatively; 0 is a proven optimum."""
        greedy = place_greedily(slots, works)
        if not len(works):
            return greedy, 0.0
        unit = (slots.work.sum() + works.sum()) / slots.size.sum()
        count, share, own = len(slots.size), works / unit, slots.work / unit

        def level(placed: Ints) -> float:
            levels = (slots.work + np.bincount(placed, works, count)) / slots.size
            return float(levels.max() / unit)

        def rows() -> Iterator[Row]:
            for slot, (work, size) in enumerate(zip(own.tolist(), slots.size.tolist(), strict=True)):
                yield Row(slot, -work, share, -float(size))
                if size > 1:
                    yield Row(slot, work / (size - 1) - SLIVER, share)

        start = None if greedy is None else (greedy, level(greedy))
        solved, bound = None, 0.0
        if time.perf_counter() < self._end:
            solved, bound = self._milp(len(works), count, rows(), start=start)
        if solved is None or not _fits(slots, works, solved):
            solved = greedy
        if solved is None:
            return None, 0.0
        if greedy is not None and level(greedy) <= level(solved):
            solved = greedy
        return solved, max(1 - max(bound, 1.0) / level(solved), 0.0)  # the mean level is a bound too


def _fits(slots: Slots, works: Floats, placed: Ints) -> bool:
    """Whether what rides with each cut document leaves something for its last slice."""
    beside = np.bincount(placed, works, len(slots.size))
    levels = (slots.work + beside) / slots.size
    return bool((beside < levels)[slots.size > 1].all())
