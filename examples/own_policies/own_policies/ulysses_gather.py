"""A strategy on two mesh axes: Ulysses within groups of ranks, and keys gathered between them.

This half is for planning, memory and time; `ulysses_gather_attention` moves the tensors.

`context_parallel_degree` is split in two. The ranks of a group, which share a node, exchange tokens for heads
as in `ulysses`; then each gathers the keys and values of its heads from the ranks with the same heads in the
other groups. So only keys of some heads cross the network, and there may be more ranks than heads. LoongTrain
(Gu et al., 2024) calls it 2D-attention, with a ring where keys are gathered here.

The sequence is divided over groups per document, as in all-gather context parallelism, and a group's tokens
over its ranks in order.

Example: 4 ranks in groups of 2, one document of 16 tokens: group 0 has tokens 0-3 and 12-15, so rank 0 holds
0-3 and rank 1 holds 12-15; group 1 has 4-11, rank 2 of them 4-7 and rank 3 8-11.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge

from wlb_titan.context.all_gather import gathered_mask, key_shares
from wlb_titan.context.layout import per_document, sent_tokens, spans, widest_first
from wlb_titan.context.strategy import ContextStrategy, Exchange, Move
from wlb_titan.context.ulysses import head_shares
from wlb_titan.errors import PlanError
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET


class UlyssesGather(ContextStrategy):
    """Ulysses within groups of ranks, and keys gathered between them."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextStrategy.Config):
        within: Annotated[int, Ge(1)] = 2
        """Ranks of a group, neighbours that exchange tokens for heads; it must divide the context-parallel
        degree."""

    attention = "own_policies.ulysses_gather_attention:UlyssesGatherAttention"

    def __init__(self, config, ranks, latency, moves=()):
        super().__init__(config, ranks, latency, moves)
        self._within = config.within

    @property
    def _groups(self):
        return self.ranks // self._within

    @property
    def divisor(self):
        return math.lcm(2 * self._groups, self.ranks)

    @property
    def meshes(self):
        return ({"cp_between": self._groups, "cp_within": self._within},)

    def check(self, model, tensor):
        if self.ranks % self._within:
            raise PlanError(
                f"{self.ranks} context-parallel ranks cannot be divided into groups of {self._within}; set "
                f"within to a divisor of {self.ranks}.",
                setting="context.within",
            )
        head_shares(model.heads // tensor, model.kv_heads // tensor, self._within)

    def divide(self, lengths, total, slices):
        groups = per_document(lengths, total, self._groups)
        groups = widest_first(groups, spans(groups, (self._groups,), slices))
        share = total // self.ranks
        return "ulysses_gather", tuple(part for group in groups for part in _cut(group, share, self._within))

    def seconds(self, sharding):
        """Seconds of the group's queries with each rank's heads."""
        groups = self._of_groups(sharding)
        shares = head_shares(self.latency.heads, self.latency.heads // self.latency.group, self._within)
        heads = [share.query_heads for share in shares]
        seconds = {n: replace(self.latency, heads=n).seconds(groups) for n in set(heads)}
        return np.array([seconds[n][group] for group in range(self._groups) for n in heads])

    def mask(self, sharding, lengths, total, rank, slices=None):
        """Segments of the group's queries; keys are gathered between groups."""
        groups = self._of_groups(sharding)
        return gathered_mask(groups, lengths, total, rank // self._within, (self._groups,), slices)

    def travelling(self, sharding, total, slices=None):
        """All tokens within groups; between groups, those of documents that lie in several."""
        groups = self._of_groups(sharding)
        sent = sent_tokens(groups, spans(groups, (self._groups,), slices), 1)
        return total, int(sent[0].max()) * self._groups

    def keys(self, sharding, total, slices=None):
        return key_shares(self._of_groups(sharding), total, (self._groups,), slices)

    def heads(self, heads, kv_heads, rank):
        share = head_shares(heads, kv_heads, self._within)[rank % self._within]
        return share.query_heads, share.key_heads

    def exchange(self, model, tensor):
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

    def _of_groups(self, sharding):
        """The runs of each group's ranks, joined where they were cut."""
        firsts = range(0, self.ranks, self._within)
        return tuple(_joined(np.concatenate(sharding[first : first + self._within])) for first in firsts)


def _cut(runs, share, parts):
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


def _joined(runs):
    """Makes runs that touch one."""
    same = runs[1:, DOCUMENT] == runs[:-1, DOCUMENT]
    heads = np.append(True, ~(same & (runs[1:, OFFSET] == runs[:-1, OFFSET] + runs[:-1, COUNT])))
    first = np.flatnonzero(heads[: len(runs)])
    joined = runs[first]
    if len(first):
        joined[:, COUNT] = np.add.reduceat(runs[:, COUNT], first)
    return joined
