"""Ulysses context parallelism: ranks exchange tokens for heads, and attend to whole sequences
(docs/context_parallel.md; Jacobs et al., DeepSpeed Ulysses, 2023).

Heads need not divide evenly. A rank takes key heads with all their queries; where there are fewer key heads
than ranks, several ranks hold one of them and share its queries.

Example: 4 query heads, 2 key heads, 3 ranks. Two ranks share key head 0, and one has key head 1 with both of
its queries:

    >>> [(range(4)[share.queries], range(2)[share.keys]) for share in head_shares(4, 2, 3)]
    [(range(0, 1), range(0, 1)), (range(1, 2), range(0, 1)), (range(2, 4), range(1, 2))]
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.layout import Sharding, from_runs
from wlb_titan.context.strategy import ContextMask, ContextStrategy, Exchange, Move
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError
from wlb_titan.plan import COUNT, DOCUMENT, Slices


class Share(NamedTuple):
    queries: slice
    keys: slice

    @property
    def query_heads(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @property
    def key_heads(self) -> int:
        return int(self.keys.stop - self.keys.start)


def head_shares(heads: int, kv_heads: int, ranks: int) -> list[Share]:
    """Each rank's share of query `heads`, which are a multiple of `kv_heads`."""
    if ranks > heads:
        raise PlanError(
            f"With ulysses {ranks} context-parallel ranks cannot share {heads} query heads; lower the degree "
            "of context or of tensor parallelism, or choose another policy.",
            setting="wlb.policy",
        )
    group = heads // kv_heads
    if ranks <= kv_heads:
        cuts = _cuts(kv_heads, ranks)
        return [Share(slice(low * group, high * group), slice(low, high)) for low, high in pairwise(cuts)]
    shares = []
    sharing = np.diff(_cuts(ranks, kv_heads))  # ranks of each key head
    for key, count in enumerate(sharing.tolist()):
        cuts = [key * group + cut for cut in _cuts(group, count)]
        shares += [Share(slice(low, high), slice(key, key + 1)) for low, high in pairwise(cuts)]
    return shares


def _cuts(count: int, parts: int) -> list[int]:
    """Bounds of parts of 0 to `count` that differ by one at most, the larger ones first."""
    size, more = divmod(count, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


class Ulysses(ContextStrategy):
    """Each rank attends with its share of the heads to the whole sequence."""

    attention = "wlb_titan.runtime.attention.exchange:UlyssesAttention"

    def check(self, model: ModelShape, tensor: int) -> None:
        head_shares(model.heads // tensor, model.kv_heads // tensor, self.ranks)

    def divide(self, lengths: Ints, total: int, slices: Slices | None) -> tuple[str, Sharding]:
        begin = np.arange(self.ranks) * (total // self.ranks)
        runs = from_runs(np.arange(self.ranks), begin, begin + total // self.ranks, lengths, self.ranks)
        return "ulysses", runs

    def seconds(self, sharding: Sharding) -> Floats:
        runs = np.concatenate(sharding)
        _, first = np.unique(runs[:, DOCUMENT], return_index=True)
        documents = runs[first]  # each as one run
        documents[:, COUNT] = np.bincount(runs[:, DOCUMENT], runs[:, COUNT])
        shares = head_shares(self.latency.heads, self.latency.heads // self.latency.group, self.ranks)
        heads = [share.query_heads for share in shares]
        seconds = {n: replace(self.latency, heads=n).seconds((documents,))[0] for n in set(heads)}
        return np.array([seconds[n] for n in heads])

    def mask(
        self, sharding: Sharding, lengths: Ints, total: int, rank: int, slices: Slices | None = None
    ) -> ContextMask:
        """Segments of whole documents, as tokens arrive in the order of the sequence."""
        return ContextMask.of_sequence(lengths)

    def heads(self, heads: int, kv_heads: int, rank: int) -> tuple[int, int]:
        share = head_shares(heads, kv_heads, self.ranks)[rank]
        return share.query_heads, share.key_heads

    def exchange(self, model: ModelShape, tensor: int) -> Exchange:
        heads, kv_heads = model.heads // tensor, model.kv_heads // tensor
        shares = head_shares(heads, kv_heads, self.ranks)
        queries = max(share.query_heads for share in shares)
        keys = max(share.key_heads for share in shares) * model.head_dims
        others = (self.ranks - 1) / self.ranks
        brought = queries * model.head_dim + keys
        received = (queries * model.head_dims + keys) * others
        return Exchange(
            moves=(Move(received, 2, self.ranks, kept=brought),),
            sent=brought,
            keys=keys,
            outputs=queries * model.head_dim,
        )
