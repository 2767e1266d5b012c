"""What torchtitan loses of a part's weights when it divides and wraps them, put right.

- Under `spmd_types` it makes each weight anew, and frozen ones would train (LoRA).
- All ranks draw from one seed. DTensor shifts the generator by shard on accelerators only: on a CPU, ranks
  would draw the same numbers for different shards. There every rank draws a weight whole, seeded by its name,
  and keeps its own shard, so runs of one seed begin alike on all degrees.
- Optimizers look for the patterns of groups in the names of wrapped layers, and a checkpoint brings settings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import device_type

from wlb_titan.runtime.meshes import Axis, Dims
from wlb_titan.runtime.models.checkpointing import count_once


def parallelized(
    parallelize: Callable[..., nn.Module],
    axes: Sequence[Axis],
    part: nn.Module,
    *,
    parallel_dims: Dims,
    **arguments: Any,
) -> nn.Module:
    """The part as the axes prepare it and `parallelize` divides it; its weights are still on the meta
    device."""
    for axis in axes:
        axis.prepare(part)
    modules = dict(part.named_modules())
    frozen = [
        (module, name)
        for module in modules.values()
        for name, weight in module.named_parameters(recurse=False)
        if not weight.requires_grad
    ]
    count_once(part)
    part = parallelize(part, parallel_dims=parallel_dims, **arguments)
    for module, name in frozen:
        getattr(module, name).requires_grad_(False)
    if device_type == "cpu":
        seed = torch.initial_seed() - parallel_dims.place("pp")  # torchtitan adds it to the job's
        for path, module in modules.items():
            if isinstance(module, Module) and module._param_init is not None:
                module._param_init = {
                    name: partial(draw, initialize, f"{seed} {path}.{name}")
                    for name, initialize in module._param_init.items()
                }
    return part


def draw(initialize: Callable[[torch.Tensor], object], seed: str, weight: torch.Tensor) -> None:
    """Initialises a weight, or this rank's shard of it, as part of the whole."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(seed).getrandbits(63))
        if not isinstance(weight, DTensor) or initialize is skip_param_init:
            initialize(weight)
            return
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        initialize(whole)
    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))


def build_optimizers(config: OptimizersContainer.Config, model_parts: list[nn.Module]) -> OptimizersContainer:
    """With the settings of the configuration, whatever wraps layers and whatever a checkpoint has."""
    optimizers = config.build(model_parts=[Unwrapped(part) for part in model_parts])
    for optimizer in optimizers:
        optimizer.register_load_state_dict_pre_hook(with_own_settings)
    return optimizers


class Unwrapped:
    """A part of the model whose parameters have the names that they have in a checkpoint."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._part.named_parameters(*arguments, **keywords):
            yield canonical_fqn(name), parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def with_own_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [{**own, "params": saved["params"]} for own, saved in groups]}
