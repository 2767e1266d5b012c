"""What compiled transformer blocks need of torch: enough graphs, and Inductor's passes.

torchtitan compiles each transformer block: the first length as a constant, the second with symbols for
whatever changed, and that graph serves every further length. The documents of a micro-batch are one tensor
whose number of rows is a symbol from the start. `prepare_compiling` says which other graphs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.config
from torch.fx import Graph

from wlb_titan.job import Job
from wlb_titan.layers.recompute import KINDS
from wlb_titan.runtime.compat import CustomGraphPass, contains_wait, get_custom_graph_passes


def prepare_compiling(job: Job) -> None:
    """Raises torch's limit of graphs to one for each kind of recomputation, each number of groups of heads
    and each set of collectives: a micro-batch uses only those that gather keys for its documents. Has
    Inductor run `KeepInputs`, after any other passes that are set, and `late_waits` where heads attend in
    groups."""
    strategies = [shared.strategy for shared in job.by_sharers.values()]
    groups = {number for strategy in strategies if strategy is not None for number in strategy.groups} | {1}
    graphs = sum(2 ** (1 + len(shared.exchanging.moves)) for shared in job.by_sharers.values())
    graphs *= (len(KINDS) if job.mixes else 1) * len(groups)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)
    inductor = torch._inductor.config
    passes = get_custom_graph_passes(inductor.joint_custom_post_pass)
    if not any(isinstance(one, KeepInputs) for one in passes):
        inductor.joint_custom_post_pass = [*passes, KeepInputs()]
    if len(groups) > 1:
        inductor.reorder_for_compute_comm_overlap = True
        inductor.reorder_for_compute_comm_overlap_passes = [late_waits]


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


def late_waits(nodes: Sequence[Any]) -> list[Any]:
    """Inductor's nodes in their order, but each wait for a collective only before what needs its result: as
    it is traced, compiled code waits at once. (torch's `sink_waits` puts collectives late too.)"""
    result: list[Any] = []
    waits: list[Any] = []
    for node in nodes:
        if contains_wait(node):
            waits.append(node)
            continue
        # torch keeps collectives in order by dependencies that are not real ones.
        needed = {d.name for d in node.unmet_dependencies if not getattr(d, "is_fake", False)}
        due = [wait for wait in waits if needed & set(wait.get_buffer_names())]
        waits = [wait for wait in waits if wait not in due]
        result += [*due, node]
    return [*result, *waits]
