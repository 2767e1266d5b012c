"""The meshes of ranks that attend to a micro-batch together, on their way into a model.

Every rank of a job takes part in making every process group, also one that it is not in: NCCL splits a
communicator of all ranks, and torch names groups by how many there were. So the meshes follow from the job
alone, and not from whether a pipeline stage has attention, or a data-parallel rank somebody to share with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.tools.utils import device_type

from wlb_titan.arrays import Ints
from wlb_titan.job import Job
from wlb_titan.runtime.attention.module import DocumentAttention
from wlb_titan.runtime.meshes import Dims, rank_layout

ContextMeshes = dict[int, list[DeviceMesh]]
"""The `meshes` of a strategy, by how many data-parallel ranks share a micro-batch."""


def context_meshes(job: Job, dims: Dims) -> ContextMeshes:
    """Those that this rank is in. Every rank of the job has to call it.

    Ranks that share micro-batches are consecutive data-parallel ranks, the first of which is a multiple of
    their number, with all of their context-parallel ranks. Those that are left over share none.
    """
    made: dict[tuple[object, bytes], DeviceMesh | None] = {}
    found: ContextMeshes = {}
    layout = rank_layout(dims)
    others, stages, data, context, tensor = layout.shape
    for sharers, merged in job.merged.items():
        if merged.strategy is None:
            continue
        shared = layout[:, :, : data // sharers * sharers]
        places = shared.reshape(others, stages, -1, sharers * context, tensor).swapaxes(3, 4)
        if sharers == 1:
            made[(("cp", context),), places.tobytes()] = dims.get_mesh("cp")
        for sizes in merged.strategy.meshes:
            key = tuple(sizes.items()), places.tobytes()
            if key not in made:
                made[key] = divided(places, sizes)
            if (mesh := made[key]) is not None:
                found.setdefault(sharers, []).append(mesh)
    return found


def divided(ranks: Ints, sizes: Mapping[str, int]) -> DeviceMesh | None:
    """This rank's mesh, where ranks are divided into meshes of one shape; None where it is not among them.

    Args:
        ranks: global ranks, those of a mesh in a row.
        sizes: of the mesh's axes, by name.
    """
    rows = torch.from_numpy(np.ascontiguousarray(ranks)).view(-1, *sizes.values())
    backends = (("fake", None), *[(None, None)] * len(sizes))  # between meshes nothing is sent
    mesh = DeviceMesh(device_type, rows, mesh_dim_names=("meshes", *sizes), backend_override=backends)
    return mesh[tuple(sizes)] if (rows == dist.get_rank()).any() else None


def prepare_attention(parts: Sequence[nn.Module], job: Job, meshes: ContextMeshes) -> None:
    """Gives the attention of a model's parts what moves its tensors."""
    attentions = [m for part in parts for m in part.modules() if isinstance(m, DocumentAttention)]
    for sharers, own in meshes.items():
        for attention in attentions:
            attention.share(sharers, job.merged[sharers].sharding, own)
