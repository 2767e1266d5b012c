"""All-gather context parallelism (paper section 5): a rank attends with its own queries to everybody's keys.

Keys and values are gathered over the ranks in every layer, as in Llama 3. What a rank's queries cost depends
on which tokens it holds, and that is what the four shardings differ in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from wlb_titan.context.document import per_document, per_document_round_robin
from wlb_titan.context.hybrid import hybrid
from wlb_titan.context.layout import Ints, Sharding, after, segments, sequence_positions
from wlb_titan.context.sequence import per_sequence
from wlb_titan.context.strategy import ContextStrategy, Exchange, Floats, gathered
from wlb_titan.cost.attention_latency import AttentionLatency, slowest
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError


class AllGather(ContextStrategy):
    """What the shardings have in common; a sharding is a subclass with a `divide` of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextStrategy.Config):
        remainder: Literal["spread", "round_robin"] = "spread"
        """What `per_document` does with the tokens that 2 x CP equal chunks leave over: `spread` makes some
        chunks one token longer, `round_robin` deals the tokens out one by one, as in the paper."""

        gather_groups: Annotated[int, Ge(1)] = 1
        """Groups of heads in which keys and values are gathered. With more than one, a group attends while
        the next one's keys still travel, which pays where context parallelism crosses nodes. It must divide
        the key heads of a tensor-parallel rank."""

    attention = "wlb_titan.runtime.all_gather:AllGatherAttention"
    merges = True

    def __init__(self, config: Any, ranks: int, latency: AttentionLatency) -> None:
        super().__init__(config, ranks, latency)
        self._groups: int = config.gather_groups
        self._per_document = per_document if config.remainder == "spread" else per_document_round_robin

    @property
    def divisor(self) -> int:
        return 2 * self.ranks

    def check(self, model: ModelShape, tensor: int) -> None:
        heads = model.kv_heads // tensor
        if self._groups < 1 or heads % self._groups:
            raise PlanError(
                f"{self._groups} groups do not divide the {heads} key heads of a rank at a tensor-parallel "
                f"degree of {tensor}; set gather_groups to a divisor of {heads}.",
                setting="sharding.gather_groups",
            )

    def seconds(self, sharding: Sharding) -> Floats:
        return self.latency.seconds(sharding)

    def heads(self, heads: int, kv_heads: int, rank: int) -> tuple[int, int]:
        return heads // self._groups, kv_heads // self._groups

    def mask(
        self, sharding: Sharding, lengths: Ints, total: int, rank: int
    ) -> tuple[NDArray[np.int32], tuple[Ints, ...]]:
        """Segments of the rank's own queries; the order of the gathered keys."""
        order = key_order(sequence_positions(sharding, lengths, total))
        return segments(sharding[rank], lengths), (order,)

    def exchange(self, model: ModelShape, tensor: int) -> Exchange:
        return gathered(model, tensor, self.ranks, self._groups)

    def waited(self, communication: Floats, attention: Floats) -> Floats:
        """Only the first group's gather is waited for as a whole; each later one overlaps with attention."""
        rest = (self._groups - 1) / self._groups * np.maximum(communication - attention, 0)
        waited: Floats = communication / self._groups + rest
        return waited


class PerSequence(AllGather):
    """The packed sequence is cut into 2 x CP chunks; rank i takes chunks i and 2 CP - 1 - i."""

    def divide(self, lengths: Ints, total: int) -> tuple[str, Sharding]:
        return "per_sequence", per_sequence(lengths, total, self.ranks)


class Auto(PerSequence):
    """Whichever policy is predicted fastest on these documents; `per_sequence` until it is chosen."""

    automatic = True


class PerDocument(AllGather):
    """The same within every document, so that all ranks do the same work."""

    def divide(self, lengths: Ints, total: int) -> tuple[str, Sharding]:
        return "per_document", self._per_document(lengths, total, self.ranks)


class Adaptive(AllGather):
    """For each micro-batch the one of these two whose slowest rank is predicted faster (section 5.3)."""

    def divide(self, lengths: Ints, total: int) -> tuple[str, Sharding]:
        return self._fastest(self.candidates(lengths, total), None)

    def divide_slices(self, lengths: Ints, total: int, prefix: Ints) -> tuple[str, Sharding]:
        return self._fastest(self.candidates(lengths, total), prefix)

    def _fastest(self, shardings: dict[str, Sharding], prefix: Ints | None) -> tuple[str, Sharding]:
        return min(shardings.items(), key=lambda named: slowest(self.seconds(after(named[1], prefix))))

    def candidates(self, lengths: Ints, total: int) -> dict[str, Sharding]:
        """Shardings by name; of equally fast ones the first is taken."""
        return {
            "per_sequence": per_sequence(lengths, total, self.ranks),
            "per_document": self._per_document(lengths, total, self.ranks),
        }


class Hybrid(Adaptive):
    """Long documents per document, short ones whole on one rank, where that is predicted fastest."""

    def candidates(self, lengths: Ints, total: int) -> dict[str, Sharding]:
        best = hybrid(lengths, total, self.ranks, self.latency)
        return {**super().candidates(lengths, total), "hybrid": best}


def key_order(positions: Ints) -> Ints:
    """int64 (n,): where each token lies among those gathered rank by rank, in document order.

    Args:
        positions: int64 (ranks, n / ranks), of `sequence_positions`.
    """
    order = np.empty(positions.size, dtype=np.int64)
    order[positions.ravel()] = np.arange(positions.size)  # the inverse of a permutation
    return order
