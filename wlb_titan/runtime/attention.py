"""The attention module of wlb_titan: document-causal attention under every parallelism.

Activations are this rank's local tensors. q stays as it is; k and v, sharded over the cp mesh axis, go from
Shard to Replicate on it together (one all-gather; one reduce-scatter of their gradients on the way back), are
brought from the ranks' order into document order, and the varlen kernel runs on this rank's segments.

In several groups of heads, the gathers of all groups are started first, and each group attends as soon as its
own keys have come; on the way back a group's gradients travel while the one before it computes its own. This
rests on the order in which autograd runs: what was computed last first.

Shape suffixes: B batch (1: a micro-batch is one packed sequence), L tokens, N heads, H head dim, S segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module

from wlb_titan.kernels import varlen_attention
from wlb_titan.runtime.kv_cache import sliced_attention

_layers = itertools.count()


@dataclass(frozen=True)
class DocumentMask:
    """Which keys each query of this rank sees; passed to the model as its `attention_masks`.

    Attributes:
        segments: int32 (S, 4) on the CPU, as `wlb_titan.kernels.varlen_attention` takes them.
        key_order: int64 (L,) on the device: position among the gathered keys, rank by rank, of each key in
            document order. None without context parallelism, where the keys lie in document order already.
        rows: int64 (n, 4) on the CPU, prefixes of documents in slices, as of `kv_cache`; None where documents
            are not sliced.
        cache: int64 () on the CPU, number of the step's `KeyValueCache`; as `rows`.
    """

    segments: torch.Tensor
    key_order: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    cache: torch.Tensor | None = None


class DocumentAttention(Module):
    """Causal attention within documents, for q, k, v of one packed sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        gather_groups: int = 1
        """Groups of heads in which keys and values are gathered; it divides the key heads of a rank."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._groups = config.gather_groups
        # Numbers by which slices find what earlier ones left here, of each group of heads.
        self._layers = [torch.tensor(next(_layers), device="cpu") for _ in range(self._groups)]
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
        if self._cp_mesh is None:
            return self._attend(q, k, v, attention_masks, 0, scale).unsqueeze(0)
        assert attention_masks.key_order is not None
        heads = (x.chunk(self._groups, dim=1) for x in (q, k, v))
        groups = [(q, Gather(k, v, self._cp_mesh)) for q, k, v in zip(*heads, strict=True)]
        outputs = [
            self._attend(q, *gather.finish(attention_masks.key_order), attention_masks, group, scale)
            for group, (q, gather) in enumerate(groups)
        ]
        return torch.cat(outputs, dim=1).unsqueeze(0)

    def _attend(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        mask: DocumentMask,
        group: int,
        scale: float | None,
    ) -> torch.Tensor:
        """Of one group of heads, with keys and values in document order."""
        if mask.rows is None:
            return varlen_attention(q_LNH, k_LNH, v_LNH, mask.segments, scale=scale)
        assert mask.cache is not None
        layer = self._layers[group]
        return sliced_attention(q_LNH, k_LNH, v_LNH, mask.segments, mask.rows, mask.cache, layer, scale=scale)


class Gather:
    """The keys and values of all context-parallel ranks, under way from the moment this is made.

    They travel side by side in one tensor, tokens first, so that what a rank receives lies in one piece: the
    permutation is the only copy.

    Args:
        k_LNH, v_LNH: this rank's L tokens; N and H may differ between them.
        mesh: the cp mesh axis.
    """

    def __init__(self, k_LNH: torch.Tensor, v_LNH: torch.Tensor, mesh: DeviceMesh) -> None:
        self._shapes = [x.shape[1:] for x in (k_LNH, v_LNH)]
        self._mesh = mesh
        self._mine = torch.cat([k_LNH.flatten(1), v_LNH.flatten(1)], dim=1)
        with torch.no_grad():
            rows = DTensor.from_local(self._mine, mesh, (Shard(0),), run_check=False)
            self._gathered = rows.redistribute(mesh, (Replicate(),), async_op=True).to_local()

    def finish(self, key_order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for them and brings them into document order.

        Args:
            key_order: int64 (L x ranks,), as of `DocumentMask`.

        Returns:
            k and v with L x ranks tokens, views of one tensor in which the heads of both lie side by side.
            Their gradients are summed over the ranks.
        """
        ordered = _InDocumentOrder.apply(self._mine, self._gathered, key_order, self._mesh)
        k, v = ordered.split([shape.numel() for shape in self._shapes], dim=1)
        return k.unflatten(1, self._shapes[0]), v.unflatten(1, self._shapes[1])


class _InDocumentOrder(torch.autograd.Function):
    """The gathered rows reordered, as a function of this rank's rows; backward from Partial to Shard.

    One function for the reordering and the gradient of the gather, because `key_order` is a permutation: the
    gradient is written row by row to its place, where autograd would add it to zeros with atomics.
    """

    @staticmethod
    def forward(
        ctx: Any, mine: torch.Tensor, gathered: torch.Tensor, key_order: torch.Tensor, mesh: DeviceMesh
    ) -> torch.Tensor:
        ctx.mesh = mesh
        ctx.save_for_backward(key_order)
        return gathered.index_select(0, key_order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (key_order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
        by_rank.index_copy_(0, key_order, grad)
        rows = DTensor.from_local(by_rank, ctx.mesh, (Partial(),), run_check=False)
        # Whoever uses the result waits for it, which lets the group before this one compute meanwhile.
        return rows.redistribute(ctx.mesh, (Shard(0),), async_op=True).to_local(), None, None, None
