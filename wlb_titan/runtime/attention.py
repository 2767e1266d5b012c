"""The attention module of wlb_titan: document-causal attention on DTensors, under every parallelism.

q stays sharded over the cp mesh axis; k and v go from Shard to Replicate on it together (one all-gather; one
reduce-scatter of their gradients on the way back), are brought from the ranks' order into document order, and
the varlen kernel runs on this rank's segments.

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
        """Leaves `forward` as it is: it takes and gives DTensors itself.

        torchtitan would wrap `forward` by the sharding declared in the config. Its wrapper gathers k and v
        asynchronously before a local_map, and there (torch 2.15) waiting for the gathered tensor drops it
        from the autograd graph: k and v would train without a gradient.
        """
        self._cp_mesh = parallel_dims.get_mesh("cp") if parallel_dims.cp_enabled else None

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DocumentMask,
        scale: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends within documents.

        Args:
            q_BLNH: (1, tokens, query heads, H), a DTensor sharded over tokens on cp and over heads on tp.
            k_BLNH, v_BLNH: (1, tokens, key heads, H), sharded alike.
            attention_masks: the segments of this rank's queries.
            scale: factor on the scores; 1 / sqrt(H) by default.

        Returns:
            Shaped and sharded like q; zeros where a query is padding.
        """
        if not isinstance(q_BLNH, DTensor):
            return _attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)
        q, k, v = (x.to_local(grad_placements=x.placements) for x in (q_BLNH, k_BLNH, v_BLNH))
        if self._cp_mesh is not None:
            assert attention_masks.key_order is not None
            k, v = gather_keys_values(k, v, attention_masks.key_order, self._cp_mesh)
        out = _attend(q, k, v, attention_masks, scale)
        return DTensor.from_local(out, q_BLNH.device_mesh, q_BLNH.placements, run_check=False)


def gather_keys_values(
    k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of all context-parallel ranks in document order.

    They travel side by side in one tensor, tokens first, so that what a rank receives lies in one piece: the
    permutation is the only copy. The results are views of it; their heads lie side by side in a row.

    Args:
        k_BLNH, v_BLNH: local tensors, B of 1 and this rank's L tokens; N and H may differ between them.
        key_order: int64 (L x ranks,), as of `DocumentMask`.
        mesh: the cp mesh axis.

    Returns:
        k and v with L x ranks tokens. Their gradients are summed over the ranks.
    """
    widths = [x.shape[2] * x.shape[3] for x in (k_BLNH, v_BLNH)]
    mine = torch.cat([x.flatten(2).squeeze(0) for x in (k_BLNH, v_BLNH)], dim=1)
    both = DTensor.from_local(mine, mesh, (Shard(0),), run_check=False)
    both = both.redistribute(mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))
    k, v = both.index_select(0, key_order).split(widths, dim=1)
    return (
        k.unflatten(1, k_BLNH.shape[2:]).unsqueeze(0),
        v.unflatten(1, v_BLNH.shape[2:]).unsqueeze(0),
    )


def _attend(
    q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, mask: DocumentMask, scale: float | None
) -> torch.Tensor:
    assert q_BLNH.shape[0] == 1, f"a micro-batch is one packed sequence, got a batch of {q_BLNH.shape[0]}"
    q, k, v = q_BLNH.squeeze(0), k_BLNH.squeeze(0), v_BLNH.squeeze(0)
    return varlen_attention(q, k, v, mask.segments, scale=scale).unsqueeze(0)
