"""`quadratic:A,B`: the work of a document by two numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.cost.workload import CostModel
from wlb_titan.errors import PlanError

if TYPE_CHECKING:
    from wlb_titan.job import Job

LARGEST = 1e100  # coefficient, with which the work of any step is still a finite number


class Quadratic(CostModel):
    """Both passes together cost A d^2 + B d, of which the forward pass is one third."""

    @dataclass(kw_only=True, slots=True)
    class Config(CostModel.Config):
        a: float
        """A, work by the square of a document's tokens."""

        b: float
        """B, work by its tokens."""

        @classmethod
        def parse(cls, text: str) -> Self:
            try:
                a, b = (float(part) for part in text.split(","))
            except ValueError:
                raise PlanError(
                    f"The cost model {f'quadratic:{text}'!r} is malformed; write quadratic:A,B with two "
                    "numbers, such as quadratic:0.9e6,4e10 for work of 0.9e6 d^2 + 4e10 d."
                ) from None
            return cls(a=a, b=b)

    def __init__(self, a: float, b: float) -> None:
        if not (0 <= a <= LARGEST and 0 <= b <= LARGEST) or a + b == 0:
            raise PlanError(
                f"The cost model quadratic:{a:g},{b:g} does not give every document some work: A and B must "
                f"be from 0 to {LARGEST:g}, and not both zero."
            )
        self.a, self.b = a, b

    @classmethod
    def of(cls, config: Config, job: Job) -> Quadratic:
        return cls(config.a, config.b)

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return self._total(lengths) / 3

    def backward(self, lengths: NDArray[Any]) -> Floats:
        total = self._total(lengths)
        return total - total / 3

    def _total(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self.a * d * d + self.b * d
