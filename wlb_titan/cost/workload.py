"""The workload of a document of d tokens on a device: W_a(d) + W_l(d) (paper equation 2, Figure 7).

W_a is attention, which grows with d^2; W_l is everything else (matrix products, element-wise operators and
communication), which grows with d. Packing balances the sum of both passes (docs/packing.md).

`simulated` (`layers/passes.py`) takes both from the simulator's passes. Left out are gradient reduction and
FSDP's gathers, which are the same for every micro-batch, and the pipeline's point-to-point traffic, which
overlaps with computation.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.errors import PlanError, UserError
from wlb_titan.plugins import Family, Plugin, PluginConfig

LARGEST = 1e100  # coefficient for which the work of any step is still finite

COST_MODELS = Family(
    kind="cost model",
    key="cost_model",
    group="wlb_titan.cost",
    base="wlb_titan.cost.workload:CostModel",
    shipped={
        "simulated": "wlb_titan.layers.passes:JobCost",
        "quadratic": "wlb_titan.cost.workload:Quadratic",
    },
)


class CostModel(Plugin):
    """Predicted work of documents, in one unit for all of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """What follows a cost model's name in `[wlb.packing] cost_model`, with commas between."""

        family = COST_MODELS

        @classmethod
        def parse(cls, text: str) -> Self:
            """The settings from what follows the name and a colon: none, but for models that override it."""
            if text:
                raise PlanError(
                    f"the cost model {cls.owner_name()!r} takes nothing after its name; got {text!r}"
                )
            return cls()

    recomputes: ClassVar[bool] = False  # whether `backward` counts what full checkpointing computes again

    @classmethod
    @abstractmethod
    def of(cls, config: Any, rates: Any) -> CostModel:
        """The cost model of a job with these `wlb_titan.layers.rates.Rates`."""

    @abstractmethod
    def forward(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of the forward pass of documents of `lengths` tokens, each positive."""

    @abstractmethod
    def backward(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of the backward pass."""

    def passes(self, lengths: NDArray[Any]) -> Floats:
        """float64 (2, n), `forward` and `backward`; to override where both follow from the same numbers."""
        return np.stack([self.forward(lengths), self.backward(lengths)])

    def recomputed(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of a backward pass that computes the whole forward pass again."""
        backward = self.backward(lengths)
        return backward if self.recomputes else self.forward(lengths) + backward


def cost_model(text: str, rates: Any) -> CostModel:
    """The model of `[wlb.packing] cost_model`: a name, with settings after a colon (`quadratic:0.9e6,4e10`),
    or "package.module:Class"."""
    name, _, settings = text.partition(":")
    if name not in COST_MODELS.names:
        name, settings = text, ""
    try:
        config: CostModel.Config = COST_MODELS.find(name).Config.parse(settings)
        model: CostModel = config.owner.of(config, rates)
    except UserError as error:
        raise PlanError(str(error), setting=error.setting or "packing.cost_model") from error
    return model


def workload(model: CostModel, lengths: NDArray[Any]) -> Floats:
    """float64 (n,), work of both passes: what packing balances."""
    return np.asarray(model.passes(lengths).sum(axis=0))


class Quadratic(CostModel):
    """`quadratic:A,B`: both passes together cost A d^2 + B d, of which the forward pass is one third."""

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
                a = b = 0.0
            if not (0 <= a <= LARGEST and 0 <= b <= LARGEST) or a + b == 0:
                raise PlanError(
                    f"The cost model {f'quadratic:{text}'!r} is malformed; write quadratic:A,B with two "
                    f"numbers from 0 to {LARGEST:g} that are not both 0, such as quadratic:0.9e6,4e10 for "
                    "work of 0.9e6 d^2 + 4e10 d."
                )
            return cls(a=a, b=b)

    def __init__(self, a: float, b: float) -> None:
        self.a, self.b = a, b

    @classmethod
    def of(cls, config: Config, rates: Any) -> Quadratic:
        return cls(config.a, config.b)

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return self._total(lengths) / 3

    def backward(self, lengths: NDArray[Any]) -> Floats:
        total = self._total(lengths)
        return total - total / 3

    def _total(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self.a * d * d + self.b * d
