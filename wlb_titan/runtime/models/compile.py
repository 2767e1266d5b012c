"""torch.compile for micro-batches whose lengths and documents change at every step.

torchtitan compiles each transformer block. The first length that a block meets is compiled as a constant, the
second with symbols for whatever changed, and that graph serves every further length. The documents of a
micro-batch are one tensor whose number of rows is a symbol from the start. What there are graphs of besides,
`allow_graphs` says.
"""

from __future__ import annotations

import torch
import torch._inductor.config
from torch.fx import Graph

from wlb_titan.job import Job
from wlb_titan.runtime.compat import CustomGraphPass, get_custom_graph_passes, mark_unbacked


def prepare_compiling(job: Job) -> None:
    """Sets what torch.compile needs for the model of a job."""
    allow_graphs(job)
    keep_inputs()


def allow_graphs(job: Job) -> None:
    """Lets compiled code have a graph for each set of collectives that a micro-batch may use.

    A micro-batch uses those that gather keys for which it has documents, and no others. torch gives up at its
    limit.
    """
    graphs = sum(2 ** (1 + len(shared.exchanging.moves)) for shared in job.merged.values())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)


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
