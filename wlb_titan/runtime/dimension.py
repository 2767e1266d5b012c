"""The half of a dimension of parallelism that moves tensors: what its class names as `runtime`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.protocols.model_spec import ModelSpec

from wlb_titan.plugins import load
from wlb_titan.runtime.compat import Dims

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


class Axis:
    """A dimension on one rank."""

    def __init__(self, config: Any, mesh: DeviceMesh) -> None:
        self.config, self.mesh = config, mesh

    def prepare(self, part: nn.Module) -> None:
        """Changes a part of the model, on the meta device, before tensor parallelism and FSDP divide it."""

    def before_optimizer(self, trainer: Trainer) -> None:
        """Called in every step, after the last backward pass and before gradients are clipped."""

    def after_optimizer(self, trainer: Trainer, *, meets: bool) -> None:
        """Called in every step.

        Args:
            trainer: with `model_parts` and `optimizers`.
            meets: whether the ranks meet: every `every` steps, and before a checkpoint.
        """

    def tensors(self) -> Iterable[torch.Tensor]:
        """What it holds beside weights, gradients and the optimizer's state."""
        return ()


def axes_of(dims: Dims) -> list[tuple[int, Axis]]:
    """The halves of a job's own dimensions of more than one rank, each after its steps between meetings."""
    return [
        (one.every, load(one.runtime)(one.config, dims.get_mesh(one.axis)))
        for one in dims.own
        if one.runtime and one.degree > 1
    ]


def prepared(spec: ModelSpec, axes: Sequence[tuple[int, Axis]]) -> ModelSpec:
    """A model whose parts are prepared by dimensions before they are parallelised.

    Args:
        spec: model specification.
        axes: as of `axes_of`; looked at when a part is parallelised.
    """
    parallelize = spec.parallelize_fn

    def first(part: nn.Module, **arguments: Any) -> nn.Module:
        for _, axis in axes:
            axis.prepare(part)
        result: nn.Module = parallelize(part, **arguments)
        return result

    return dataclasses.replace(spec, parallelize_fn=first)
