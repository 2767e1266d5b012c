"""One answer for all ranks.

A solver that is stopped by its time limit finds different packings on different ranks. So rank 0 asks it and
tells the others, in the thread that plans ahead and over a process group that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from wlb_titan.arrays import Floats


class SharedAnswer:
    """Asks on rank 0 only. To be made and called on every rank in the same order."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def __call__(self, ask: Callable[[], Floats]) -> Floats:
        """What `ask` returns on rank 0, float64 (n,), on every rank."""
        answer = torch.from_numpy(ask()) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.float64)
        size = torch.tensor([answer.numel()])
        dist.broadcast(size, src=0, group=self._group)
        answer = answer if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.float64)
        dist.broadcast(answer, src=0, group=self._group)
        result: Floats = answer.numpy()
        return result
