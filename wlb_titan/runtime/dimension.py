"""The half of a dimension of parallelism that moves tensors; its class names it as `runtime`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from wlb_titan.plugins import load
from wlb_titan.runtime.meshes import Dims
from wlb_titan.runtime.models.weights import parallelized


class Axis:
    """A dimension on one rank."""

    every = 1  # steps from one meeting of its ranks to the next; its other half says so

    def __init__(self, config: Any, mesh: DeviceMesh) -> None:
        self.config, self.mesh = config, mesh

    def prepare(self, part: nn.Module) -> None:
        """Changes a part of the model on the meta device, before tensor parallelism and FSDP divide it."""

    def before_optimizer(self, trainer: Trainer) -> None:
        """Runs in every step, after the last backward pass and before gradients are clipped."""

    def after_optimizer(self, trainer: Trainer, *, meets: bool) -> None:
        """Runs in every step; `meets`: whether the ranks meet, every `every` steps and before a save."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Its tensors besides weights, gradients and the optimizer's state."""
        return ()


def meets(trainer: Trainer, every: int) -> bool:
    """Whether ranks that meet every `every` steps meet in this one; in the last, which is saved, they do."""
    return trainer.step % every == 0 or trainer.step == trainer.config.training.steps


def own_axes(dims: Dims) -> list[Axis]:
    """The user's dimensions of parallelism ([[wlb.dimensions]]) of more than one rank, on this one. The job's
    meshes must exist."""
    axes = []
    for one in dims.own:
        if one.runtime and one.degree > 1:
            axis = load(one.runtime)(one.config, dims.get_mesh(one.axis))
            axis.every = one.every
            axes.append(axis)
    return axes


def prepared(spec: ModelSpec, axes: list[Axis]) -> ModelSpec:
    """A model whose parts the axes prepare before these are parallelised. The axes may still come."""
    parallelize = spec.parallelize_fn

    def prepare_first(part: nn.Module, **arguments: Any) -> nn.Module:
        for axis in axes:
            axis.prepare(part)
        return parallelized(parallelize, part, **arguments)

    return dataclasses.replace(spec, parallelize_fn=prepare_first)
