"""Activation checkpointing of a transformer block with our attention; `layers/recompute.py` has the kinds.

torchtitan applies a class of its own protocol to every block. Ours are kinds by themselves, and `AsNeededAC`.
Under all of them experts count each token once, which their balance follows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.components.quantization import Float8Linear
from torchtitan.distributed import activation_checkpoint as titan
from torchtitan.protocols.model_spec import ModelSpec

import wlb_titan.runtime.attention.kv_cache  # noqa: F401 - registers the ops named below
from wlb_titan.runtime.attention.module import DocumentMask, attentions
from wlb_titan.runtime.compat import (
    ActivationWrapper,
    checkpoint_wrapper,
    in_backward_pass,
)

NEVER_KEPT = ("feed_forward.w2", "shared_experts.w2")
"""Linear layers whose output no backward pass needs, as it is added to the residual. It is as wide as the
model, under tensor parallelism on every rank, before it is reduced."""

INNER = "_checkpoint_wrapped_module"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.linear.default)
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


class SelectiveDocumentAC(titan.SelectiveAC):
    """torchtitan's SelectiveAC, which also keeps document attention's output, and never w2's.

    torchtitan keeps the output of every second matrix product, and so w2's: the fifth of a layer with fused
    QKV, the seventh of others. The forward pass is repeated only up to w2's input. torchao saves an input
    after the product, so in float8 w2's output is kept, too, unless tensor parallelism makes it too wide.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.SelectiveAC.Config):
        pass

    kind: ClassVar[str] = "selective"

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        names = [*config.force_recompute_mm_shapes_by_fqns, *NEVER_KEPT]
        super().__init__(replace(config, force_recompute_mm_shapes_by_fqns=names), dump_folder)

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {
            torch.ops.wlb_titan.varlen_attention.default,
            torch.ops.wlb_titan.sliced_attention.default,
        }

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        mine = copy.copy(self)
        mine.config = self._of(module)
        wrapped = super(SelectiveDocumentAC, mine)._wrap_block(module, base_fqn=base_fqn)
        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, early_stop=True)
        return wrapped

    def _of(self, block: nn.Module) -> SelectiveDocumentAC.Config:
        """The configuration with the linear layers of this block whose outputs are not kept."""
        fast = {n: m for n, m in block.named_modules() if isinstance(m, Float8Linear or ())}  # or no torchao
        kept = [n for n in NEVER_KEPT if n in fast and fast[n].weight.shape[1] == fast[n].in_features]
        never = [name for name in self.config.force_recompute_mm_shapes_by_fqns if name not in kept]
        return replace(self.config, force_recompute_mm_shapes_by_fqns=never)


class KeysAC(SelectiveDocumentAC):
    """Keeps the outputs of all matrix products, and keys and values as context-parallel ranks gather them;
    repeats element-wise operators and what tensor parallelism gathers.

    Of the products w2's are not kept, nor wo's under tensor parallelism, where both are as wide as the model
    before they are reduced.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveDocumentAC.Config):
        pass

    kind = "keys"

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        keeps = _policy(module, self.get_save_ops(), self._of(module).force_recompute_mm_shapes_by_fqns)
        return checkpoint_wrapper(
            module,
            # Dynamo looks into the arguments of a `partial`, and stops at some of the ops.
            context_fn=lambda: create_selective_checkpoint_contexts(keeps),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=True,
            debug=self.config.debug,
        )


def _policy(block: nn.Module, kept: set[Any], never: list[str]) -> Callable[..., CheckpointPolicy]:
    """What `KeysAC` keeps of a block: the results of the ops `kept`, but for linear layers named `never`."""
    linear = {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
    divided = [name for name, layer in linear.items() if layer.weight.shape[1] < layer.in_features]
    wide = [*never, *(name for name in divided if name.endswith("attention.wo"))]
    shapes = {tuple(linear[name].weight.shape) for name in linear if any(part in name for part in wide)}
    kept_ones = [layer for name, layer in linear.items() if not any(part in name for part in wide)]
    alike = [layer for layer in kept_ones if tuple(layer.weight.shape) in shapes]
    sharing = attentions([block])

    def keeps(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in PRODUCTS:
            weight = args[1].shape if op is PRODUCTS[1] else args[1].shape[::-1]
            keep = tuple(weight) not in shapes or any(_same(args[1], layer.weight) for layer in alike)
        elif op is GATHER:
            keep = any(args[2] in attention.groups for attention in sharing)
        elif op is torch.ops.aten._to_copy.default:  # to the host, for which the host would wait again
            keep = kwargs.get("device") == torch.device("cpu") != args[0].device
        else:  # experts' products keep w2's, too: the gradient of a token's scores needs its outputs
            keep = op in kept or op is torch.ops.aten._grouped_mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return keeps


def _same(weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same memory, transposed or not; casts have their own."""
    return StorageWeakRef(weight.untyped_storage()) == StorageWeakRef(other.untyped_storage())


