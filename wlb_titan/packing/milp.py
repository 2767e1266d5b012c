"""Documents into packs as a mixed-integer program for HiGHS (extra `solver`): what its two users share.

The variables are z, which is made least, and x_ij, document i in pack j, document by document:

    minimise z   subject to   sum_j x_ij = 1,   and rows   sum_i c_i x_ij + k z <= limit   of single packs

It is bounded in time, the making of the model included, and in size: by the time that it takes to write down
`MOST_VARIABLES`, a few tenths of a second, the limit may be overrun.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError

MOST_VARIABLES = 1 << 18
"""Pairs of a document and a pack; of more nothing is looked for."""


class Row(NamedTuple):
    """A condition on one pack: sum_i documents_i x_ij + level z <= limit; without `level` z is not in it."""

    pack: int
    limit: float
    documents: Floats
    level: float | None = None


class Milp:
    """The solver within its limits.

    Args:
        time_limit: seconds for one packing.
        gap: relative distance between solution and bound at which to stop.
        user: what asks for it, for errors.
    """

    def __init__(self, time_limit: float, gap: float, *, user: str, setting: str) -> None:
        try:
            import highspy
        except ImportError as error:
            raise PlanError(
                f"{user} needs HiGHS. Install it with: pip install 'wlb-titan[solver]'", setting=setting
            ) from error
        self._highspy: Any = highspy
        self._time_limit, self._gap = time_limit, gap

    def __call__(
        self,
        documents: int,
        packs: int,
        rows: Iterable[Row],
        *,
        start: tuple[Ints, float] | None,
        z: tuple[float, float] = (0.0, np.inf),
        fixed: tuple[int, int] | None = None,
    ) -> tuple[Ints | None, float]:
        """Looks for a packing.

        Args:
            start: a packing, int64 (documents,), and its z.
            z: between what it lies.
            fixed: a document, and the pack that it stays in.

        Returns:
            int64 (documents,), the best packing found, if any, and a bound that no packing's z is below. What
            the solver calls a packing may miss a row by its tolerance.
        """
        begin, pairs = time.perf_counter(), documents * packs
        if pairs > MOST_VARIABLES:
            return None, 0.0
        highs, infinity = self._highspy.Highs(), self._highspy.kHighsInf
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("mip_rel_gap", self._gap)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("random_seed", 0)
        columns = (1 + np.arange(pairs)).reshape(documents, packs).astype(np.int32)
        highs.addVars(1, np.array([z[0]]), np.array([min(z[1], infinity)]))
        upper = np.ones((documents, packs))
        if fixed is not None:
            upper[fixed[0]] = np.arange(packs) == fixed[1]
        highs.addVars(pairs, np.zeros(pairs), upper.ravel())
        highs.changeColCost(0, 1.0)
        whole = np.full(pairs, self._highspy.HighsVarType.kInteger)
        highs.changeColsIntegrality(pairs, columns.ravel(), whole)
        starts = np.arange(documents, dtype=np.int32) * packs
        each = np.ones(documents)
        highs.addRows(documents, each, each, pairs, starts, columns.ravel(), np.ones(pairs))
        for pack, limit, values, level in rows:
            index = np.ascontiguousarray(columns[:, pack])
            if level is not None:
                index, values = np.append(index, np.int32(0)), np.append(values, level)
            highs.addRow(-infinity, limit, len(index), index, values)
        if start is not None:
            solution = self._highspy.HighsSolution()
            found = np.zeros(1 + pairs)
            found[0] = start[1]
            found[columns[np.arange(documents), start[0]]] = 1.0
            solution.col_value = found.tolist()
            highs.setSolution(solution)
        if (left := begin + self._time_limit - time.perf_counter()) <= 0:
            return None, 0.0
        highs.setOptionValue("time_limit", left)
        highs.run()
        found, packed = np.array(highs.getSolution().col_value), None
        if len(found) == 1 + pairs and found.any():
            packed = found[columns].argmax(axis=1).astype(np.int64)
        return packed, float(highs.getInfo().mip_dual_bound)
