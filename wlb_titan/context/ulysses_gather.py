"""Ulysses within groups of ranks, and keys gathered between them: two-dimensional context parallelism.

`context_parallel_degree` is split in two. The ranks of a group, which share a node, exchange tokens for heads
as in `ulysses`; then each gathers the keys and values of its heads from the ranks with the same heads in the
other groups. So only keys of a share of the heads cross the network, and there may be more ranks than heads.
LoongTrain (Gu et al., 2024) calls it 2D-attention, with a ring where keys are gathered here.

The sequence is divided over groups per document, as all-gather context parallelism does, and a group's tokens
among its ranks in a row.

Example: 4 ranks in groups of 2, one document of 16 tokens: group 0 has tokens 0-3 and 12-15, so rank 0 holds
0-3 and rank 1 holds 12-15; group 1 has 4-11, rank 2 of them 4-7 and rank 3 8-11.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.all_gather import gathered_mask, key_shares
from wlb_titan.context.layout import Sharding, per_document, sent_tokens, spans, widest_first
from wlb_titan.context.strategy import ContextMask, ContextStrategy, Exchange, KeyShares, Move, MoveSeconds
from wlb_titan.context.ulysses import head_shares
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET, Slices


class UlyssesGather(ContextStrategy):
    """Ulysses within groups of ranks, and keys gathered between them."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextStrategy.Config):
        within: Annotated[int, Ge(1)] = 2
        """Ranks of a group, neighbours that exchange tokens for heads; it must divide the context-parallel
        degree."""

    attention = "wlb_titan.runtime.attention.ulysses_gather:UlyssesGatherAttention"

    def __init__(
        self, config: Config, ranks: int, latency: AttentionLatency, moves: Sequence[MoveSeconds] = ()
    ) -> None:
        super().__init__(config, ranks, latency, moves)
        self._within = config.within

    @property
    def _groups(self) -> int:
        return self.ranks // self._within

    @property
    def divisor(self) -> int:
        return math.lcm(2 * self._groups, self.ranks)

    @property
    def meshes(self) -> Sequence[Mapping[str, int]]:
        return ({"cp_between": self._groups, "cp_within": self._within},)

    def check(self, model: ModelShape, tensor: int) -> None:
        if self.ranks % self._within:
            raise PlanError(
                f"{self.ranks} context-parallel ranks cannot be divided into groups of {self._within}; set "
                f"within to a divisor of {self.ranks}.",
                setting="sharding.within",
            )
        head_shares(model.heads // tensor, model.kv_heads // tensor, self._within)

    def divide(self, lengths: Ints, total: int) -> tuple[str, Sharding]:
        return self._divided(lengths, total, None)

    def divide_slices(self, lengths: Ints, total: int, slices: Slices) -> tuple[str, Sharding]:
        return self._divided(lengths, total, slices)

    def _divided(self, lengths: Ints, total: int, slices: Slices | None) -> tuple[str, Sharding]:
        groups = per_document(lengths, total, self._groups)
        groups = widest_first(groups, spans(groups, (self._groups,), slices))
        share = total // self.ranks
        return "ulysses_gather", tuple(part for group in groups for part in _cut(group, share, self._within))

    def seconds(self, sharding: Sharding) -> Floats:
        """Seconds of the group's queries, with a rank's share of the heads."""
        groups = self._of_groups(sharding)
        shares = head_shares(self.latency.heads, self.latency.heads // self.latency.group, self._within)
        heads = [share.query_heads for share in shares]
        seconds = {n: replace(self.latency, heads=n).seconds(groups) for n in set(heads)}
        return np.array([seconds[n][group] for group in range(self._groups) for n in heads])

    def mask(
        self, sharding: Sharding, lengths: Ints, total: int, rank: int, slices: Slices | None = None
    ) -> ContextMask:
        """Segments of the group's queries; keys are gathered group by group."""
        groups = self._of_groups(sharding)
        return gathered_mask(groups, lengths, total, rank // self._within, (self._groups,), slices)

    def travelling(self, sharding: Sharding, total: int, slices: Slices | None = None) -> tuple[int, ...]:
        """All tokens within groups, and between them those of documents that lie in several."""
        groups = self._of_groups(sharding)
        sent = sent_tokens(groups, spans(groups, (self._groups,), slices), 1)
        return total, int(sent[0].max()) * self._groups

    def keys(self, sharding: Sharding, total: int, slices: Slices | None = None) -> KeyShares:
        return key_shares(self._of_groups(sharding), total, (self._groups,), slices)

    def heads(self, heads: int, kv_heads: int, rank: int) -> tuple[int, int]:
        share = head_shares(heads, kv_heads, self._within)[rank % self._within]
        return share.query_heads, share.key_heads

    def exchange(self, model: ModelShape, tensor: int) -> Exchange:
        shares = head_shares(model.heads // tensor, model.kv_heads // tensor, self._within)
        queries = max(share.query_heads for share in shares)
        keys = max(share.key_heads for share in shares) * model.head_dims
        groups = self._groups
        brought = (queries * model.head_dim + keys) / groups
        exchanged = (queries * model.head_dims + keys) / groups * (1 - 1 / self._within)
        return Exchange(
            moves=(
                Move(exchanged, 2, self._within, kept=brought),
                Move(keys * (1 - 1 / groups), 1, groups, stride=self._within),
            ),
            sent=brought,
            keys=keys,
            outputs=queries * model.head_dim / groups,
        )

    def _of_groups(self, sharding: Sharding) -> Sharding:
        """The runs of each group: those of its ranks, joined where they were cut."""
        firsts = range(0, self.ranks, self._within)
        return tuple(_joined(np.concatenate(sharding[first : first + self._within])) for first in firsts)


def _cut(runs: Ints, share: int, parts: int) -> list[Ints]:
    """Runs in parts of `share` tokens each; the last ones may have fewer, or none."""
    ends = np.cumsum(runs[:, COUNT])
    begins = ends - runs[:, COUNT]
    result = []
    for part in range(parts):
        low = np.maximum(begins, part * share)
        count = np.minimum(ends, (part + 1) * share) - low
        cut = np.stack([runs[:, DOCUMENT], runs[:, OFFSET] + low - begins, count], axis=1)
        result.append(cut[count > 0])
    return result


def _joined(runs: Ints) -> Ints:
    """Runs of tokens, those that touch made one."""
    same = runs[1:, DOCUMENT] == runs[:-1, DOCUMENT]
    heads = np.append(True, ~(same & (runs[1:, OFFSET] == runs[:-1, OFFSET] + runs[:-1, COUNT])))
    first = np.flatnonzero(heads[: len(runs)])
    joined = runs[first]
    if len(first):
        joined[:, COUNT] = np.add.reduceat(runs[:, COUNT], first)
    return joined
