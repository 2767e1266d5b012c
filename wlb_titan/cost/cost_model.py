"""The cost model that a user names: `analytic`, `quadratic:A,B`, or the profile of a device."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.cost.analytic import Analytic, Device
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.attention_profile import AttentionShape, Profile
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.workload import CostModel, Floats, Quadratic
from wlb_titan.errors import PlanError


@dataclass(frozen=True, slots=True)
class Measured:
    """W_a as measured on a device (`wlb-titan profile`), W_l by counting operations.

    Attributes:
        attention: of one layer on one device.
        layers: of the model.
        context_parallel: degree; its ranks share attention equally.
        linear: gives W_l.
    """

    attention: AttentionLatency
    layers: int
    context_parallel: int
    linear: Analytic

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return self._attention(lengths, 0) + self.linear.linear_forward * np.asarray(lengths, np.float64)

    def backward(self, lengths: NDArray[Any]) -> Floats:
        return self._attention(lengths, 1) + self.linear.linear_backward * np.asarray(lengths, np.float64)

    def _attention(self, lengths: NDArray[Any], direction: int) -> Floats:
        seconds: Floats = self.attention.work(lengths, lengths)[direction]
        return seconds * (self.layers / self.context_parallel)


def cost_model(
    text: str,
    shape: ModelShape,
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    dtype: str = "bfloat16",
    device: Device | None = None,
) -> CostModel:
    """What `[wlb.packing] cost_model` or `--cost-model` names.

    Args:
        text: `analytic`, `quadratic:A,B`, or the path of a profile. Where the profile is of another kind of
            attention, this warns and takes `analytic`.
        shape: the model.
        tensor_parallel, context_parallel: degrees.
        dtype: of queries and keys, as torch names it.
        device: for `analytic` and for W_l; None takes a GPU of the paper's cluster.

    Raises:
        PlanError: `quadratic:` is malformed, or the profile is missing, damaged or of another schema.
    """
    if text.startswith("quadratic:"):
        return _quadratic(text)
    analytic = Analytic(shape, device, tensor_parallel=tensor_parallel, context_parallel=context_parallel)
    if text == "analytic":
        return analytic
    try:
        profile = Profile.load(Path(text))
    except PlanError as error:
        raise PlanError(
            f"{error} A cost model is `analytic`, quadratic:A,B or the path of a profile.",
            setting="packing.cost_model",
        ) from error
    attention = AttentionShape.of(shape, tensor_parallel, dtype)
    try:
        latency = profile.latency(attention)
    except PlanError as error:
        _warn(f"{text}: {error}")
        return analytic
    return Measured(latency, shape.layers, context_parallel, analytic)


def _quadratic(text: str) -> Quadratic:
    try:
        a, b = (float(part) for part in text.removeprefix("quadratic:").split(","))
    except ValueError:
        raise PlanError(
            f"The cost model {text!r} is malformed; write quadratic:A,B with two numbers, such as "
            "quadratic:0.9e6,4e10 for work of 0.9e6 d^2 + 4e10 d.",
            setting="packing.cost_model",
        ) from None
    return Quadratic(a, b)


def _warn(problem: str) -> None:
    warnings.warn(f"{problem} The work of documents is derived from the model's shape instead.", stacklevel=3)
