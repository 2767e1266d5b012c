"""Gluon's backward beside Triton's within a run, on its own data and sizes, which no check knows before.

One backward pass, the next of any layer, is computed by both when it is asked for; the run goes on with
Gluon's. It finds what is wrong each time, not a rare race.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

TOLERANCE = 0.02  # of a gradient, norm over norm; rounding to bfloat16 leaves 0.004

Gradients = tuple[Tensor, Tensor, Tensor]


class Comparison:
    """Of this process; its passes run in autograd's threads."""

    def __init__(self) -> None:
        self._asked = False
        self._difference: Tensor | None = None

    def ask(self) -> None:
        """Compare the next backward pass."""
        self._asked, self._difference = True, None

    def compare(self, got: Gradients, judge: Callable[[], Gradients]) -> Gradients:
        """`got`; compared with the judge's, where that was asked for."""
        if self._asked:
            self._asked = False
            with suppress(torch.OutOfMemoryError):  # of what a run may do without
                each = [_norm(a - b) / _norm(b).clamp(min=1e-30) for a, b in zip(got, judge(), strict=True)]
                self._difference = torch.stack(each).max()
        return got

    def answer(self) -> float | None:
        """The largest difference of a gradient; None where Gluon ran no pass, or there was no room.

        Waits for the device.
        """
        self._asked = False
        return None if self._difference is None else float(self._difference)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


comparison = Comparison()
