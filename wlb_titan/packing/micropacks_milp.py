"""Which pack's rest a short document fills, as a mixed-integer program for HiGHS (SlimPack, section 4.1.1).

The variables are z, the largest level, and x_ib, document i in bin b. Cuts are continuous and need no
variables: whatever work a bin gets, its packs share it equally (`micropacks.py`), if what rides with a cut
document leaves something of a pack for its last slice:

    minimise z   subject to   sum_b x_ib = 1,   work_b + sum_i w_i x_ib <= size_b z,
                              (size_b - 1) sum_i w_i x_ib < work_b   where size_b > 1
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.errors import PlanError
from wlb_titan.packing.micropacks import Bins, place_greedily

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SLIVER = 1e-5  # of a level, that is left for a last slice


class SolvedPlacing:
    """Puts short documents into bins by a solver; where it finds nothing in time, greedily.

    Args:
        time_limit: seconds for one placing.
        gap: relative distance between solution and bound at which to stop.

    Raises:
        PlanError: highspy is not installed.
    """

    def __init__(self, time_limit: float, gap: float) -> None:
        try:
            import highspy
        except ImportError as error:
            raise PlanError(
                "The solver of slim needs HiGHS. Install it with: pip install 'wlb-titan[solver]'",
                setting="packing.solver",
            ) from error
        self._highspy: Any = highspy
        self._time_limit = time_limit
        self._gap = gap

    def __call__(self, bins: Bins, works: Floats) -> tuple[Ints | None, float]:
        """As `Placing`, and how far the placing may be from the best, relatively; 0 is a proven optimum."""
        greedy = place_greedily(bins, works)
        if not len(works):
            return greedy, 0.0
        unit = (bins.work.sum() + works.sum()) / bins.size.sum()
        documents, count = len(works), len(bins.size)
        columns = (1 + np.arange(documents * count)).reshape(documents, count).astype(np.int32)
        highs, infinity = self._highs(), self._highspy.kHighsInf
        highs.addVars(1, np.zeros(1), np.full(1, infinity))
        highs.addVars(documents * count, np.zeros(documents * count), np.ones(documents * count))
        highs.changeColCost(0, 1.0)
        whole = np.full(documents * count, self._highspy.HighsVarType.kInteger)
        highs.changeColsIntegrality(documents * count, columns.ravel(), whole)
        for row in columns:
            highs.addRow(1.0, 1.0, count, row, np.ones(count))
        share = works / unit
        for bin_, (work, size) in enumerate(zip(bins.work / unit, bins.size, strict=True)):
            index = np.append(columns[:, bin_], 0).astype(np.int32)
            highs.addRow(-infinity, -work, documents + 1, index, np.append(share, -float(size)))
            if size > 1:
                highs.addRow(-infinity, work / (size - 1) - SLIVER, documents, columns[:, bin_], share)

        def level(placed: Ints) -> float:
            levels = (bins.work + np.bincount(placed, works, count)) / bins.size
            return float(levels.max() / unit)

        if greedy is not None:
            start = self._highspy.HighsSolution()
            values = np.zeros(1 + documents * count)
            values[0] = level(greedy)
            values[columns[np.arange(documents), greedy]] = 1.0
            start.col_value = values.tolist()
            highs.setSolution(start)
        highs.run()
        placed, found = greedy, np.array(highs.getSolution().col_value)
        if len(found) == 1 + documents * count and found.any():
            solved = found[columns].argmax(axis=1).astype(np.int64)
            if _fits(bins, works, solved) and (placed is None or level(solved) < level(placed)):
                placed = solved
        if placed is None:
            return None, 0.0
        bound = max(float(highs.getInfo().mip_dual_bound), 1.0)  # the mean level is a bound too
        return placed, max(1 - bound / level(placed), 0.0)

    def _highs(self) -> Any:
        highs = self._highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("time_limit", self._time_limit)
        highs.setOptionValue("mip_rel_gap", self._gap)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        return highs


def _fits(bins: Bins, works: Floats, placed: Ints) -> bool:
    """Whether what rides with each cut document leaves something for its last slice."""
    beside = np.bincount(placed, works, len(bins.size))
    levels = (bins.work + beside) / bins.size
    return bool((beside < levels)[bins.size > 1].all())
