"""`fixed_solver`: equation 1 as a mixed-integer program for HiGHS (extra `solver`), and what it shares with
`slim`: the program of documents into packs.

The variables are z, which is made least, and x_ij, document i in pack j, document by document:

    minimise z   subject to   sum_j x_ij = 1,   and rows   sum_i c_i x_ij + k z <= limit   of single packs

It is bounded in time, the making of the model included, and in size: by the time that it takes to write down
`MOST_VARIABLES`, a few tenths of a second, the limit may be overrun.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Floats, Ints
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.fixed_greedy import FixedGreedy

if TYPE_CHECKING:
    from wlb_titan.job import Job


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


class FixedSolver(FixedGreedy):
    """As `fixed_greedy`, and then a MILP solver makes each packing better."""

    @dataclass(kw_only=True, slots=True)
    class Config(FixedGreedy.Config):
        time_limit: Annotated[float, Interval(gt=0, le=86400)] = 10.0
        """Seconds that the solver may take for the documents of one window. A solver that is stopped by the
        clock finds something else the next time, so a run cannot be repeated exactly."""

        gap: Annotated[float, Interval(ge=0, lt=1)] = 0.001
        """Relative gap between solution and bound at which the solver stops."""

        @property
        def planning_seconds(self) -> float:
            return self.time_limit

    def __init__(self, config: Config, stream: DocumentStream, job: Job) -> None:
        super().__init__(config, stream, job)
        self._solver = Solver(config.time_limit, config.gap)
        self._on_one_rank = job.on_one_rank

    def _improved(self, lengths: Ints, assigned: Ints) -> tuple[Ints, float | None]:
        def solve() -> Floats:
            better, gap = self._solver(lengths, assigned, self._packs, self._stream.window)
            return np.append(better.astype(np.float64), gap)

        answer = self._on_one_rank(solve)
        return answer[:-1].astype(np.int64), float(answer[-1])


class Solver:
    """Makes a fixed-length packing as good as the solver can within its limits.

    Args:
        time_limit: seconds for one packing.
        gap: relative distance between solution and bound at which to stop.
    """

    def __init__(self, time_limit: float, gap: float) -> None:
        if time_limit <= 0 or gap < 0:
            raise PlanError(
                f"The solver's time limit is {time_limit} seconds and its gap {gap}; the first must be "
                "positive and the second not negative.",
                setting="packing.time_limit",
            )
        self._milp = Milp(time_limit, gap, user="The policy fixed_solver", setting="packing.policy")

    def __call__(self, lengths: Ints, start: Ints, packs: int, window: int) -> tuple[Ints, float]:
        """Minimises the largest sum of squared lengths of a pack.

        The variables are z, the largest sum, and x_ij, document i in pack j, document by document:

            minimise z   subject to   sum_j x_ij = 1,   sum_i d_i x_ij <= L,   sum_i d_i^2 x_ij <= z

        Lengths are scaled by L. Packs may be renamed at will, and the longest document stays where it is, so
        that the solver need not look at all its mirror images.

        Args:
            lengths: int64 (n,), tokens of each document.
            start: int64 (n,), a packing that fits.
            packs: number of packs.
            window: L, most tokens of a pack.

        Returns:
            int64 (n,), the best packing found, never worse than `start`; and the relative gap that remains
            between it and what the solver could prove, 0 for a proven optimum.
        """
        documents = len(lengths)
        share = lengths / window
        work = share**2
        least = max(float(work.max()), float(work.sum()) / packs)

        def largest(assigned: Ints) -> float:
            return float(np.bincount(assigned, work, packs).max())

        longest = int(lengths.argmax())
        rows = (row for pack in range(packs) for row in (Row(pack, 1.0, share), Row(pack, 0.0, work, -1.0)))
        found, bound = self._milp(
            documents,
            packs,
            rows,
            start=(start, largest(start)),
            z=(float(work.max()), float(packs)),
            fixed=(longest, int(start[longest])),
        )
        assigned = start
        if found is not None:
            fits = int(np.bincount(found, lengths, packs).max()) <= window
            if fits and largest(found) < largest(start):
                assigned = found
        return assigned, max(0.0, 1 - max(bound, least) / largest(assigned))
