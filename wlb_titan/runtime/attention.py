"""The attention module of wlb_titan: document-causal attention under every parallelism.

Activations are this rank's local tensors. Under context parallelism the strategy's own half (`all_gather`,
`ulysses`, or anybody's) brings queries and keys together and lets the varlen kernel attend.

Shape suffixes: B batch (1: a micro-batch is one packed sequence), L tokens, N heads, H head dim, S segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module

from wlb_titan.context import STRATEGIES, ContextStrategy
from wlb_titan.kernels import varlen_attention
from wlb_titan.plugins import load

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""Attends within the rank's segments: q, k, v as (tokens, heads, H), and which query heads of the rank these
are; the output is shaped like q, zeros where a query is padding."""


@dataclass(frozen=True)
class DocumentMask:
    """Which keys each query of this rank sees; passed to the model as its `attention_masks`.

    Attributes:
        segments: int32 (S, 4) on the CPU, as `wlb_titan.kernels.varlen_attention` takes them.
        exchange: int64 tensors on the device that the context-parallel strategy's mask has besides.
    """

    segments: torch.Tensor
    exchange: tuple[torch.Tensor, ...] = ()


class ContextAttention(Protocol):
    """The half of a context-parallel strategy that moves tensors; made once for each attention layer.

    Args:
        config: the strategy's settings.
        mesh: the cp mesh axis.
    """

    def __init__(self, config: ContextStrategy.Config, mesh: DeviceMesh) -> None: ...

    def __call__(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: tuple[torch.Tensor, ...],
        attend: Attend,
    ) -> torch.Tensor:
        """The output for this rank's own L tokens and all of its heads, shaped like q."""
        ...


class DocumentAttention(Module):
    """Causal attention within documents, for q, k, v of one packed sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        context: ContextStrategy.Config = field(default_factory=lambda: STRATEGIES.configure("per_sequence"))
        """The context-parallel strategy; the trainer fills in [wlb.sharding]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config.context
        self._context: ContextAttention | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Leaves `forward` as it is: tensors of other ranks come in by the strategy."""
        if parallel_dims.cp_enabled:
            strategy = load(self._config.owner.attention)
            self._context = strategy(self._config, parallel_dims.get_mesh("cp"))

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

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: slice) -> torch.Tensor:
            return varlen_attention(q, k, v, attention_masks.segments, scale=scale)

        if self._context is None:
            return attend(q, k, v, slice(None)).unsqueeze(0)
        return self._context(q, k, v, attention_masks.exchange, attend).unsqueeze(0)
