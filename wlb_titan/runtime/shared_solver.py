"""One solver for all ranks.

A solver that is stopped by its time limit finds different packings on different ranks. So rank 0 solves and
tells the others, in the thread that plans ahead and over a process group that nothing else uses.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from wlb_titan.packing.micropacks import Bins
from wlb_titan.packing.micropacks_milp import SolvedPlacing
from wlb_titan.packing.solver import Solver
from wlb_titan.settings import PackingSettings, SlimSettings


class SharedSolver:
    """`Solver` on rank 0, its answers everywhere. To be made and called on every rank in the same order.

    Args:
        settings: time limit and gap.

    Raises:
        PlanError: a limit is not positive, or highspy is not installed.
    """

    def __init__(self, settings: PackingSettings) -> None:
        self._solver = Solver(settings.time_limit, settings.gap)
        self._group = dist.new_group(backend="gloo")

    def __call__(
        self, lengths: NDArray[np.int64], start: NDArray[np.int64], packs: int, window: int
    ) -> tuple[NDArray[np.int64], float]:
        """As `Solver.__call__`; the arguments are the same on every rank."""
        assigned, gap = start, 0.0
        if dist.get_rank() == 0:
            assigned, gap = self._solver(lengths, start, packs, window)
        answer = torch.from_numpy(np.append(assigned.astype(np.float64), gap))
        dist.broadcast(answer, src=0, group=self._group)
        return answer[:-1].numpy().astype(np.int64), float(answer[-1])


class SharedPlacing:
    """`SolvedPlacing` on rank 0, its answers everywhere. To be made and called as `SharedSolver`.

    Args:
        settings: time limit and gap.

    Attributes:
        gap: as of `SolvedPlacing`.

    Raises:
        PlanError: a limit is not positive, or highspy is not installed.
    """

    def __init__(self, settings: SlimSettings) -> None:
        self._solver = SolvedPlacing(settings.time_limit, settings.gap)
        self._group = dist.new_group(backend="gloo")
        self.gap = 0.0

    def forget(self) -> None:
        self._solver.forget()
        self.gap = 0.0

    def __call__(self, bins: Bins, works: NDArray[np.float64]) -> NDArray[np.int64] | None:
        placed = self._solver(bins, works) if dist.get_rank() == 0 else None
        found = placed is not None
        rows = placed if placed is not None else np.zeros(len(works))
        answer = torch.from_numpy(np.append(rows.astype(np.float64), [found, self._solver.gap]))
        dist.broadcast(answer, src=0, group=self._group)
        self.gap = float(answer[-1])
        return answer[:-2].numpy().astype(np.int64) if answer[-2] else None


def shared_placing(settings: PackingSettings) -> SharedPlacing | None:
    """What `slim` places documents by under `solver = "milp"`; None otherwise."""
    asked = settings.policy == "slim" and settings.slim.solver == "milp"
    return SharedPlacing(settings.slim) if asked else None
