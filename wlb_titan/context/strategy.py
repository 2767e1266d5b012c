"""The base of context-parallel strategies: who holds which tokens, who attends to what, and what that costs.

A micro-batch is one packed sequence. A strategy divides its tokens over the context-parallel ranks, and says
what the ranks send each other so that every query meets its keys. Planner, memory, cost model, simulator and
training know none by name. The half that moves tensors is a class of its own (`attention`), as planning needs
no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.layout import Sharding, segments, whole_sequence, with_prefix
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.cluster import Cluster
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError
from wlb_titan.plan import Slices
from wlb_titan.plugins import Family, Plugin, PluginConfig

STRATEGIES = Family(
    kind="sharding policy",
    key="policy",
    group="wlb_titan.context",
    base="wlb_titan.context.strategy:ContextStrategy",
    shipped={
        "per_sequence": "wlb_titan.context.all_gather:PerSequence",
        "per_document": "wlb_titan.context.all_gather:PerDocument",
        "adaptive": "wlb_titan.context.all_gather:Adaptive",
        "hybrid": "wlb_titan.context.hybrid:Hybrid",
        "ulysses": "wlb_titan.context.ulysses:Ulysses",
        "auto": "wlb_titan.context.all_gather:Auto",
    },
)


class ContextMask(NamedTuple):
    """A micro-batch as the attention of one rank needs it."""

    segments: NDArray[np.int32]
    """int32 (S, 4), as `wlb_titan.kernels.varlen_attention` takes them; keys from the document's first."""

    exchange: tuple[Any, ...]
    """What the strategy's `attention` needs besides: nested tuples of numbers, for any of which compiled code
    is the same, and of int64 arrays, which reach it as tensors."""

    keys: Ints
    """int64 (k, 2), number and tokens of the documents whose keys the rank has, in the order of the keys; -1
    for padding between documents. After the last there is padding too."""

    @classmethod
    def of_sequence(cls, lengths: Ints) -> ContextMask:
        """The mask of a rank that has all queries and keys, in the order of the sequence."""
        keys = np.stack([np.arange(len(lengths)), lengths], axis=1)
        return cls(segments(whole_sequence(lengths), lengths), (), keys)


class KeyShares(NamedTuple):
    """Largest shares of a micro-batch's keys and values on any context-parallel rank."""

    gathered: float  # what collectives bring
    held: float  # what attention reads


ALL_KEYS = KeyShares(1.0, 1.0)


class Move(NamedTuple):
    """Collectives of a layer, in the forward pass and again for gradients in the backward pass."""

    received: float  # elements from other ranks, for each token that travels
    collectives: int  # how many bring them
    ranks: int  # size of the group
    stride: int = 1  # distance of neighbours in the group, in context-parallel ranks
    kept: float = 0.0
    """Elements of the result, for each token, that selective activation checkpointing keeps for the backward
    pass instead of moving them again. torchtitan's keeps the results of all-to-alls."""
    always: bool = True
    """Whether it moves nearly all tokens of every micro-batch, so that packing can count it as work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What a rank's attention moves and holds in one layer, in elements per token of the micro-batch."""

    moves: tuple[Move, ...]
    sent: float  # held while they travel, beside what the model has anyway
    keys: float  # and values; a rank may have those of some tokens only (`ContextStrategy.keys`)
    outputs: float = 0.0
    """Queries, and as many outputs, that attention copies because its tokens are not the rank's own."""

    joined: float = 0.0  # outputs of groups of heads, put side by side


def all_gather_exchange(
    model: ModelShape, tensor: int, ranks: int, levels: Sequence[int] = (), *, always: bool = True
) -> Exchange:
    """The exchange of strategies that gather keys and values within groups of `levels` ranks, or of all."""
    keys = model.kv_heads * model.head_dims / tensor
    moves = tuple(Move(keys * (size - 1) / size, 1, size, always=always) for size in levels or (ranks,))
    return Exchange(moves=moves, sent=keys / ranks, keys=keys)


class MoveSeconds(NamedTuple):
    """Seconds of a collective in a layer."""

    token: float  # for each token of the group that travels
    each: float  # for each time that it runs


class ExchangeSeconds(NamedTuple):
    """Seconds of context parallelism's collectives in a layer, for a micro-batch."""

    moving: float  # in one pass, by bandwidth
    repeated: float  # the part of `moving` that activation checkpointing repeats in the backward pass
    latency: float  # in one pass


@dataclass(frozen=True)
class ExchangeCost:
    """The collectives of one layer on the hardware of a job."""

    moves: tuple[Move, ...]  # none without context parallelism
    cluster: Cluster
    stride: int  # distance of context-parallel neighbours, in ranks
    element: int  # bytes of one
    repeats: bool  # whether activation checkpointing repeats the moves whose results it does not keep

    def price(self, move: Move, passes: int) -> MoveSeconds:
        link = self.cluster.link(move.ranks, self.stride * move.stride)
        token = self.element * move.received / link.bandwidth
        return MoveSeconds(passes * token, passes * move.collectives * link.latency)

    def of_moves(self) -> list[MoveSeconds]:
        """The price of each move in all passes of a micro-batch: forward, backward, and perhaps repeated."""
        return [self.price(move, 3 if self.repeats and not move.kept else 2) for move in self.moves]

    def seconds(self, travelling: Sequence[float]) -> ExchangeSeconds:
        """For a micro-batch of which these tokens travel in each move."""
        moving = repeated = latency = 0.0
        for tokens, move in zip(travelling, self.moves, strict=True):
            price = self.price(move, 1)
            moving += tokens * price.token
            repeated += 0.0 if move.kept else tokens * price.token
            latency += price.each if tokens else 0.0
        return ExchangeSeconds(moving, repeated, latency)

    @cached_property
    def always(self) -> ExchangeSeconds:
        """For each token of a micro-batch, by the moves that are `always` made."""
        return self.seconds([float(move.always) for move in self.moves])


