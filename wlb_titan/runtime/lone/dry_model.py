"""Stand-ins of a dry run for parts of a job: for its configuration, its model and its ops."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module

from wlb_titan.runtime.attention.kv_cache import KeyValueCache, attend, gradients
from wlb_titan.runtime.compat import unset_fake_temporarily
from wlb_titan.runtime.lone.memory_trace import MemoryTrace
from wlb_titan.runtime.lone.trainer import lone_config
from wlb_titan.runtime.trainer import Trainer


def dry_config(config: Trainer.Config, parallelised: Callable[[], Any]) -> Trainer.Config:
    """A job's configuration for a dry run.

    Args:
        parallelised: called when the model has been parallelised, before its parameters are allocated.
    """
    spec = config.model_spec
    assert spec is not None
    model = copy.deepcopy(spec.model)
    for _, module, _, _ in model.traverse(Module.Config, recurse=True):
        if module.param_init is not None:
            module.param_init = {name: _leave for name in module.param_init}
    _replace(model, RMSNorm.Config, FusedRMSNorm.Config)
    _replace(model, AllToAllTokenDispatcher.Config, EvenTokenDispatcher.Config)

    def then(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            parallelised()
            return result

        return call

    pipelined = config.parallelism.pipeline_parallel_degree > 1
    changed = "pipelining_fn" if pipelined else "parallelize_fn"
    return dataclasses.replace(
        lone_config(config),
        model_spec=dataclasses.replace(spec, model=model, **{changed: then(getattr(spec, changed))}),
        compile=dataclasses.replace(config.compile, enable=False),
    )


def _replace(model: Any, found: type, ours: type) -> None:
    """Puts a configuration of our class, with the same values, wherever the model has one of another."""
    for _, config, parent, name in model.traverse(found):
        assert parent is not None and isinstance(name, str)
        setattr(parent, name, ours(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}))


def _leave(parameter: torch.Tensor) -> None:
    """The initialisation of a parameter that has no values."""


class EvenTokenDispatcher(AllToAllTokenDispatcher):
    """Experts that get equally many tokens each: the router's choices have no values here."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(self, x_TD: torch.Tensor, scores_TK: torch.Tensor, *rest: torch.Tensor) -> Any:
        self._routed = scores_TK.numel()
        return super().dispatch(x_TD, scores_TK, *rest)

    def _sync_token_count_exchange(
        self, mine_E: torch.Tensor, theirs_EP_e: torch.Tensor, ep_size: int
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        each, more = divmod(self._routed, ep_size)
        splits = [each + (rank < more) for rank in range(ep_size)]
        return theirs_EP_e.reshape(-1), splits, [each] * ep_size


class FusedRMSNorm(RMSNorm):
    """An RMSNorm that allocates what CUDA's kernels do: the output and 1 / RMS of each row in float32."""

    @dataclasses.dataclass(kw_only=True, slots=True)
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
    """Attention of slices does in a dry run what its ops do, in place of what fake tensors know of them: the
    cache of keys and values is filled and emptied, with tensors that have no values.

    Args:
        cache: cache of the step; None where documents are not sliced.
        trace: gets the cache's tensors as a term of their own.
    """

    def __init__(self, cache: KeyValueCache | None, trace: MemoryTrace) -> None:
        super().__init__()
        self._cache, self._trace = cache, trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ops = torch.ops.wlb_titan
        of_slices = {ops.sliced_attention.default: attend, ops.sliced_attention_backward.default: gradients}
        if self._cache is None or func not in of_slices:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():  # in the mode the tensors that say which documents have no values
            result = of_slices[func](*args)
        self._trace.reassign(self._cache.tensors(), "cache")
        return result
