"""How long the attention kernel takes for what one context-parallel rank holds (paper sections 5.2 and 5.3).

A kernel cuts queries into tiles and walks over blocks of keys, so time follows tiles and blocks, not tokens:
a tile with one query costs what a full one does, and a block on the diagonal costs its masking besides. The
time of a segment is a sum over its tiles,

    segment + tiles x tile + blocks x block + masked blocks x masked

in seconds of one query head on one of the device's `units` (multiprocessors) that work side by side. A launch
then lasts at least as long as all work spread evenly over the units, and as the longest tile:

    launch + keys x key x heads / units + max(sum of the work of all heads / units, longest tile)

That is a lower bound of any schedule, and a tight one where tiles are many and start heaviest first. `keys`
are those of the whole sequence, which are copied or written whoever sees them; they are the same for all
ranks.

Example: tiles of 4 queries, blocks of 4 keys, and the last 6 tokens of a document of 10. The first tile sees
8 keys in two blocks, the second 10 keys in three, and in both all rows see all but the last block whole:

    >>> tiling = Tiling(query_tile=4, key_block=4)
    >>> tiling.count(np.array([6]), np.array([10])).tolist()   # tiles, blocks, masked blocks
    [[2.0], [5.0], [2.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.plan import COUNT, OFFSET

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel divides its work.

    Attributes:
        query_tile: query tokens of a tile.
        key_block: keys that a tile reads at a time; a multiple or a divisor of `query_tile`.
        merge_keys: neighbouring segments of at most so many keys share tiles; 0 where each has its own.
        heads_per_tile: query heads that one tile computes (packed GQA).
    """

    query_tile: int
    key_block: int
    merge_keys: int = 0
    heads_per_tile: int = 1

    def __post_init__(self) -> None:
        small, large = sorted((self.query_tile, self.key_block))
        if small < 1 or large % small:
            raise ValueError(
                f"Tiles of {self.query_tile} queries and blocks of {self.key_block} keys do not divide each "
                "other."
            )

    def count(self, q_len: NDArray[Any], kv_len: NDArray[Any]) -> Floats:
        """Tiles, blocks of keys, and those of them that must be masked, per query head.

        Args:
            q_len: integers (n,), queries of each segment, at least 1.
            kv_len: integers (n,), keys that its last query sees, at least q_len.

        Returns:
            float64 (3, n); exact for segments with their own tiles, an average for merged ones.
        """
        queries, keys = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        if not self.merge_keys:
            return self._own(queries, keys)
        counts = np.empty((3, len(keys)))
        merged = keys <= self.merge_keys
        counts[:, merged] = self._merged(queries[merged], keys[merged])
        counts[:, ~merged] = self._own(queries[~merged], keys[~merged])
        return counts

    def largest(self, kv_len: NDArray[Any]) -> Floats:
        """float64 (3, n), the `count` of one full tile whose last query sees `kv_len` keys, at the most."""
        blocks = np.ceil(kv_len / self.key_block)
        ones = np.ones(len(blocks))
        return np.array([ones, blocks, ones * (1 + self.query_tile // self.key_block)])

    def _own(self, queries: Floats, keys: Floats) -> Floats:
        """`count` of segments with their own tiles."""
        seen = keys - queries  # before the first query's own key
        tiles = np.ceil(queries / self.query_tile)
        blocks = self._blocks(seen, tiles - 1) + np.ceil(keys / self.key_block)
        unmasked = self._blocks(seen + (2 - self.key_block - self.query_tile), tiles)
        return np.array([tiles, blocks, blocks - unmasked])

    def _merged(self, queries: Floats, keys: Floats) -> Floats:
        """`count` of segments that share tiles, on average over where tiles happen to begin.

        A segment is charged the share of a tile that its queries fill; its keys once, and for each cut
        between tiles that falls into it those before the cut once more; and half a block more for each tile,
        the rest of the tile's last one. All blocks are masked.
        """
        share = queries / self.query_tile
        blocks = (keys + share * (keys - queries / 2)) / self.key_block + share / 2
        return np.array([share, blocks, blocks])

    def _blocks(self, keys: Floats, tiles: Floats) -> Floats:
        """Sum over j = 1 .. tiles of ceil((keys + j query_tile) / key_block)."""
        if self.query_tile % self.key_block == 0:
            ratio = self.query_tile // self.key_block
            return tiles * (np.ceil(keys / self.key_block) + ratio / 2 * (tiles + 1))
        ratio = self.key_block // self.query_tile
        begin = np.ceil(keys / self.query_tile)
        return _sum_of_ceilings(begin + tiles, ratio) - _sum_of_ceilings(begin, ratio)


def _sum_of_ceilings(n: Floats, ratio: int) -> Floats:
    """Sum over i = 1 .. n of ceil(i / ratio); for n below 1, minus the sum over n + 1 .. 0."""
    full = np.floor(n / ratio)
    return (full + 1) * (n - ratio / 2 * full)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What the pieces of one pass cost, in seconds; all but `launch` per query head, on one unit.

    Attributes:
        tiling: how the kernel divides its work.
        launch: fixed time of the whole pass.
        key: of each key of the sequence.
        segment: of each segment, for kernels that treat them one by one.
        tile: of each tile of queries.
        block: of each block of keys of a tile.
        masked: what a block costs more if it must be masked.
    """

    tiling: Tiling
    launch: float
    key: float
    segment: float
    tile: float
    block: float
    masked: float

    def slower(self, factor: float) -> KernelCost:
        """A kernel whose work takes `factor` times as long, and its launch what it took."""
        costs = ("key", "segment", "tile", "block", "masked")
        return replace(self, **{name: getattr(self, name) * factor for name in costs})

    def work(self, counts: Floats) -> Floats:
        """float64 (n,), seconds of segments with these `Tiling.count`s, which are (3, n)."""
        return np.array([self.tile, self.block, self.masked]) @ counts + self.segment

    def longest_tile(self, kv_len: NDArray[Any]) -> Floats:
        """float64 (n,), seconds of one full tile whose last query sees `kv_len` keys."""
        return self.work(self.tiling.largest(kv_len)) * self.tiling.heads_per_tile


@dataclass(frozen=True, slots=True)
class AttentionLatency:
    """Predicts the attention of one layer on one device.

    Attributes:
        forward, backward: the kernels of the two passes.
        units: programs that the device runs side by side: its multiprocessors.
        heads: query heads on this device (those of the model over the tensor-parallel degree).
        source: where the coefficients come from, for reports.
        measured_to: keys of the longest segment that was measured; beyond it predictions extrapolate. None
            where it is not known.
    """

    forward: KernelCost
    backward: KernelCost
    units: int
    heads: int
    source: str
    measured_to: int | None = None

    def work(self, q_len: NDArray[Any], kv_len: NDArray[Any]) -> Floats:
        """float64 (2, n), seconds that each segment adds to the forward and to the backward of its rank."""
        counts = self.forward.tiling.count(q_len, kv_len)
        forward = self.forward.work(counts)
        if self.backward.tiling != self.forward.tiling:
            counts = self.backward.tiling.count(q_len, kv_len)
        return np.stack([forward, self.backward.work(counts)]) * (self.heads / self.units)

    def fixed(self, tokens: int) -> Floats:
        """float64 (2,), seconds of forward and backward that a sequence of `tokens` takes on any rank."""
        keys = tokens * self.heads / self.units
        return np.array([kernel.launch + kernel.key * keys for kernel in (self.forward, self.backward)])

    def seconds(self, sharding: Sequence[NDArray[np.int64]]) -> Floats:
        """float64 (ranks, 2), forward and backward time of every rank. Padding costs nothing.

        Args:
            sharding: per rank an int64 (m, 3), as the functions of `wlb_titan.context` make it.
        """
        ranks = len(sharding)
        pieces = np.concatenate(sharding)
        q_len, kv_len = pieces[:, COUNT], pieces[:, OFFSET] + pieces[:, COUNT]
        owner = np.repeat(np.arange(ranks), [len(shard) for shard in sharding])
        most_keys = np.zeros(ranks, dtype=np.int64)
        np.maximum.at(most_keys, owner, kv_len)
        fixed = self.fixed(int(q_len.sum()))
        result = np.empty((ranks, 2))
        for column, (kernel, work) in enumerate(
            zip((self.forward, self.backward), self.work(q_len, kv_len), strict=True)
        ):
            longest = np.where(most_keys > 0, kernel.longest_tile(most_keys), 0.0)
            result[:, column] = fixed[column] + np.maximum(np.bincount(owner, work, ranks), longest)
        return result


def slowest(seconds: Floats) -> float:
    """What a layer waits for: the slowest rank's forward, and the slowest rank's backward.

    The ranks meet in a collective in each of the passes, so the two slowest need not be the same rank.

    Args:
        seconds: float64 (ranks, 2), of `AttentionLatency.seconds`.
    """
    return float(seconds.max(axis=0).sum())