class Figures(NamedTuple):
    """What predictions need of a micro-batch's sharding; see the methods of `ContextStrategy`."""

    seconds: Floats
    travelling: tuple[int, ...]
    keys: KeyShares


Unsharded = tuple[Ints, int, Slices | None]
"""A micro-batch's lengths, total and slices, as of `ContextStrategy.shard`."""
Placed = tuple[Sharding, int, Slices | None]


class ContextStrategy(Plugin, ABC):
    """Divides micro-batches over context-parallel ranks.

    Args:
        ranks: context-parallel degree, at least 2.
        latency: predicts attention on all heads of a tensor-parallel rank.
        moves: seconds of each move of its `exchange` in all passes; empty if they do not count.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[wlb.context]: how context parallelism divides a micro-batch over its ranks."""

        family = STRATEGIES

        profile: str = ""
        """File with the measured attention times of the device, from `wlb-titan profile`. Empty: the
        cluster's own figures."""

        @property
        def grouped(self) -> bool:
            """Whether heads may attend in groups."""
            return False

    attention: ClassVar[str]
    """The half that moves tensors, as "module:Class"; see `runtime/attention/module.py`."""

    groups: Sequence[int] = (1,)
    """Numbers of groups in which heads may attend, one after the other; the fastest is taken."""

    merges: ClassVar[bool] = False
    """Whether data-parallel ranks may share a micro-batch (DP-Merge): if any number of ranks will do."""

    def __init__(
        self, config: Any, ranks: int, latency: AttentionLatency, moves: Sequence[MoveSeconds] = ()
    ) -> None:
        self.ranks = ranks
        self.latency = latency
        self.moves = tuple(moves)

    @property
    def divisor(self) -> int:
        """A micro-batch's tokens must be a multiple of it."""
        return self.ranks

    @property
    def meshes(self) -> Sequence[Mapping[str, int]]:
        """Names and sizes of the axes of each mesh that its `attention` needs.

        Ranks of the last axis are neighbours. A mesh of fewer than all ranks is one of several side by side.
        """
        return ({"cp": self.ranks},)

    def check(self, model: ModelShape, tensor: int) -> None:
        """Raises PlanError, with the setting to blame, for a model whose heads it cannot share."""

    def shard(self, lengths: Ints, total: int, slices: Slices | None = None) -> tuple[str, Sharding]:
        """Who holds which tokens.

        Args:
            lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
            total: tokens of the sequence with its padding, which comes last; a multiple of `divisor`.
            slices: how documents continue elsewhere; None where all of them are whole.

        Returns:
            The name of the sharding chosen, for reports; and each rank's runs. The rest of a rank's
            total / ranks tokens is padding.
        """
        self.check_tokens(lengths, total)
        return self.divide(lengths, total, slices)

    def shard_all(self, packs: Sequence[Unsharded]) -> list[tuple[str, Sharding]]:
        """`shard` of several micro-batches, which some strategies divide together."""
        return [self.shard(*pack) for pack in packs]

    def check_tokens(self, lengths: Ints, total: int) -> None:
        """Raises PlanError for a micro-batch of too few tokens."""
        tokens = int(lengths.sum())
        if tokens < self.ranks:
            raise PlanError(
                f"A micro-batch has {tokens} tokens, fewer than the {self.ranks} context-parallel ranks that "
                "share it. Use a smaller context-parallel degree, a longer context window or longer "
                "documents."
            )
        assert tokens <= total and total % self.divisor == 0, f"{total} tokens are not padded"

    @abstractmethod
    def divide(self, lengths: Ints, total: int, slices: Slices | None) -> tuple[str, Sharding]:
        """`shard`, after its checks."""

    @abstractmethod
    def seconds(self, sharding: Sharding) -> Floats:
        """float64 (ranks, 2), forward and backward seconds of one layer's attention on each rank.

        A run's queries see all tokens of their document up to themselves, also those before the first run
        (`layout.with_prefix`).
        """

    def travelling(self, sharding: Sharding, total: int, slices: Slices | None = None) -> tuple[int, ...]:
        """For each move of `exchange` the tokens that travel in the group where most do."""
        return (total,)

    def keys(self, sharding: Sharding, total: int, slices: Slices | None = None) -> KeyShares:
        """The share of a micro-batch's keys that ranks have."""
        return ALL_KEYS

    def figures(self, packs: Sequence[Placed]) -> list[Figures]:
        """Of several micro-batches, which some strategies work out together."""
        return [
            Figures(
                self.seconds(with_prefix(sharding, slices.prefix if slices else None)),
                self.travelling(sharding, total, slices),
                self.keys(sharding, total, slices),
            )
            for sharding, total, slices in packs
        ]

    @abstractmethod
    def mask(
        self, sharding: Sharding, lengths: Ints, total: int, rank: int, slices: Slices | None = None
    ) -> ContextMask:
        """The mask of one rank."""

    @abstractmethod
    def exchange(self, model: ModelShape, tensor: int) -> Exchange:
        """What it moves and holds, with the heads divided over `tensor` tensor-parallel ranks."""

    def heads(self, heads: int, kv_heads: int, rank: int) -> tuple[int, int]:
        """Query and key heads in a rank's calls of the kernel, out of a tensor-parallel rank's."""
        return heads, kv_heads
