"""The half of a dimension of parallelism that moves tensors; its class names it as `runtime`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from wlb_titan.plugins import load
from wlb_titan.runtime.meshes import Dims


class Axis:
    """A dimension on one rank."""

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


class OwnAxes:
    """The user's dimensions of parallelism ([[wlb.dimensions]]) on this rank."""

    def __init__(self) -> None:
        self._axes: list[tuple[int, Axis]] = []  # with the steps between their meetings

    def make(self, dims: Dims) -> None:
        """Makes the axes of more than one rank; the job's meshes must exist."""
        self._axes = [
            (one.every, load(one.runtime)(one.config, dims.get_mesh(one.axis)))
            for one in dims.own
            if one.runtime and one.degree > 1
        ]

    def prepared(self, spec: ModelSpec) -> ModelSpec:
        """A model whose parts the axes prepare before these are parallelised."""
        parallelize = spec.parallelize_fn

        def prepare_first(part: nn.Module, **arguments: Any) -> nn.Module:
            for _, axis in self._axes:
                axis.prepare(part)
            return parallelize(part, **arguments)

        return dataclasses.replace(spec, parallelize_fn=prepare_first)

    def before_optimizer(self, trainer: Trainer) -> None:
        for _, axis in self._axes:
            axis.before_optimizer(trainer)

    def after_optimizer(self, trainer: Trainer) -> None:
        for every, axis in self._axes:
            axis.after_optimizer(trainer, meets=meets(trainer, every))

    def stop(self, trainer: Trainer) -> None:
        """Has ranks that did not meet in this step meet now: the run ends before its last step."""
        for every, axis in self._axes:
            axis.after_optimizer(trainer, meets=not meets(trainer, every))

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, axis in self._axes:
            yield from axis.tensors()
