"""The meshes of a job: torchtitan's, with the dimensions that a user adds ([[wlb.dimensions]]), and those of
ranks that attend to a micro-batch together.

Every rank takes part in making every process group, even one that it is not in: NCCL splits a communicator of
all ranks, and torch numbers groups. So meshes follow from the job alone, and not from whether a pipeline
stage has attention, or a data-parallel rank another to share with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from wlb_titan.arrays import Ints
from wlb_titan.dimensions.degrees import in_order
from wlb_titan.dimensions.dimension import TORCHTITAN, Dimension
from wlb_titan.job import Job
from wlb_titan.plugins import load


@dataclass
class Dims(ParallelDims):
    """torchtitan's degrees and meshes, with the user's dimensions. A mesh of torchtitan's lies at one place
    along these; only `batch` and `loss` span those that divide data."""

    own: tuple[Dimension, ...] = ()

    @property
    def data(self) -> int:
        """Ranks that run different micro-batches."""
        degree = math.prod(dim.degree for dim in self.own if dim.divides == "data")
        return self.dp_replicate * self.dp_shard * degree

    def place(self, axis: str) -> int:
        """This rank's place along a mesh axis; 0 if the axis has one rank."""
        mesh = self.get_optional_mesh(axis)
        return 0 if mesh is None else mesh.get_local_rank()

    def _validate(self) -> None:
        ranks = self.world_size
        self.world_size = ranks // math.prod(dim.degree for dim in self.own)
        super()._validate()
        self.world_size = ranks

    @property
    def dp_enabled(self) -> bool:
        return self.data > 1

    def build_mesh(self) -> DeviceMesh:
        return self.build_open_mesh() if self.own else super().build_mesh()

    def build_open_mesh(self) -> DeviceMesh:
        """torchtitan's `build_mesh` under `spmd_types`, after ranks are put in its order."""
        ranked = in_order([cls for cls in TORCHTITAN.values() if not cls.borrows], self.own)
        degrees = {cls.axis: getattr(self, cls.axis) for cls in TORCHTITAN.values()}
        degrees |= {dim.axis: dim.degree for dim in self.own}
        data = [dim.axis for dim in self.own if dim.divides == "data"]
        apart = [dim.axis for dim in self.own if dim.divides != "data"]
        names = [dim.axis for dim in ranked]
        wanted = [*apart, "pp", *data, "dp_replicate", "dp_shard", "cp", "tp"]
        ranks = np.arange(self.world_size).reshape([degrees[name] for name in names])
        ranks = ranks.transpose([names.index(name) for name in wanted])
        world = DeviceMesh(device_type, torch.from_numpy(ranks.ravel().copy()), mesh_dim_names=("world",))

        def view(*axes: str, **others: int) -> DeviceMesh:
            sizes = [others.get(axis) or degrees[axis] for axis in axes]
            pairs = zip(axes, sizes, strict=True)
            fake = {axis: "fake" for axis, size in pairs if not self._mesh_exist(axis, size)}
            return world._unflatten(0, tuple(sizes), axes, backend_override=fake)

        efsdp = self.dp_shard * self.cp * self.tp // self.ep
        loading = view(*apart, "pp", "batch", "cp", "tp", batch=self.data)
        dense = view(*wanted)
        replicas = self.dp_replicate * self.dp_shard
        passes = view(*apart, "pp", *data, "dp", "cp", "tp", dp=replicas)["dp", "cp", "tp"]
        sparse = view(*apart, "pp", *data, "dp_replicate", "efsdp", "ep", efsdp=efsdp)
        loss = loading["batch", "cp"]._flatten("loss_mesh")
        self._world_mesh = world
        self._global_meshes = {"dataloading": loading, "loss": loss, "dense": dense, "sparse": sparse}
        self._global_meshes["spmd_dense_for_fwdbwd"] = passes
        if self.ep > 1:
            self._global_meshes["spmd_sparse_for_fwdbwd"] = sparse["dp_replicate", "efsdp", "ep"]
        self._single_axis_meshes = {
            **{axis: loading[axis] for axis in ("pp", "batch", "cp", "tp")},
            **{axis: dense[axis] for axis in ("dp_replicate", "dp_shard", *apart, *data)},
            **{axis: sparse[axis] for axis in ("ep", "efsdp")},
            "dp": passes["dp"],
            "loss": loss,
        }
        candidates = (["dp", "cp", "tp"], ["dp_replicate", "efsdp", "ep"])
        meshes = (self.get_activated_mesh(axes) for axes in candidates)
        self._spmd_meshes = [mesh for mesh in meshes if mesh is not None]
        return world


ContextMeshes = dict[int, list[DeviceMesh]]
"""A strategy's `meshes`, by the number of data-parallel ranks that share a micro-batch."""


Made = dict[tuple[object, bytes], DeviceMesh | None]
"""Meshes by their names and sizes, and the ranks that they divide."""


def context_meshes(job: Job, dims: Dims, made: Made) -> ContextMeshes:
    """The context meshes that this rank is in; `made` has those of other jobs on the same ranks, and gets
    these. Every rank of the job has to call it.

    n data-parallel ranks that share micro-batches are consecutive, with all their context-parallel ranks; the
    first is a multiple of n. Ranks that are left over share none.
    """
    meshes: ContextMeshes = {}
    ranks = dims._global_meshes["dataloading"].mesh.numpy()
    layout = ranks.reshape(-1, *ranks.shape[-4:])
    others, stages, data, context, tensor = layout.shape  # `others` is 1 without dimensions of one's own
    for sharers, merged in job.by_sharers.items():
        if merged.strategy is None:
            continue
        shared = layout[:, :, : data // sharers * sharers]
        places = shared.reshape(others, stages, -1, sharers * context, tensor).swapaxes(3, 4)
        if sharers == 1:
            made[(("cp", context),), places.tobytes()] = dims.get_mesh("cp")
        for sizes in merged.strategy.meshes:
            key = tuple(sizes.items()), places.tobytes()
            if key not in made:
                made[key] = submesh(places, sizes)
            if (mesh := made[key]) is not None:
                meshes.setdefault(sharers, []).append(mesh)
    return meshes


def submesh(ranks: Ints, sizes: Mapping[str, int]) -> DeviceMesh | None:
    """Divides ranks, consecutive in a mesh, into meshes of these sizes; returns this rank's or None."""
    rows = torch.from_numpy(np.ascontiguousarray(ranks)).view(-1, *sizes.values())
    backends = (("fake", None), *[(None, None)] * len(sizes))  # between meshes nothing is sent
    mesh = DeviceMesh(device_type, rows, mesh_dim_names=("meshes", *sizes), backend_override=backends)
    return mesh[tuple(sizes)] if (rows == dist.get_rank()).any() else None


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
    for dim in dims.own:
        if dim.runtime and dim.degree > 1:
            axis = load(dim.runtime)(dim.config, dims.get_mesh(dim.axis))
            axis.every = dim.every
            axes.append(axis)
    return axes
