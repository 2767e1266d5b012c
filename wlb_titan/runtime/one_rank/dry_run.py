"""One rank of a job on fake tensors, through one planned step.

Model, schedule, passes, clipping and optimizer are the job's own; docs/dryrun.md says what differs on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module

from wlb_titan.errors import UserError
from wlb_titan.memory.rank import GIB
from wlb_titan.packing.predicted import figures_of
from wlb_titan.runtime.attention.kv_cache import KeyValueCache, attend, gradients
from wlb_titan.runtime.compat import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from wlb_titan.runtime.configured import job_of, parallel_dims
from wlb_titan.runtime.dataloader import Item
from wlb_titan.runtime.one_rank.dry_trace import CallLog, Trace
from wlb_titan.runtime.one_rank.lone import OneRankTrainer
from wlb_titan.runtime.trainer import Trainer


class DryTrainer(OneRankTrainer):
    """One rank of a job, made and parallelised on the meta device, then run in a fake mode.

    Args:
        step: number in the plan, from 1; the steps before it are planned but not run.
        device_bytes: memory of a GPU, which bounds plans; None for the configured cluster's.
    """

    def __init__(
        self,
        config: Trainer.Config,
        *,
        rank: int,
        world_size: int,
        step: int = 1,
        device_bytes: float | None = None,
    ) -> None:
        self._number = step
        # Of the layers as they are, by which their account is known, and not of their stand-ins.
        self._job = job_of(config, parallel_dims(config, world_size))
        if device_bytes is not None:
            self._job = self._job.on(replace(self._job.cluster, kind="gpu", memory=device_bytes))
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with ExitStack() as stack:
            changed = dry_config(config, lambda: stack.enter_context(self._fake))
            super().__init__(changed, rank=rank, world_size=world_size)

    def start_group(self) -> None:
        dist_utils.init_fake_mode(self._world_size, rank=self._rank)
        spmd.set_dist(dist)  # a fake group exchanges lists of tensors as NCCL does, without copies
        self.job = self._job

    def run(self) -> dict[str, Any]:
        """What `wlb-titan dryrun --output` writes about a rank after its step (docs/dryrun.md)."""
        begin = time.perf_counter()
        planned, self.step = next(self._steps(self._number)), self._number
        mine = planned.plan.of_rank(self.parallel_dims.place("batch"))
        parameters = [p for part in self.model_parts for p in part.parameters()]
        buffers = [b for part in self.model_parts for b in part.buffers()]
        calls = CallLog(lambda: self.timer.latest)
        shapes = [shape for shape in map(gathered_shape, parameters) if len(shape) > 1]
        trace = self._trace = Trace(self._fake, shapes, calls)
        self._passes, self._passes_peak = trace.peak, 0
        for term, tensors in (("weights", parameters), ("rotary", buffers)):
            for tensor in tensors:
                trace.add(tensor, term)
        with trace:
            trace.begin()
            try:
                self.gradients(planned)
                self.update()
            except DataDependentOutputException as error:
                raise UserError(
                    "The model was built and parallelised without an error, but its step depends on values "
                    f"of tensors, and a dry run has only their shapes: {error}."
                ) from error
        trace.reassign([optimizer.state for optimizer in self.optimizers], "optimizer")
        trace.reassign([[*axis.tensors()] for axis in self.axes], "dimensions")
        # What the first step makes after its passes is there in all passes of the next.
        alive = trace.now().terms
        beside = {term: alive[term] for term in ("optimizer", "dimensions") if alive.get(term)}
        traced = self._passes.terms | beside
        asked = [(call.kind, group, max(call.sent, call.received)) for group, call in calls.calls]
        return {
            **self._facts(),
            "lengths": [m.length for m in mine],
            "travelling": [list(figures_of([m], self.job.by_sharers[m.sharers])[0].travelling) for m in mine],
            "traced_gib": max(self._passes_peak + sum(beside.values()), trace.highest) / GIB,
            "traced": {term: size / GIB for term, size in traced.items()},
            "largest": [
                {"gib": size / GIB, "tensors": number, "what": what}
                for size, number, what in self._passes.largest
            ],
            **self._predicted(planned.plan),
            "collectives": self._collectives(asked),
            "calls": vars(calls.of_rank()),
            "seconds": time.perf_counter() - begin,
        }

    def forward_backward(
        self, group: Sequence[Item], labels: torch.Tensor, cache: KeyValueCache | None = None, *order: Any
    ) -> torch.Tensor:
        """Runs passes in the fake mode and keeps their peak. The optimizer runs outside it: inside, DTensor
        would work out shapes on tensors of the rank's own mode, and the trace would count them."""
        with self._fake, AttentionOfSlices(cache, self._trace):
            loss = super().forward_backward(group, labels, cache, *order)
        if self._trace.highest > self._passes_peak:
            self._passes, self._passes_peak = self._trace.peak, self._trace.highest
        self._trace.reassign([p.grad for part in self.model_parts for p in part.parameters()], "gradients")
        self._trace.begin()
        return loss


