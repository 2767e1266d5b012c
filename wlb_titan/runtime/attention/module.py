"""The attention module of wlb_titan: document-causal attention under every parallelism.

It takes grouped queries, values of another head dim than queries and keys (multi-head latent attention), a
sliding window, and sinks, which a model applies itself to the output and its log-sum-exp.

Activations are this rank's local tensors. Under context parallelism the strategy's own half (`all_gather`,
`ulysses`, or a plugin's) brings queries and keys together and lets the varlen kernel attend.

Shape suffixes: B batch (1: a micro-batch is one packed sequence), L tokens, N heads, H head dim, S segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.module import Module

from wlb_titan.context.all_gather import MOST_GROUPS
from wlb_titan.context.strategy import ContextStrategy
from wlb_titan.job import Job
from wlb_titan.kernels import varlen_attention
from wlb_titan.plugins import load
from wlb_titan.runtime.attention.kv_cache import sliced_attention
from wlb_titan.runtime.compat import mark_unbacked
from wlb_titan.runtime.meshes import ContextMeshes

# Output (tokens, heads, H) and log-sum-exp, float32 (heads, tokens).
Attended = tuple[torch.Tensor, torch.Tensor]

_layers = itertools.count()


@dataclass(frozen=True)
class DocumentMask:
    """Which keys each query of this rank sees; passed to the model as its `attention_masks`."""

    segments: torch.Tensor  # int32 (S, 4) on the CPU, as `varlen_attention` takes them
    exchange: tuple[Any, ...] = ()  # the rest of the context-parallel strategy's mask, on the device
    rows: torch.Tensor | None = None  # int64 (n, 4) on the CPU, see `kv_cache`; None without slices
    cache: torch.Tensor | None = None  # int64 () on the CPU, number of the step's `KeyValueCache`; as `rows`
    sharers: int = 1  # data-parallel ranks that share the micro-batch; each number has a compiled graph
    groups: int = 1  # of heads, as of `MicroBatch.groups`; each number has a compiled graph
    kinds: tuple[str, ...] = ()  # of recomputation, of each layer of the model; empty: `kind` for all
    kind: str = "selective"  # the same of the layer at hand


def documents_vary(segments: torch.Tensor) -> torch.Tensor:
    """Marks a tensor (S, 4): S is a variable in compiled code, even if it is 1."""
    mark_unbacked(segments, 0)
    return segments


class Attend:
    """The kernel, within this rank's segments; called once for each of `groups` groups of heads.

    Args:
        layers: a number by which slices find earlier ones' keys, for each group; int64 () on the CPU.
        options: of `varlen_attention`.
    """

    def __init__(
        self, mask: DocumentMask, layers: Sequence[torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        self.groups = mask.groups
        self._mask, self._layers, self._options = mask, layers, options

    def __call__(
        self, q_LNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, group: int = 0
    ) -> Attended:
        """k and v are of the whole micro-batch, in the order of the mask's keys."""
        mask, options = self._mask, self._options
        if mask.rows is None:
            return varlen_attention(q_LNH, k_LNH, v_LNH, mask.segments, return_lse=True, **options)
        where = mask.segments, mask.rows, mask.cache, self._layers[group]
        return sliced_attention(q_LNH, k_LNH, v_LNH, *where, **options)


class ContextAttention(Protocol):
    """The half of a context-parallel strategy that moves tensors; made once for each attention layer.

    Its meshes are those that the strategy's `meshes` names: of the cp mesh axis, or, if data-parallel ranks
    share micro-batches, of all of their context-parallel ranks.
    """

    def __init__(self, config: ContextStrategy.Config, *meshes: DeviceMesh) -> None: ...

    def __call__(
        self,
        q_LNH: torch.Tensor,
        k_LNH: torch.Tensor,
        v_LNH: torch.Tensor,
        exchange: tuple[Any, ...],
        attend: Attend,
        *,
        wants_lse: bool,
    ) -> Attended:
        """The output for this rank's own L tokens and all of its heads.

        Args:
            q_LNH, k_LNH, v_LNH: this rank's tokens; heads and head dims may differ.
            exchange: `DocumentMask.exchange`.
            attend: the kernel, on this rank's segments; called once, or for each of `attend.groups`.
            wants_lse: if not, the log-sum-exp is ignored, and may be that of other tokens.
        """
        ...


class DocumentAttention(Module):
    """Causal attention within documents, for q, k, v of one packed sequence."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int | None = None
        """Keys that a query sees at most, the last ones of its document, its own included; None for all."""

        implementation: str = "auto"
        """What computes it; the trainer fills in [wlb.attention]."""

        sm_margin: int = 0
        """Multiprocessors that it leaves to other kernels; filled in like `implementation`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._options = {
            "window": config.window,
            "implementation": config.implementation,
            "sm_margin": config.sm_margin,
        }
        self.context: dict[int, ContextAttention] = {}  # by how many data-parallel ranks share a micro-batch
        self.groups: set[str] = set()  # names of the process groups that share keys and values
        self._layers = [torch.tensor(next(_layers), device="cpu") for _ in range(MOST_GROUPS)]

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Leaves `forward` as it is: the strategy brings in other ranks' tensors."""

    def share(self, sharers: int, config: ContextStrategy.Config, meshes: Sequence[DeviceMesh]) -> None:
        """Prepares for micro-batches that `sharers` data-parallel ranks share."""
        self.context[sharers] = load(config.owner.attention)(config, *meshes)
        self.groups |= {group.group_name for mesh in meshes for group in mesh.get_all_groups()}

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DocumentMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns (1, tokens, query heads, H of v), before `out_transform` zeros where a query is padding.

        Args:
            scale: factor on the scores; 1 / sqrt(H) by default.
            out_transform: of torchtitan's models with sinks, from the output and its log-sum-exp, float32
                (1, tokens, query heads), +inf where a query is padding.
        """
        assert q_BLNH.shape[0] == 1, f"a micro-batch is one packed sequence, got a batch of {q_BLNH.shape[0]}"
        q, k, v = q_BLNH.squeeze(0), k_BLNH.squeeze(0), v_BLNH.squeeze(0)
        attend = Attend(attention_masks, self._layers, {"scale": scale, **self._options})
        sharers = attention_masks.sharers
        if sharers in self.context:
            out_LNH, lse_NL = self.context[sharers](
                q, k, v, attention_masks.exchange, attend, wants_lse=out_transform is not None
            )
        else:
            assert sharers == 1, f"nothing is prepared for {sharers} data-parallel ranks that share"
            out_LNH, lse_NL = attend(q, k, v)
        out_BLNH = out_LNH.unsqueeze(0)
        return out_BLNH if out_transform is None else out_transform(out_BLNH, lse_NL.T.unsqueeze(0))


def attentions(parts: Sequence[nn.Module]) -> list[DocumentAttention]:
    return [m for part in parts for m in part.modules() if isinstance(m, DocumentAttention)]


def prepare_attention(parts: Sequence[nn.Module], job: Job, meshes: ContextMeshes) -> None:
    """Gives the attention of a model's parts the half of the strategy that moves its tensors."""
    for sharers, own in meshes.items():
        for attention in attentions(parts):
            attention.share(sharers, job.by_sharers[sharers].context, own)
