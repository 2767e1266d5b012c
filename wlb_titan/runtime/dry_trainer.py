"""The trainer of a dry run: one rank, fake tensors, a fake process group, one step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from wlb_titan.errors import UserError
from wlb_titan.memory.peak import GIB, TERMS
from wlb_titan.plan import Action, Plan
from wlb_titan.runtime.compat import (
    DataDependentOutputException,
    FakeTensorMode,
    ranks_of_group,
    unset_fake_temporarily,
)
from wlb_titan.runtime.dataloader import Step
from wlb_titan.runtime.dry_model import AttentionOfSlices, dry_config
from wlb_titan.runtime.inputs import Item
from wlb_titan.runtime.memory import planned_memory
from wlb_titan.runtime.memory_trace import MemoryTrace, local_tensor
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.passes import travelling


class DryTrainer(Trainer):
    """One rank of a job, built as the job builds it, on tensors without memory.

    The model is made on the meta device and parallelised as ever; what comes after is done in a fake mode:
    the parameters' allocation, the optimizer, the step.

    Args:
        config: of the job. Compilation, checkpoints and files are switched off in a copy.
        rank: global rank.
        world_size: processes of the job.
        device_bytes: memory of a GPU, which bounds plans; None is that of the configured cluster.
    """

    def __init__(
        self, config: Trainer.Config, *, rank: int, world_size: int, device_bytes: float | None = None
    ) -> None:
        self._rank, self._world_size, self._device_bytes = rank, world_size, device_bytes
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._trace = MemoryTrace(self._fake)
        self._passes, self._passes_peak = self._trace.peak, 0
        with ExitStack() as stack:
            super().__init__(dry_config(config, lambda: stack.enter_context(self._fake)))

    def init_distributed(self) -> ParallelDims:
        """A process group that answers at once, and the meshes of the whole job."""
        dist_utils.init_fake_mode(self._world_size, rank=self._rank)
        dims = ParallelDims.from_config(self.config.parallelism, self._world_size)
        dims.build_mesh()
        if self._device_bytes is not None:
            self.job = self.job.on(replace(self.job.cluster, memory=self._device_bytes))
        self._set_up_job(self.config)
        return dims

    def run(self, step: int) -> dict[str, Any]:
        """Runs one step of the plan.

        Args:
            step: from 1; the plans before it are made and left out.

        Returns:
            What `wlb-titan dryrun --output` writes of a rank; see docs/dryrun.md.

        Raises:
            UserError: the step needs more than shapes.
        """
        begin = time.perf_counter()
        planned = self._planned_step(step)
        mesh = self.parallel_dims.get_optional_mesh("batch")
        replica = 0 if mesh is None else mesh.get_local_rank()
        mine = planned.plan.of_rank(replica)
        lengths = [m.length for m in mine]
        parameters = [p for part in self.model_parts for p in part.parameters()]
        buffers = [b for part in self.model_parts for b in part.buffers()]
        trace = self._trace = MemoryTrace(self._fake, _weight_shapes(parameters))
        for term, tensors in (("weights", parameters), ("rotary", buffers)):
            for tensor in tensors:
                trace.add(tensor, term)
        with trace:
            trace.begin()
            try:
                self.train_step(iter([planned]))
            except DataDependentOutputException as error:
                raise UserError(
                    "The model was built and parallelised without an error, but its step depends on values "
                    f"of tensors, and a dry run has only their shapes: {error}."
                ) from error
        passes = self._passes
        states = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        trace.reassign(states, "optimizer")
        # The optimizer's state is made in its first step and is there in all passes of the next.
        optimizer = trace.now().terms.get("optimizer", 0)
        passes.terms["optimizer"] = optimizer
        return {
            "rank": self._rank,
            "coordinates": self._coordinates(),
            "lengths": lengths,
            "travelling": [list(travelling(m, self.job.merged[m.sharers])) for m in mine],
            "parameters": sum(p.numel() for p in parameters),
            "local_parameters": sum(local_tensor(p).numel() for p in parameters),
            "traced_gib": max(self._passes_peak + optimizer, trace.highest) / GIB,
            "traced": {term: size / GIB for term, size in passes.terms.items()},
            "largest": [
                {"gib": size / GIB, "tensors": number, "what": what} for size, number, what in passes.largest
            ],
            **self._predicted(planned.plan, replica),
            "collectives": self._collectives(trace),
            "seconds": time.perf_counter() - begin,
        }

    def _predicted(self, plan: Plan, replica: int) -> dict[str, Any]:
        ranks = planned_memory(self.job, plan, replica)
        if ranks is None:
            return {"predicted_gib": None, "predicted": {}}
        mine = ranks[self._coordinates().get("pp", 0)]
        terms = {term: getattr(mine, term) / GIB for term in TERMS if getattr(mine, term)}
        return {"predicted_gib": mine.total / GIB, "predicted": terms}

    def _coordinates(self) -> dict[str, int]:
        """This rank's place on each mesh axis that has more than one rank."""
        meshes = self.parallel_dims.get_all_one_dimensional_meshes()
        axes = [axis for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if axis in meshes]
        return {axis: meshes[axis].get_local_rank() for axis in axes if meshes[axis].size() > 1}

    def _collectives(self, trace: MemoryTrace) -> list[dict[str, Any]]:
        """Number and GiB of the step's collectives by kind and mesh axis, the largest first."""
        names = self._group_names()
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for (kind, group), (number, size) in trace.collectives.items():
            key = kind, names.get(group) or self._named_by_ranks(group)
            before = found.get(key, (0, 0))
            found[key] = (before[0] + number, before[1] + size)
        return [
            {"kind": kind, "over": axis, "number": number, "gib": size / GIB}
            for (kind, axis), (number, size) in sorted(found.items(), key=lambda entry: -entry[1][1])
        ]

    def _group_names(self) -> dict[str, str]:
        """Mesh axes by the names of their process groups; an axis has a group in each of several meshes."""
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
        """The axes along which a group's ranks lie, and how many they are."""
        ranks = ranks_of_group(group)
        dims = self.parallel_dims
        axes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard}
        axes |= {"cp": dims.cp, "tp": dims.tp}
        places = np.unravel_index(ranks, tuple(axes.values()))
        along = [axis for axis, place in zip(axes, places, strict=True) if len(set(place.tolist())) > 1]
        return f"{'_'.join(along)}, {len(ranks)} ranks"

    def _prepare_merging(self) -> None:
        with unset_fake_temporarily():  # meshes are made from the values of tensors
            super()._prepare_merging()

    def _log(self, *arguments: Any) -> None:
        """What is logged has no values here."""

    def _planned_step(self, step: int) -> Step:
        steps = iter(self.planned)
        for _ in range(step - 1):
            next(steps)
        return next(steps)

    def _forward_backward(self, group: list[Item], labels: torch.Tensor) -> torch.Tensor:
        with self._traced_passes():
            return super()._forward_backward(group, labels)

    def _run_alone(self, items: list[Item], actions: Sequence[Action], labels: torch.Tensor) -> torch.Tensor:
        with self._traced_passes():
            return super()._run_alone(items, actions, labels)

    @contextmanager
    def _traced_passes(self) -> Iterator[None]:
        """The passes, in the fake mode, which the optimizer has to do without: in an active one DTensor would
        work out shapes on tensors of the rank's own mode, and the trace would count them.

        Their peak is kept, and another one begins behind them.
        """
        with self._fake, AttentionOfSlices(self._cache, self._trace):
            yield
        if self._trace.highest > self._passes_peak:
            self._passes, self._passes_peak = self._trace.peak, self._trace.highest
        gradients = (p.grad for part in self.model_parts for p in part.parameters() if p.grad is not None)
        self._trace.reassign(gradients, "gradients")
        self._trace.begin()


def _weight_shapes(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """Shapes of the whole weights that tensor parallelism leaves a rank."""
    for parameter in parameters:
        shape = list(parameter.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
                if axis in ("tp", "ep") and isinstance(placement, Shard):
                    shape[placement.dim] //= mesh[axis].size()
        if len(shape) > 1:
            yield tuple(shape)