def gathered_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight as FSDP gathers it: divided by tensor and expert parallelism only."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if axis in ("tp", "ep") and isinstance(placement, Shard):
                shape[placement.dim] //= mesh[axis].size()
    return tuple(shape)


def dry_config(config: Trainer.Config, parallelised: Callable[[], Any]) -> Trainer.Config:
    """A job's configuration with stand-ins for what needs values, or takes other memory on a CPU."""
    spec = config.model_spec
    model = copy.deepcopy(spec.model)
    for _, module, _, _ in model.traverse(Module.Config, recurse=True):
        if module.param_init is not None:
            module.param_init = dict.fromkeys(module.param_init, skip_param_init)
    _replace(model, RMSNorm.Config, FusedRMSNorm.Config)
    _replace(model, AllToAllTokenDispatcher.Config, EvenTokenDispatcher.Config)
    for _, router, _, _ in model.traverse(TokenChoiceTopKRouter.Config):
        _replace(router, Linear.Config, Float32Linear.Config)
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    changed = "pipelining_fn" if pipelined else "parallelize_fn"
    parallelise = getattr(spec, changed)

    def then(*args: Any, **kwargs: Any) -> Any:
        result = parallelise(*args, **kwargs)
        parallelised()
        return result

    return replace(
        config,
        model_spec=replace(spec, model=model, **{changed: then}),
        compile=replace(config.compile, enable=False),
    )


def _replace(model: Any, found: type, ours: type) -> None:
    """Replaces the model's configurations of class `found`, or derived from it, by those of `ours`, with the
    values that these have."""
    for _, config, parent, name in model.traverse(found):
        setattr(parent, name, ours(**{f.name: getattr(config, f.name) for f in dataclasses.fields(ours)}))


class EvenTokenDispatcher(AllToAllTokenDispatcher):
    """Gives all experts equally many tokens: the router's choices have no values here."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    share = 1.0  # of the routed tokens that come to this rank's experts, over an equal one

    def dispatch(self, x_TD: torch.Tensor, scores_TK: torch.Tensor, *rest: torch.Tensor) -> Any:
        self._routed = scores_TK.numel()
        return super().dispatch(x_TD, scores_TK, *rest)

    def _sync_token_count_exchange(
        self, mine_E: torch.Tensor, theirs_EP_e: torch.Tensor, ep_size: int
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        each, more = divmod(self._routed, ep_size)
        splits = [each + (rank < more) for rank in range(ep_size)]
        return theirs_EP_e.reshape(-1), splits, [int(each * self.share)] * ep_size


class Float32Linear(Linear):
    """A router's gate as CUDA's autocast computes it, in float32, which that of CPUs does not know."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)


class FusedRMSNorm(RMSNorm):
    """Allocates what CUDA's kernels do: the output and 1 / RMS of each row in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FusedRMSNorm.apply(x, self.weight)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class AttentionOfSlices(TorchDispatchMode):
    """Has sliced attention fill and empty the cache of keys and values, which its fake ops would not do."""

    def __init__(self, cache: KeyValueCache | None, trace: Trace) -> None:
        super().__init__()
        self._cache, self._trace = cache, trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ops = torch.ops.wlb_titan
        of_slices = {ops.sliced_attention.default: attend, ops.sliced_attention_backward.default: gradients}
        if self._cache is None or func not in of_slices:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():  # the tensors that say which documents need values
            result = of_slices[func](*args)
        self._trace.reassign([*self._cache.tensors()], "cache")
        return result
