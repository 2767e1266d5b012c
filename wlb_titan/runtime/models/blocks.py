"""torch.compile and rotary positions of a transformer block with our attention.

torchtitan compiles each transformer block: the first length as a constant, the second with symbols for
whatever changed, and that graph serves every further length. The documents of a micro-batch are one tensor
whose number of rows is a symbol from the start. `prepare_compiling` says which other graphs there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch._inductor.config
from torch import Tensor
from torch.fx import Graph
from torchtitan.models.common import ComplexRoPE

from wlb_titan.job import Job
from wlb_titan.memory.recompute import KINDS
from wlb_titan.runtime.compat import CustomGraphPass, get_custom_graph_passes, mark_unbacked


def prepare_compiling(job: Job) -> None:
    """Raises torch's limit of graphs to one for each kind of recomputation and each set of collectives: a
    micro-batch uses only those that gather keys for its documents. Has Inductor run `KeepInputs`, after any
    other passes that are set."""
    graphs = sum(2 ** (1 + len(shared.exchanging.moves)) for shared in job.by_sharers.values())
    graphs *= len(KINDS) if job.mixes else 1
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)
    passes = get_custom_graph_passes(torch._inductor.config.joint_custom_post_pass)
    if not any(isinstance(one, KeepInputs) for one in passes):
        torch._inductor.config.joint_custom_post_pass = [*passes, KeepInputs()]


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


class PairwiseRoPE(ComplexRoPE):
    """ComplexRoPE, whose table compiled code reads as real numbers.

    torchtitan's turns neighbouring pairs of a head's elements as complex numbers, which Inductor does not
    fuse: the conversions and the product are kernels of their own after the split of QKV, 6 % of the device
    time of a 550M Llama's step at 65,536 tokens on an H100. Here compiled code turns the pairs in real
    arithmetic, which fuses with split and casts, forward and backward. Uncompiled code keeps the complex
    product: three kernels, where real arithmetic would be six.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turns (1, tokens, heads, head dim). positions: int64 (1, tokens), in documents; None: from 0."""
        if not torch.compiler.is_compiling():
            return super().forward(query, key, positions)
        table = torch.view_as_real(self.cache)
        rows = table[: query.shape[1]] if positions is None else table[positions.squeeze(0)]
        return _turned(query, rows), _turned(key, rows)


def _turned(x: Tensor, rows: Tensor) -> Tensor:
    """(a, b) of each pair of x to (a cos - b sin, b cos + a sin), in float32 as a complex product.

    x: (1, tokens, heads, head dim); rows: float32 (tokens, pairs, 2), cosine and sine.
    """
    cos, sin = rows[:, None, :, :1], rows[:, None, :, 1:]
    sign = torch.arange(-1, 2, 2, device=x.device)
    pairs = x.float().unflatten(-1, (-1, 2))
    return (pairs * cos + pairs.flip(-1) * (sin * sign)).flatten(-2).type_as(x)
