"""`fixed_solver`: equation 1 as a mixed-integer program for HiGHS (extra `solver`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Floats, Ints
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.fixed import FixedGreedy
from wlb_titan.packing.milp import Milp, Row

if TYPE_CHECKING:
    from wlb_titan.job import Job


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
