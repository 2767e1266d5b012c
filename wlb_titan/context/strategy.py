"""The base of context-parallel strategies: who holds which tokens, who attends to what, and what that costs.

A micro-batch is one packed sequence. A strategy divides its tokens over the context-parallel ranks, and says
what the ranks send each other so that every query meets its keys. Planner, memory, cost model, simulator and
training ask it and know none by name; the half that moves tensors is a class of its own (`attention`), as
planning needs no torch.
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
from wlb_titan.context.layout import Sharding, segments, whole_sequence
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.cluster import Cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.workload import BYTES
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
        "hybrid": "wlb_titan.context.all_gather:Hybrid",
        "ulysses": "wlb_titan.context.ulysses:Ulysses",
        "auto": "wlb_titan.context.all_gather:Auto",
    },
)


class ContextMask(NamedTuple):
    """What the attention of one rank needs to know of a micro-batch.

    Attributes:
        segments: int32 (S, 4), as `wlb_titan.kernels.varlen_attention` takes them; each segment's keys from
            its document's first.
        exchange: what the strategy's `attention` gets besides: int64 arrays and numbers, in tuples. It gets
            tensors on its device, for a number n an empty one, (n, 0): compiled code then serves any number.
        keys: int64 (k, 2), the documents whose keys the rank has, in the order in which they lie there:
            number (-1 for padding between documents) and tokens. Behind the last there is padding.
    """

    segments: NDArray[np.int32]
    exchange: tuple[Any, ...]
    keys: Ints

    @classmethod
    def of_sequence(cls, lengths: Ints) -> ContextMask:
        """The mask of a rank with all documents, queries and keys in the order of the sequence."""
        keys = np.stack([np.arange(len(lengths)), lengths], axis=1)
        return cls(segments(whole_sequence(lengths), lengths), (), keys)


class KeyShares(NamedTuple):
    """Keys and values of a micro-batch that the context-parallel rank with most of them has, over those of
    all of its tokens: what collectives bring, and what attention reads."""

    gathered: float
    held: float


ALL_KEYS = KeyShares(1.0, 1.0)
"""Every rank gathers all: the most that may be needed."""


class Move(NamedTuple):
    """Collectives of a layer, in the forward pass and again for gradients in the backward pass."""

    received: float  # elements from other ranks, for each token that travels
    collectives: int  # that they come in
    ranks: int  # of the group
    stride: int = 1  # context-parallel ranks that neighbours in the group lie apart
    kept: float = 0.0
    """Elements of its result that selective activation checkpointing keeps for the backward pass, instead of
    moving them again. torchtitan's keeps what all-to-alls bring."""
    always: bool = True
    """Whether it moves all tokens of every micro-batch, about; packing counts on that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What a rank's attention moves and holds in one layer, in elements for each token of the micro-batch."""

    moves: tuple[Move, ...]
    sent: float  # held while they travel, beside what the model has anyway
    keys: float  # and values; a rank may have those of some tokens only (`ContextStrategy.keys`)
    outputs: float = 0.0
    """Queries and attention's output each, where attention works on others than the rank's own tokens and so
    has copies of both; 0 where it works on the rank's own."""

    @property
    def kept(self) -> float:
        """What selective activation checkpointing keeps of it."""
        return sum(move.kept for move in self.moves)


def all_gather_exchange(
    model: ModelShape,
    tensor: int,
    ranks: int,
    levels: Sequence[int] = (),
    *,
    always: bool = True,
) -> Exchange:
    """The exchange where every rank holds the keys and values of all `ranks`, or of some in its groups.

    Args:
        model, tensor: as of `ContextStrategy.exchange`.
        levels: sizes of groups within which they may be gathered; empty: all ranks.
        always: as of `Move`.
    """
    keys = model.key_elements(tensor)
    moves = tuple(Move(keys * (size - 1) / size, 1, size, always=always) for size in levels or (ranks,))
    return Exchange(moves=moves, sent=keys / ranks, keys=keys)


class MoveSeconds(NamedTuple):
    """What a collective of context parallelism takes in a layer: seconds for each token of the group that
    travels, and each time besides."""

    token: float
    each: float


class ExchangeSeconds(NamedTuple):
    """What context parallelism's collectives in a layer take for a micro-batch, in seconds."""

    moving: float  # of one pass, by bandwidth
    repeated: float  # of those that activation checkpointing repeats in the backward pass
    latency: float  # of one pass


@dataclass(frozen=True)
class ExchangeCost:
    """The collectives of one layer on the hardware of a job."""

    moves: tuple[Move, ...]  # none without context parallelism
    cluster: Cluster
    stride: int  # ranks that two context-parallel neighbours are apart
    repeats: bool  # whether activation checkpointing moves again what it does not keep

    @classmethod
    def of(
        cls,
        strategy: ContextStrategy | None,
        model: ModelShape,
        cluster: Cluster,
        degrees: Degrees,
        *,
        repeats: bool,
    ) -> ExchangeCost:
        moves = () if strategy is None else strategy.exchange(model, degrees.tensor).moves
        return cls(moves, cluster, degrees.strides["cp"], repeats)

    def price(self, move: Move, passes: int) -> MoveSeconds:
        """What a collective takes in a number of passes."""
        link = self.cluster.link(move.ranks, self.stride * move.stride)
        token = BYTES * move.received / link.bandwidth
        return MoveSeconds(passes * token, passes * move.collectives * link.latency)

    def passes(self, move: Move) -> int:
        """How often it runs for a micro-batch: forward, backward, and once more where it is not kept."""
        return 3 if self.repeats and not move.kept else 2

    def of_moves(self) -> list[MoveSeconds]:
        """In all passes, of each move."""
        return [self.price(move, self.passes(move)) for move in self.moves]

    def seconds(self, travelling: Sequence[float]) -> ExchangeSeconds:
        """For a micro-batch, by the tokens that travel in each move."""
        moving = repeated = latency = 0.0
        for tokens, move in zip(travelling, self.moves, strict=True):
            price = self.price(move, 1)
            moving += tokens * price.token
            repeated += 0.0 if move.kept else tokens * price.token
            latency += price.each if tokens else 0.0
        return ExchangeSeconds(moving, repeated, latency)

    @cached_property
    def always(self) -> ExchangeSeconds:
        """For each token of a micro-batch, of those that move all of them."""
        return self.seconds([float(move.always) for move in self.moves])

    def in_all_passes(self, travelling: Sequence[float]) -> tuple[float, float]:
        """Seconds of all passes of a micro-batch, the repeated ones too, and bytes that a rank receives in
        them."""
        seconds = received = 0.0
        for tokens, move, price in zip(travelling, self.moves, self.of_moves(), strict=True):
            seconds += tokens * price.token + price.each if tokens else 0.0
            received += self.passes(move) * tokens * BYTES * move.received
        return seconds, received


