"""What torch.compile and activation checkpointing do to a transformer block that has our attention.

torchtitan compiles each transformer block. The first length that a block meets is compiled as a constant, the
second with symbols for whatever changed, and that graph serves every further length. The documents of a
micro-batch are one tensor whose number of rows is a symbol from the start. What there are graphs of besides,
`prepare_compiling` says.
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
"""Linear layers whose output no backward pass needs, and which are as wide as the model: what follows adds it
to the residual. Under tensor parallelism it has the full width on every rank, before it is reduced."""


class SelectiveDocumentAC(titan.SelectiveAC):
    """torchtitan's SelectiveAC, which also keeps what document attention computed, and never w2's output.

    torchtitan keeps the output of every second matrix product. Counting them, w2 is the fifth of a layer with
    fused QKV and the seventh of others, so that it would be kept. The forward pass is repeated only as far as
    the backward pass needs it, which is to w2's input.
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
        wrapped: Any = super()._wrap_block(module, base_fqn=base_fqn)
        wrapped.checkpoint_fn = partial(wrapped.checkpoint_fn, early_stop=True)
        return wrapped


def prepare_compiling(job: Job) -> None:
    """Lets compiled code have a graph for each set of collectives that a micro-batch may use.

    A micro-batch uses those that gather keys for which it has documents, and no others. torch gives up at its
    limit.
    """
    graphs = sum(2 ** (1 + len(shared.exchanging.moves)) for shared in job.merged.values())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)
    keep_inputs()


def documents_vary(segments: torch.Tensor) -> torch.Tensor:
    """Marks a tensor (S, 4): compiled code takes its number of rows S as a variable, also if it is 1."""
    mark_unbacked(segments, 0)
    return segments


class KeepInputs(CustomGraphPass):
    """Says of no input of a block that it be computed again in the backward pass.

    Inductor takes x / 1 for x, which then has the division's tag of activation checkpointing. If x is a
    parameter, torch's partition into forward and backward fails, as nothing computes a parameter:
    "AssertionError: Node add_21 was invalid, but is output". torchtitan divides a bias by the tensor-parallel
    degree (`ScaledBiasRowwiseLinear`), so gpt-oss would not compile under full checkpointing.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            node.meta.pop("recompute", None)

    def uuid(self) -> str:
        """Names this pass in the keys of Inductor's caches."""
        return "wlb_titan.KeepInputs.1"


def keep_inputs() -> None:
    """Has Inductor run `KeepInputs`, after passes that somebody else has set."""
    passes = get_custom_graph_passes(torch._inductor.config.joint_custom_post_pass)
    if not any(isinstance(one, KeepInputs) for one in passes):
        torch._inductor.config.joint_custom_post_pass = [*passes, KeepInputs()]
