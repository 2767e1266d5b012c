"""The attention module of wlb_titan: document-causal attention on DTensors, under every parallelism.

q stays sharded over the cp mesh axis; k and v go from Shard to Replicate on it (an all-gather; a
reduce-scatter of their gradients on the way back), are brought from the ranks' order into document order,
and the varlen kernel runs on this rank's segments.

Shape suffixes: B batch (1: a micro-batch is one packed sequence), L tokens, N heads, H head dim, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
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

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Does nothing: `forward` takes and gives DTensors itself.

        torchtitan would wrap `forward` by the sharding declared in the config. Its wrapper gathers k and v
        asynchronously before a local_map, and there (torch 2.15) waiting for the gathered tensor drops it
        from the autograd graph: k and v would train without a gradient.
        """

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
        mesh, sharded = q_BLNH.device_mesh, q_BLNH.placements
        gathered = _with_cp(q_BLNH, Replicate())
        k, v = (
            x.redistribute(mesh, gathered).to_local(grad_placements=_with_cp(q_BLNH, Partial()))
            for x in (k_BLNH, v_BLNH)
        )
        out = _attend(q_BLNH.to_local(grad_placements=sharded), k, v, attention_masks, scale)
        return DTensor.from_local(out, mesh, sharded, run_check=False)


def _attend(
    q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, mask: DocumentMask, scale: float | None
) -> torch.Tensor:
    assert q_BLNH.shape[0] == 1, f"a micro-batch is one packed sequence, got a batch of {q_BLNH.shape[0]}"
    q, k, v = q_BLNH.squeeze(0), k_BLNH.squeeze(0), v_BLNH.squeeze(0)
    if mask.key_order is not None:
        k, v = k.index_select(0, mask.key_order), v.index_select(0, mask.key_order)
    return varlen_attention(q, k, v, mask.segments, scale=scale).unsqueeze(0)


def _with_cp(x: DTensor, placement: Placement) -> tuple[Placement, ...]:
    """The placements of x, with another one on the cp mesh axis, where there is one."""
    names = x.device_mesh.mesh_dim_names
    assert names is not None
    return tuple(placement if name == "cp" else p for name, p in zip(names, x.placements, strict=True))
