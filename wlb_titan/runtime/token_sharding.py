"""Activations as one long sequence over all ranks: data and context parallelism shard the same dimension.

torchtitan's DTensors of activations are (B, L, ...), sharded over data-parallel ranks in B and over context-
and tensor-parallel ranks in L. Every linear layer flattens the two dimensions into one, and DTensor, when B
and L are sharded both, searches for a way from each sharding that the product could have to each other one:
seconds for every length that is new, minutes with tensor parallelism besides (benchmarks/new_lengths.py).

A micro-batch is one packed sequence, so B is 1 on every rank anyway. Here B is 1 over all ranks too, and the
micro-batches of the data-parallel ranks lie side by side in L: mesh axes in the order dp, cp, tp shard one
dimension, as DTensor does by default, and there is nothing to search for. What a rank holds, computes and
sends is the same as before.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.protocols.model_spec import ModelSpec, ParallelizeFunction
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

TOKENS = 1
"""The dimension of L in (B, L, ...)."""


class TokenLayout(SpmdLayout):
    """A torchtitan layout whose data-parallel axes shard the tokens where they would shard the batch."""

    def per_axis_spmd_types(self) -> dict[MeshAxisName, spmd.PerMeshAxisSpmdType]:
        types = super().per_axis_spmd_types()
        if types.get(MeshAxisName.DP) == spmd.S(0):
            types[MeshAxisName.DP] = spmd.S(TOKENS)
        return types


def shard_tokens(spec: ModelSpec) -> ModelSpec:
    """The same model, with the activations of all its modules laid out as `TokenLayout` says."""
    return dataclasses.replace(spec, parallelize_fn=partial(_parallelize, spec.parallelize_fn))


def tokens_to_dtensor(dims: ParallelDims, *tensors: torch.Tensor) -> list[DTensor]:
    """This rank's tokens as part of the sequence over all ranks.

    Args:
        dims: of the job.
        tensors: (1, tokens of this rank), each.

    Returns:
        DTensors (1, tokens of all data- and context-parallel ranks); the same on tensor-parallel ranks.
    """
    mesh, _ = resolve_fsdp_mesh(dims)
    placements = _token_placements(mesh)
    return [DTensor.from_local(tensor, mesh, placements, run_check=False) for tensor in tensors]


def _token_placements(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Of tokens on a mesh of torchtitan's axes: sharded over all of more than one rank but tp."""
    names = mesh.mesh_dim_names or ()
    return tuple(
        Shard(TOKENS) if name != MeshAxisName.TP.value and mesh.size(i) > 1 else Replicate()
        for i, name in enumerate(names)
    )


def _parallelize(parallelize_fn: ParallelizeFunction, model: nn.Module, **arguments: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Module) and module._sharding_config is not None:
            module._sharding_config = _by_tokens(module._sharding_config)
    return parallelize_fn(model, **arguments)


def _by_tokens(config: ShardingConfig) -> ShardingConfig:
    """With all its layouts of activations replaced; those of parameters have no batch to shard."""
    local_map = config.local_map
    if local_map is not None:
        local_map = dataclasses.replace(local_map, in_grad_placements=_each(local_map.in_grad_placements))
    return dataclasses.replace(
        config,
        in_src_shardings=_each(config.in_src_shardings),
        in_dst_shardings=_each(config.in_dst_shardings),
        out_src_shardings=_each(config.out_src_shardings),
        out_dst_shardings=_each(config.out_dst_shardings),
        local_map=local_map,
    )


def token_layout(layout: SpmdLayout) -> TokenLayout:
    """The layout with data parallelism in the tokens."""
    return TokenLayout(layout.axis_types, layout.partition_spec)


def _each(layouts: Any) -> Any:
    """`token_layout` of a layout, or of those in a tuple or dict, of which some may be None."""
    if isinstance(layouts, dict):
        return {name: _each(layout) for name, layout in layouts.items()}
    if isinstance(layouts, tuple):
        return tuple(_each(layout) for layout in layouts)
    return None if layouts is None else token_layout(layouts)
