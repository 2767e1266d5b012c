"""Whether loss, gradients and weights are finite numbers: what is not is never saved.

Once one of them is infinite or NaN, all later steps are. Each step is noted on the device, without waiting
for it, and the notes are read where the run waits anyway: in a logged step, and before anything is saved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

NEVER = torch.iinfo(torch.int64).max


class Finite:
    """The first step of this run that is not finite."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), NEVER, dtype=torch.int64, device=device)

    def note(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Notes this rank's loss and norm of gradients, two scalars, of a step."""
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        self._first = torch.where(finite, self._first, self._first.clamp(max=step))

    def first_other(self, step: int, weights: Iterable[torch.Tensor] = ()) -> int | None:
        """The first step that is not finite on any rank, up to this one, whose `weights` are looked at, too;
        None if all are. Every rank takes part."""
        first = self._first.clone()
        for tensor in weights:
            first = torch.where(all_finite(tensor), first, first.clamp(max=step))
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        return None if (found := int(first)) == NEVER else found


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers of a tensor, or of this rank's part of it, are finite: bool scalar."""
    return torch.isfinite(tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor).all()