class AsNeededAC(SelectiveDocumentAC):
    """Recomputes what a device has no room for: the planner names a kind for each layer and micro-batch.
    Where it does not know the memory, all layers are `selective`."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveDocumentAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str) -> nn.Module:
        shared, calls = dataclasses.asdict(self.config), {}
        for kind, cls in {"keys": KeysAC, "selective": SelectiveDocumentAC, "full": titan.FullAC}.items():
            settings = {field.name: shared[field.name] for field in dataclasses.fields(cls.Config)}
            wrapped = cls.Config(**settings).build()._wrap_block(module, base_fqn=base_fqn)
            calls[kind] = wrapped.checkpoint_fn
        return AsNeededBlock(module, int(base_fqn.rpartition(".")[2]), calls)


def mixable(other: titan.ActivationCheckpointing.Config | None) -> AsNeededAC.Config:
    """`AsNeededAC` with the settings of another class, as far as that has them."""
    shares = isinstance(other, titan.SelectiveAC.Config)
    shared = dataclasses.fields(titan.SelectiveAC.Config) if shares else ()
    return AsNeededAC.Config(**{field.name: getattr(other, field.name) for field in shared})


class AsNeededBlock(ActivationWrapper):
    """A block of which each call keeps what the micro-batch names for the layer.

    `__call__` is not compiled: compiled code sees the layer's kind, as a constant, and neither its number nor
    the others. So there is a graph for each kind, which all layers share.
    """

    def __init__(self, block: nn.Module, number: int, calls: dict[str, Callable[..., Any]]) -> None:
        super().__init__(block)
        self._number, self._calls = number, calls

    def __call__(self, hidden: torch.Tensor, mask: DocumentMask, *rest: Any, **kwargs: Any) -> Any:
        if mask.kinds:
            mask = replace(mask, kinds=(), kind=mask.kinds[self._number])
        return super().__call__(hidden, mask, *rest, **kwargs)

    def forward(self, hidden: torch.Tensor, mask: DocumentMask, *rest: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if mask.kind == "none":
            return block(hidden, mask, *rest, **kwargs)
        return self._calls[mask.kind](block, hidden, mask, *rest, **kwargs)


def count_once(part: nn.Module) -> None:
    """Has experts count their tokens as a layer runs, and not again as it is recomputed. Compiled code does
    so by itself."""
    for block in part.get_submodule("layers").children():
        if getattr(block, "moe_enabled", False):
            block.moe.register_forward_pre_hook(partial(_count, block))


def _count(block: nn.Module, moe: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        moe.training = block.training and not in_backward_pass()  # it counts in training alone


def counted_once(spec: ModelSpec) -> ModelSpec:
    """A model whose experts are balanced by layers without wrappers, as torchtitan halves the counts of
    wrapped ones."""
    if spec.post_optimizer_build_fn is not register_moe_load_balancing_hook:
        return spec
    return replace(spec, post_optimizer_build_fn=balance_experts)


def balance_experts(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    layers = [{n: getattr(b, INNER, b) for n, b in part.layers.items()} for part in model_parts]
    bare = [nn.ModuleDict({"layers": nn.ModuleDict(one)}) for one in layers]
    register_moe_load_balancing_hook(optimizers, bare, parallel_dims)
