"""The attention module of wlb_titan: document-causal attention under every parallelism.

Activations are this rank's local tensors. q stays as it is; k and v, sharded over the cp mesh axis, go from
Shard to Replicate on it together (one all-gather; one reduce-scatter of their gradients on the way back), are
brought from the ranks' order into document order, and the varlen kernel runs on this rank's segments.

Shape suffixes: B batch (1: a micro-batch is one packed sequence), L tokens, N heads, H head dim, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module

from wlb_titan.kernels import varlen_attention


@dataclass(frozen=True)
class DocumentMask:
    """Which keys each query of this rank sees; passed to the model as its `attention_masks`.

    Attributes:
        segments: int32 (S, 4) on the CPU, as `wlb_titan.kernels.varlen_attention` takes them.
        key_order: int64 (L,) on the device: position among the gathered keys, rank by rank, of each key in
            document order. None without context parallelism, where the keys lie in document order already.
    """

    segments: torch.Tensor
    key_order: torch.Tensor | None = None


class DocumentAttention(Module):
    """Causal attention within documents, for q, k, v of one packed sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._cp_mesh: DeviceMesh | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Leaves `forward` as it is: it gathers k and v itself, in document order."""
        self._cp_mesh = parallel_dims.get_mesh("cp") if parallel_dims.cp_enabled else None

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DocumentMask,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attends within documents.

        Args:
            q_BLNH: (1, tokens, query heads, H), those of this rank.
            k_BLNH, v_BLNH: (1, tokens, key heads, H), alike.
            attention_masks: the segments of this rank's queries.
            scale: factor on the scores; 1 / sqrt(H) by default.
            enable_gqa: whether there are fewer key heads than query heads, which the shapes say already.

        Returns:
            Shaped like q; zeros where a query is padding.
        """
        assert q_BLNH.shape[0] == 1, f"a micro-batch is one packed sequence, got a batch of {q_BLNH.shape[0]}"
        q, k, v = q_BLNH.squeeze(0), k_BLNH.squeeze(0), v_BLNH.squeeze(0)
        if self._cp_mesh is not None:
            assert attention_masks.key_order is not None
            k, v = gather_keys_values(k, v, attention_masks.key_order, self._cp_mesh)
        return varlen_attention(q, k, v, attention_masks.segments, scale=scale).unsqueeze(0)


def gather_keys_values(
    k_LNH: torch.Tensor, v_LNH: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of all context-parallel ranks in document order.

    They travel side by side in one tensor, tokens first, so that what a rank receives lies in one piece: the
    permutation is the only copy. The results are views of it; their heads lie side by side in a row.

    Args:
        k_LNH, v_LNH: this rank's L tokens; N and H may differ between them.
        key_order: int64 (L x ranks,), as of `DocumentMask`.
        mesh: the cp mesh axis.

    Returns:
        k and v with L x ranks tokens. Their gradients are summed over the ranks.
    """
    widths = [x.shape[1] * x.shape[2] for x in (k_LNH, v_LNH)]
    mine = torch.cat([k_LNH.flatten(1), v_LNH.flatten(1)], dim=1)
    k, v = _GatherInOrder.apply(mine, key_order, mesh).split(widths, dim=1)
    return k.unflatten(1, k_LNH.shape[1:]), v.unflatten(1, v_LNH.shape[1:])


class _GatherInOrder(torch.autograd.Function):
    """Rows of all ranks, Shard to Replicate, then reordered; backward the reverse, Partial to Shard.

    One function for both steps, because `key_order` is a permutation: the gradient of the reordering is
    written row by row to its place, where autograd would add it to zeros with atomics.
    """

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        ctx.save_for_backward(key_order)
        rows = DTensor.from_local(mine, mesh, (Shard(0),), run_check=False)
        return rows.redistribute(mesh, (Replicate(),)).to_local().index_select(0, key_order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (key_order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank.index_copy_(0, key_order, grad)
        rows = DTensor.from_local(by_rank, ctx.mesh, (Partial(),), run_check=False)
        return rows.redistribute(ctx.mesh, (Shard(0),)).to_local(), None, None
