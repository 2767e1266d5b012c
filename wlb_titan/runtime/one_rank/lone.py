"""One rank of a job in one process, built as the job builds it: what dry runs and rehearsals share.

Model, stages, data and schedule are the job's own; the process group answers every collective at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from wlb_titan.memory.rank import GIB, TERMS
from wlb_titan.plan import Plan
from wlb_titan.runtime.compat import ranks_of_group
from wlb_titan.runtime.configured import parallel_dims
from wlb_titan.runtime.dataloader import Step
from wlb_titan.runtime.memory import planned_memory
from wlb_titan.runtime.meshes import meets
from wlb_titan.runtime.one_rank.dry_trace import local_tensor
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.step import meetings


class OneRankTrainer(Trainer):
    """The rank's trainer, without other processes: a step is `gradients` and `update`, without a report. What
    else writes files or asks other ranks is switched off."""

    def __init__(self, config: Trainer.Config, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        super().__init__(
            replace(
                config,
                checkpoint=replace(config.checkpoint, enable=False),
                metrics=replace(config.metrics, enable_tensorboard=False, enable_wandb=False),
                wlb=replace(config.wlb, validation=replace(config.wlb.validation, every=0)),
            )
        )

    def start_group(self) -> None:
        raise NotImplementedError

    def init_distributed(self) -> ParallelDims:
        # As torchtitan does when it starts a group: an accelerator's backward pass must recompute in the
        # thread that has the meshes, or tensors are not gathered there.
        torch.autograd.set_multithreading_enabled(False)
        self.start_group()
        dims = parallel_dims(self.config, self._world_size)
        self.set_up(dims)
        return dims

    def _steps(self, first: int) -> Iterator[Step]:
        """The planned steps from number `first` on; numbers start at 1."""
        steps = self.dataloader.steps(self.lower)
        for _ in range(first - 1):
            next(steps)
        return steps

    def _facts(self) -> dict[str, Any]:
        parameters = [p for part in self.model_parts for p in part.parameters()]
        meshes = self.parallel_dims.get_all_one_dimensional_meshes()
        axes = [one.axis for one in self.job.degrees.dimensions if one.axis in meshes]
        return {
            "rank": self._rank,
            "coordinates": {axis: meshes[axis].get_local_rank() for axis in axes if meshes[axis].size() > 1},
            "parameters": sum(p.numel() for p in parameters),
            "local_parameters": sum(local_tensor(p).numel() for p in parameters),
        }

    def _predicted(self, plan: Plan) -> dict[str, Any]:
        ranks = planned_memory(self.job, plan, self.parallel_dims.place("batch"))
        if ranks is None:
            return {"predicted_gib": None, "predicted": {}}
        memory = ranks[self.parallel_dims.place("pp")]
        terms = {term: getattr(memory, term) / GIB for term in TERMS if getattr(memory, term)}
        return {"predicted_gib": memory.total / GIB, "predicted": terms}

    def _collectives(self, calls: Iterable[tuple[str, str, int]]) -> list[dict[str, Any]]:
        """Collectives by kind and mesh axis, largest first; with predictions for dimensions that meet. A call
        is its kind, group, and bytes of the larger of input and output."""
        sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
        for kind, group, size in calls:
            sizes[kind, self._axes.get(group) or self._named_by_ranks(group)].append(size)
        timed = meetings(self.job, self.parallel_dims.place("pp"))
        met = [(dim.axis, meeting) for dim, meeting, _ in timed if meets(self, dim.every)]
        predicted = {axis: {"predicted_gib": meeting.bytes_ / GIB} for axis, meeting in met}
        entries = [
            {"kind": kind, "over": axis, "number": len(several), "gib": sum(several) / GIB}
            | predicted.get(axis, {})
            for (kind, axis), several in sizes.items()
        ]
        return sorted(entries, key=lambda entry: -entry["gib"])

    @cached_property
    def _axes(self) -> dict[str, str]:
        """Mesh axes by the names of their process groups; an axis may have groups in several meshes."""
        meshes = list(self.parallel_dims.get_all_one_dimensional_meshes().items())
        named = {mesh.get_group().group_name: axis for axis, mesh in meshes}
        parameters = (p for part in self.model_parts for p in part.parameters())
        of_weights = {p.device_mesh for p in parameters if isinstance(p, DTensor)}
        of_activations = (self.parallel_dims.spmd_dense_mesh(), self.parallel_dims.spmd_sparse_mesh())
        for mesh in (*of_weights, *(mesh for mesh in of_activations if mesh is not None)):
            for axis, group in zip(mesh.mesh_dim_names or (), mesh.get_all_groups(), strict=True):
                named[group.group_name] = axis
        return named

    def _named_by_ranks(self, group: str) -> str:
        ranks = ranks_of_group(group)
        return f"{'_'.join(self.job.degrees.grid.axes_of(ranks))}, {len(ranks)} ranks"
