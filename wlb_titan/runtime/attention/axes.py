"""Parts of the context-parallel mesh axis, for strategies that exchange within groups and between them.

Only the ranks that are in a process group make it, as pipeline stages may differ in whether they have a layer
that asks.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@cache  # every attention layer asks for it
def neighbours(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """This rank's group of `size` neighbours on the axis, of which the first is a multiple of it."""
    if size == mesh.size():
        return mesh
    ranks = dist.get_process_group_ranks(mesh.get_group())
    first = mesh.get_local_rank() // size * size
    group = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type)


@cache  # every attention layer asks for it
def two_axes(mesh: DeviceMesh, within: int) -> DeviceMesh:
    """The axis as two: `cp_between`, ranks of the same place in all groups of `within` neighbours, and
    `cp_within`, the ranks of one group."""
    ranks = torch.tensor(dist.get_process_group_ranks(mesh.get_group())).view(-1, within)
    row, column = divmod(mesh.get_local_rank(), within)
    groups = [
        dist.new_group(members.tolist(), use_local_synchronization=True)
        for members in (ranks[:, column], ranks[row])
    ]
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=ranks, mesh_dim_names=("cp_between", "cp_within")
    )