class ContextStrategy(Plugin, ABC):
    """Divides micro-batches over context-parallel ranks.

    Args:
        ranks: context-parallel degree, at least 2.
        latency: predicts attention time; of all query heads that a tensor-parallel rank has.
        moves: what each of the moves of its `exchange` takes in all passes; empty where that does not count.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[wlb.sharding]: how context parallelism divides a micro-batch over its ranks."""

        family = STRATEGIES

        profile: str = ""
        """File with the measured attention times of the device, from `wlb-titan profile`. Empty: the
        cluster's own figures."""

    attention: ClassVar[str]
    """The half that moves tensors, as "module:Class"; see `runtime/attention/module.py`."""

    merges: ClassVar[bool] = False
    """Whether data-parallel ranks may join its ranks for some micro-batches (DP-Merge): if it works on any
    number of them, wherever they are."""

    def __init__(
        self, config: Any, ranks: int, latency: AttentionLatency, moves: Sequence[MoveSeconds] = ()
    ) -> None:
        self.ranks = ranks
        self.latency = latency
        self.moves = tuple(moves)

    @property
    def divisor(self) -> int:
        """What the tokens of a micro-batch must be a multiple of."""
        return self.ranks

    @property
    def meshes(self) -> Sequence[Mapping[str, int]]:
        """The meshes that its `attention` is made with, each by names and sizes of its axes.

        Ranks of the last axis are neighbours. A mesh smaller than all of the ranks is one of several side by
        side, that in which the rank is.
        """
        return ({"cp": self.ranks},)

    def check(self, model: ModelShape, tensor: int) -> None:
        """Raises PlanError, with the setting to blame, for a model whose heads it cannot share."""

    def shard(
        self,
        lengths: Ints,
        total: int,
        *,
        slices: Slices | None = None,
        micro_batch: str = "The micro-batch",
    ) -> tuple[str, Sharding]:
        """Who holds which tokens.

        Args:
            lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
            total: tokens of the sequence with its padding, which comes last; a multiple of `divisor`.
            slices: what lies elsewhere of these documents; None where all of them are whole.

        Returns:
            How it is divided in the end, for reports; and per rank its runs. What is left of a rank's
            total / ranks tokens is padding.
        """
        tokens = int(lengths.sum())
        if tokens < self.ranks:
            raise PlanError(
                f"{micro_batch} has {tokens} tokens, fewer than the {self.ranks} context-parallel ranks that "
                "share it. Use a smaller context-parallel degree, a longer context window or longer "
                "documents."
            )
        assert tokens <= total and total % self.divisor == 0, f"{total} tokens are not padded"
        return self.divide(lengths, total) if slices is None else self.divide_slices(lengths, total, slices)

    @abstractmethod
    def divide(self, lengths: Ints, total: int) -> tuple[str, Sharding]:
        """`shard` of what has been found possible."""

    def divide_slices(self, lengths: Ints, total: int, slices: Slices) -> tuple[str, Sharding]:
        """`divide` where documents have slices elsewhere; the same unless a strategy weighs times."""
        return self.divide(lengths, total)

    @abstractmethod
    def seconds(self, sharding: Sharding) -> Floats:
        """float64 (ranks, 2), forward and backward seconds of one layer's attention on each rank.

        A run's queries see all tokens of its document up to themselves, also where no run begins with the
        first (`layout.with_prefix`).
        """

    def travelling(self, sharding: Sharding, total: int, slices: Slices | None = None) -> tuple[int, ...]:
        """The tokens for which a group of ranks exchanges what each move of `exchange` says.

        Of groups side by side the one with most of them counts.
        """
        return (total,)

    def keys(self, sharding: Sharding, total: int, slices: Slices | None = None) -> KeyShares:
        """What of the keys of a micro-batch a rank has at the most; arguments as of `travelling`."""
        return ALL_KEYS

    @abstractmethod
    def mask(
        self, sharding: Sharding, lengths: Ints, total: int, rank: int, slices: Slices | None = None
    ) -> ContextMask:
        """What the attention of a rank needs to know of a micro-batch."""

    @abstractmethod
    def exchange(self, model: ModelShape, tensor: int) -> Exchange:
        """What it moves and holds, where tensor parallelism of this degree divides the heads."""

    def heads(self, heads: int, kv_heads: int, rank: int) -> tuple[int, int]:
        """Query and key heads of a rank's calls of the kernel, of those that tensor parallelism leaves it."""
        return heads, kv_heads
