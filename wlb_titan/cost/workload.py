"""The workload of a document of d tokens on a device: W_a(d) + W_l(d) (paper equation 2, Figure 7).

W_a is attention, which grows with d^2; W_l is everything else (matrix products, element-wise operators and
communication), which grows with d. Forward and backward are given apart: the backward pass of attention costs
2.5 times its forward (five matrix products, one of them recomputed, against two), that of a linear layer
twice (SlimPack, section 2.2.2), so a packing that balances one pass alone does not balance the other. Packing
balances their sum, since a micro-batch holds the same documents in both.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.errors import PlanError, UserError
from wlb_titan.plugins import Family, Plugin, PluginConfig

if TYPE_CHECKING:
    from wlb_titan.job import Job

COST_MODELS = Family(
    kind="cost model",
    key="cost_model",
    group="wlb_titan.cost",
    base="wlb_titan.cost.workload:CostModel",
    shipped={
        "analytic": "wlb_titan.cost.analytic:Analytic",
        "quadratic": "wlb_titan.cost.quadratic:Quadratic",
        "profile": "wlb_titan.cost.measured:Measured",
        "simulated": "wlb_titan.cost.passes:JobCost",
    },
)


class CostModel(Plugin):
    """Predicted work of documents, in one unit for all of them.

    Attributes:
        recomputes: whether `backward` has what full activation checkpointing computes again, where it is set.
    """

    recomputes: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """What follows a cost model's name in `[wlb.packing] cost_model`, with commas between."""

        family = COST_MODELS

        @classmethod
        def parse(cls, text: str) -> Self:
            """The settings from what follows the name and a colon."""
            names = [field.name for field in fields(cls)]
            parts = text.split(",") if text else []
            if len(parts) > len(names):
                raise PlanError(
                    f"the cost model {cls.owner_name()!r} takes {', '.join(names) or 'nothing'} after its "
                    f"name, and there is {text!r}"
                )
            return cls(**dict(zip(names, parts, strict=False)))

    @classmethod
    @abstractmethod
    def of(cls, config: Any, job: Job) -> CostModel:
        """The model for a job."""

    @abstractmethod
    def forward(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of the forward pass of documents of `lengths` tokens, each positive."""

    @abstractmethod
    def backward(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of the backward pass."""

    def recomputed(self, lengths: NDArray[Any]) -> Floats:
        """float64 (n,), work of a backward pass that computes the whole forward pass again."""
        backward = self.backward(lengths)
        return backward if self.recomputes else self.forward(lengths) + backward


def cost_model(text: str, job: Job) -> CostModel:
    """What `[wlb.packing] cost_model` or `--cost-model` names.

    Args:
        text: a name, with its settings after a colon (`quadratic:0.9e6,4e10`); the path of a profile, which
            is short for `profile:PATH`; or "package.module:Class".
    """
    name, _, settings = text.partition(":")
    if text.endswith(".json") and name not in COST_MODELS.names:
        name, settings = "profile", text
    if name not in COST_MODELS.names:
        name, settings = text, ""
    try:
        config: CostModel.Config = COST_MODELS.find(name).Config.parse(settings)
        model: CostModel = config.owner.of(config, job)
    except UserError as error:
        raise PlanError(str(error), setting=error.setting or "packing.cost_model") from error
    return model


def workload(model: CostModel, lengths: NDArray[Any]) -> Floats:
    """float64 (n,), work of both passes: what packing balances."""
    return model.forward(lengths) + model.backward(lengths)
