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
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.layout import Sharding, segments, whole
from wlb_titan.cost.attention_latency import AttentionLatency
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
        "hybrid": "wlb_titan.context.all_gather:Hybrid",
        "ulysses": "wlb_titan.context.ulysses:Ulysses",
        "auto": "wlb_titan.context.all_gather:Auto",
    },
)


class MoveSeconds(NamedTuple):
    """What a collective of context parallelism takes in a layer, all passes together.

    Attributes:
        token: seconds for each token of the group that travels.
        each: seconds besides.
    """

    token: float
    each: float


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
        return cls(segments(whole(lengths), lengths), (), keys)


class KeyShares(NamedTuple):
    """Keys and values of a micro-batch that the context-parallel rank with most of them has, over those of
    all of its tokens.

    Attributes:
        gathered: what collectives bring.
        held: what attention reads.
    """

    gathered: float
    held: float


ALL_KEYS = KeyShares(1.0, 1.0)
"""Every rank gathers all: the most that may be needed."""


class Move(NamedTuple):
    """Collectives of a layer, in the forward pass and again for gradients in the backward pass.

    Attributes:
        received: elements from other ranks, for each token that travels.
        collectives: how many they come in.
        ranks: ranks of the group.
        stride: how many context-parallel ranks its members lie apart.
        kept: elements of its result that selective activation checkpointing keeps for the backward pass,
            instead of moving them again. torchtitan's keeps what all-to-alls bring.
        always: whether it moves all tokens of every micro-batch, about; packing counts on that.
    """

    received: float
    collectives: int
    ranks: int
    stride: int = 1
    kept: float = 0.0
    always: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What a rank's attention moves and holds in one layer, in elements for each token of the micro-batch.

    Attributes:
        moves: what travels.
        sent: held while they travel, beside what the model has anyway.
        keys: elements of keys and values; a rank may have those of some tokens only (`ContextStrategy.keys`).
        outputs: elements of queries and of attention's output each, where attention works on others than the
            rank's own tokens and so has copies of both; 0 where it works on the rank's own.
    """

    moves: tuple[Move, ...]
    sent: float
    keys: float
    outputs: float = 0.0

    @property
    def kept(self) -> float:
        """What selective activation checkpointing keeps of it."""
        return sum(move.kept for move in self.moves)


def gathered(
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


class ContextStrategy(Plugin, ABC):
    """Divides micro-batches over context-parallel ranks.

    Args:
        ranks: context-parallel degree, at least 2.
        latency: predicts attention time; of all query heads that a tensor-parallel rank has.
        moves: what each of the moves of its `exchange` takes; empty where that does not count.

    Attributes:
        attention: "module:Class" of the half that moves tensors; see `runtime/attention/module.py`.
        merges: whether data-parallel ranks may join its ranks for some micro-batches (DP-Merge): if it works
            on any number of them, wherever they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[wlb.sharding]: how context parallelism divides a micro-batch over its ranks."""

        family = STRATEGIES

        profile: str = ""
        """File with the measured attention times of the device, from `wlb-titan profile`. Empty: the
        cluster's own figures."""

    attention: ClassVar[str]
    merges: ClassVar[bool] = False

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
        """Refuses a model whose heads this strategy cannot share.

        Raises:
            PlanError: it cannot; `setting` is the key that is wrong, such as sharding.policy.
        """

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
            total: tokens of the sequence with its padding, which comes last.
            slices: what lies elsewhere of these documents; None where all of them are whole.

        Returns:
            How it is divided in the end, for reports; and per rank its runs. What is left of a rank's
            total / ranks tokens is padding.

        Raises:
            PlanError: there are fewer tokens than ranks, or the total does not divide.
        """
        tokens = int(lengths.sum())
        if tokens < self.ranks:
            raise PlanError(
                f"{micro_batch} has {tokens} tokens, fewer than the {self.ranks} context-parallel ranks that "
                "share it. Use a smaller context-parallel degree, a longer context window or longer "
                "documents."
            )
        if total % self.divisor:
            raise PlanError(
                f"{micro_batch} has {total} tokens with its padding, which {self.ranks} context-parallel "
                f"ranks cannot divide. Pad it to a multiple of {self.divisor}."
            )
        if total < tokens:
            raise PlanError(f"{micro_batch} has documents of {tokens} tokens but room for only {total}.")
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
        first (`layout.after`).
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
