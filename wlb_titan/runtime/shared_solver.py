"""One solver for all ranks.

A solver that is stopped by its time limit finds different packings on different ranks. So rank 0 solves and
tells the others, in the thread that plans ahead and over a process group that nothing else uses.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from wlb_titan.packing.solver import Solver
from wlb_titan.settings import PackingSettings


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
