"""torch.compile and activation checkpointing of a transformer block that has our attention.

torchtitan compiles each transformer block: the first length as a constant, the second with symbols for
whatever changed, and that graph serves every further length. The documents of a micro-batch are one tensor
whose number of rows is a symbol from the start. `prepare_compiling` says which other graphs there are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch.fx import Graph
from torchtitan.distributed import activation_checkpoint as titan

import wlb_titan.runtime.attention.kv_cache  # noqa: F401 - registers the ops named below
from wlb_titan.job import Job
from wlb_titan.runtime.compat import CustomGraphPass, get_custom_graph_passes, mark_unbacked

NEVER_KEPT = ("feed_forward.w2", "shared_experts.w2")
"""Linear layers whose output no backward pass needs, as it is added to the residual. It is as wide as the
model, under tensor parallelism on every rank, before it is reduced."""


class SelectiveDocumentAC(titan.SelectiveAC):
    """torchtitan's SelectiveAC, which also keeps document attention's output, and never w2's.

    torchtitan keeps the output of every second matrix product, and so w2's: the fifth of a layer with fused
    QKV, the seventh of others. The forward pass is repeated only up to w2's input.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.SelectiveAC.Config):
        pass

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        names = [*config.force_recompute_mm_shapes_by_fqns, *NEVER_KEPT]
        super().__init__(dataclasses.replace(config, force_recompute_mm_shapes_by_fqns=names), dump_folder)

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {
            torch.ops.wlb_titan.varlen_attention.default,
            torch.ops.wlb_titan.sliced_attention.default,
        }

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        wrapped = super()._wrap_block(module, base_fqn=base_fqn)
        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, early_stop=True)
        return wrapped


def prepare_compiling(job: Job) -> None:
    """Raises torch's limit of graphs to one for each set of collectives: a micro-batch uses only those that
    gather keys for its documents."""
    graphs = sum(2 ** (1 + len(shared.exchanging.moves)) for shared in job.by_sharers.values())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)
    keep_inputs()


def documents_vary(segments: torch.Tensor) -> torch.Tensor:
    """Marks a tensor (S, 4): S is a variable in compiled code, even if it is 1."""
    mark_unbacked(segments, 0)
    return segments


class KeepInputs(CustomGraphPass):
    """Removes the tags that have a block's inputs recomputed in the backward pass.

    Inductor replaces x / 1 by x, which then has the division's tag. If x is a parameter, nothing computes it,
    and torch's partition fails: "AssertionError: Node add_21 was invalid, but is output". gpt-oss would not
    compile under full checkpointing: it divides a bias by the tensor-parallel degree.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            node.meta.pop("recompute", None)

    def uuid(self) -> str:
        return "wlb_titan.KeepInputs.1"


def keep_inputs() -> None:
    """Has Inductor run `KeepInputs`, after any other passes that are set."""
    passes = get_custom_graph_passes(torch._inductor.config.joint_custom_post_pass)
    if not any(isinstance(one, KeepInputs) for one in passes):
        torch._inductor.config.joint_custom_post_pass = [*passes, KeepInputs()]
