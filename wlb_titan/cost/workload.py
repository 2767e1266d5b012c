"""How long a document of d tokens keeps a device busy: W_a(d) + W_l(d) (paper equation 2, Figure 7).

W_a is attention, which grows with d^2; W_l is everything else (matrix products, element-wise operators and
communication), which grows with d. Forward and backward are given apart: the backward pass of attention costs
2.5 times its forward (five matrix products, one of them recomputed, against two), that of a linear layer
twice (SlimPack, section 2.2.2), so a packing that balances one pass alone does not balance the other. Packing
balances their sum, since a micro-batch holds the same documents in both.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb_titan.errors import PlanError

Floats = NDArray[np.float64]

LARGEST = 1e100  # coefficient, with which the work of any step is still a finite number


class CostModel(Protocol):
    """Predicted work of documents, in one unit for all of them."""

    def forward(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of the forward pass of documents of `lengths` tokens, each positive."""
        ...

    def backward(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of the backward pass."""
        ...


def workload(model: CostModel, lengths: NDArray[Any]) -> Floats:
    """float64 (n,), work of both passes: what packing balances."""
    return model.forward(lengths) + model.backward(lengths)


class Quadratic:
    """`quadratic:A,B`: both passes together cost A d^2 + B d, of which the forward pass is one third.

    Raises:
        PlanError: A or B is negative or not finite, both are zero, or work would overflow.
    """

    def __init__(self, a: float, b: float) -> None:
        if not (0 <= a <= LARGEST and 0 <= b <= LARGEST) or a + b == 0:
            raise PlanError(
                f"The cost model quadratic:{a:g},{b:g} does not give every document some work: A and B must "
                f"be from 0 to {LARGEST:g}, and not both zero.",
                setting="packing.cost_model",
            )
        self.a, self.b = a, b

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return self._total(lengths) / 3

    def backward(self, lengths: NDArray[Any]) -> Floats:
        total = self._total(lengths)
        return total - total / 3

    def _total(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self.a * d * d + self.b * d
