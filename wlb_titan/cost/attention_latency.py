"""The time of the attention kernel on what one context-parallel rank holds (paper sections 5.2 and 5.3).

A kernel cuts queries into tiles and walks over blocks of keys, so time follows tiles and blocks, not tokens:
a tile with one query costs as much as a full one, and a block on the diagonal costs its masking too. A
backward pass may cut keys into tiles instead and walk over blocks of queries (`KeyTiling`). A segment takes

    segment + queries x query + tiles x tile + blocks x block + masked blocks x masked

seconds for one query head on one of the device's `units` (multiprocessors). A launch lasts at least as long
as all work spread evenly over the units, and as the longest tile:

    launch + keys x key x heads / units + max(sum of the work of all heads / units, longest tile)

This lower bound is tight where tiles are many and start heaviest first; a kernel that deals them out less
well ends later by a share of its longest program (`tail`). `keys` are all that the rank has, which are copied
or written whether or not a query sees them.

Example: tiles of 4 queries, blocks of 4 keys, and the last 6 tokens of a document of 10. The first tile sees
8 keys in two blocks, the second 10 keys in three; only the last block of each is masked:

    >>> tiling = Tiling(query_tile=4, key_block=4)
    >>> tiling.count(np.array([6]), np.array([10])).tolist()   # tiles, blocks, masked blocks
    [[2.0], [5.0], [2.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.models import Windows
from wlb_titan.plan import COUNT, OFFSET


@dataclass(frozen=True, slots=True)
class Tiling:
    query_tile: int  # query tokens of a tile
    key_block: int  # keys that a tile reads at a time; a multiple or a divisor of `query_tile`
    merge_keys: int = 0  # neighbouring segments with up to this many keys share tiles; 0: none do
    heads_per_tile: int = 1  # query heads that one tile computes (packed GQA)
    tiles_of: Literal["queries", "keys"] = "queries"

    def count(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None = None) -> Floats:
        """float64 (3, n): tiles, blocks of keys, and masked blocks of each segment, per query head. Averages
        for merged segments; exact for others, but for two tiles under a window: the last one, and the one
        in which the window first leaves keys behind.

        Args:
            q_len: integers (n,), queries of each segment, at least 1.
            kv_len: integers (n,), keys of each segment up to its last query's own, at least q_len.
            window: the most keys that a query sees; None for all.
        """
        queries, keys = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        counts = self._alone(queries, keys) if window is None else self._windowed(queries, keys, window)
        merged = np.flatnonzero(keys <= self.merge_keys)
        if len(merged):
            counts[:, merged] = self._merged(queries[merged], keys[merged], window or np.inf)
        return counts

    def largest(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None = None) -> Floats:
        """float64 (3, n), the most that `count` can give for one tile with the segment's last query."""
        ones = np.ones(len(kv_len))
        masked = 1 + self.query_tile // self.key_block
        if window is not None:
            kv_len, masked = np.minimum(kv_len, self.query_tile + window - 1), 2 * masked
        blocks = np.ceil(kv_len / self.key_block)
        return np.array([ones, blocks, ones * masked if window is None else np.minimum(blocks, masked)])

    def program(self, tile: Floats, work: Floats) -> Floats:
        """float64 (n,), seconds of each launch's longest program. `tile` is its longest tile, for all heads
        of a program; `work` all its work spread over the units; both in seconds."""
        return tile

    def _windowed(self, queries: Floats, keys: Floats, window: int) -> Floats:
        """`_alone` under a window: first tiles that see all keys before them, then those that do not."""
        seen = keys - queries
        tiles = np.ceil(queries / self.query_tile)
        growing = np.clip(np.ceil((window - seen) / self.query_tile), 0, tiles)
        rows = np.minimum(growing * self.query_tile, queries)
        blocks = -(-(self.query_tile + window - 1) // self.key_block)
        unmasked = max(window - self.query_tile + 1, 0) // self.key_block
        of_tile = np.array([[1.0], [blocks], [blocks - unmasked]])
        return np.asarray(self._alone(rows, seen + rows) + of_tile * (tiles - growing))

    def _alone(self, queries: Floats, keys: Floats) -> Floats:
        """`count` where each segment has tiles of its own."""
        seen = keys - queries  # before the first query's own key
        tiles = np.ceil(queries / self.query_tile)
        blocks = self._blocks(seen, tiles - 1) + np.ceil(keys / self.key_block)
        unmasked = self._blocks(seen + (2 - self.key_block - self.query_tile), tiles)
        return np.array([tiles, blocks, blocks - unmasked])

    def _merged(self, queries: Floats, keys: Floats, window: float) -> Floats:
        """`count` where segments share tiles, on average over where tiles begin: a segment's share of tiles,
        its keys, those before a cut between tiles once more (in the window), and half a block for each tile,
        as its last one is not full. All blocks are masked."""
        share = queries / self.query_tile
        again = np.minimum(keys - queries / 2, window)
        blocks = (np.minimum(keys, queries + window) + share * again) / self.key_block + share / 2
        return np.array([share, blocks, blocks])

    def _blocks(self, keys: Floats, tiles: Floats) -> Floats:
        """Sum over j = 1 .. tiles of ceil((keys + j query_tile) / key_block)."""
        if self.query_tile % self.key_block == 0:
            ratio = self.query_tile // self.key_block
            return tiles * (np.ceil(keys / self.key_block) + ratio / 2 * (tiles + 1))
        ratio = self.key_block // self.query_tile
        first = np.ceil(keys / self.query_tile)
        return _sum_of_ceilings(first + tiles, ratio) - _sum_of_ceilings(first, ratio)


def _sum_of_ceilings(n: Floats, ratio: int) -> Floats:
    """Sum over i = 1 .. n of ceil(i / ratio); for n below 1, minus the sum over n + 1 .. 0."""
    full = np.floor(n / ratio)
    return (full + 1) * (n - ratio / 2 * full)


@dataclass(frozen=True, slots=True)
class KeyTiling(Tiling):
    """How a kernel with tiles of keys divides its work, like our backward pass on Hopper.

    A tile of `key_block` keys walks over blocks of `query_tile` queries, which begin at multiples of it in
    the whole batch, whatever the segments. Tiles begin with a document, but neighbours of at most
    `merge_keys` keys are cut together. `count` averages over where segments begin. Programs of
    `heads_per_tile` heads are split in two until none takes longer than the launch.

    Example: the last 64 queries of 256 keys, and two tiles of 128. All queries see both tiles, and lie in two
    blocks unless they begin at a multiple of 64:

        >>> KeyTiling(query_tile=64, key_block=128).count(np.array([64]), np.array([256])).tolist()
        [[2.0], [3.96875], [0.0]]
    """

    tiles_of: Literal["keys"] = "keys"

    def count(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None = None) -> Floats:
        """Pairs of segment and tile, their blocks, and 0, as masking hides behind products."""
        queries, keys = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        merged = np.flatnonzero(keys <= self.merge_keys)
        parts, rows = self._cut(queries, keys, window)
        begun = parts.copy()
        if len(merged):
            short = keys[merged]
            parts[merged], rows[merged] = self._cut_anywhere(queries[merged], short, window)
            begun[merged] = self._joined(short, parts[merged])
        blocks = (rows + (self.query_tile - 1) * begun) / self.query_tile
        return np.array([parts, blocks, np.zeros_like(parts)])

    def largest(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None = None) -> Floats:
        rows = q_len if window is None else np.minimum(q_len, window + self.key_block - 1)
        ones = np.ones(len(q_len))
        return np.array([ones, np.ceil(rows / self.query_tile), 0 * ones])

    def program(self, tile: Floats, work: Floats) -> Floats:
        heads = self.heads_per_tile
        most = np.log2(heads & -heads)
        halvings = np.ceil(np.log2(np.maximum(tile, 1e-12) / np.maximum(work, 1e-12)))
        return np.asarray(tile / 2 ** np.clip(halvings, 0, most))

    def _cut(self, queries: Floats, keys: Floats, window: int | None) -> tuple[Floats, Floats]:
        """Tiles that some query sees, and pairs of query and tile, of segments with tiles of their own. The
        queries from key j x key_block on see tile j, up to a window behind its last key."""
        size = self.key_block
        seen = keys - queries  # before the first query's own key
        tiles, by_all = np.ceil(keys / size), np.ceil(seen / size)
        since = seen * by_all + size / 2 * (by_all + tiles - 1) * (tiles - by_all)
        rows = keys * tiles - since
        if window is None:
            return tiles, rows
        behind = window + size - 1
        first = np.maximum(np.floor((seen - behind) / size) + 1, 0)  # those before are seen by none
        left = np.maximum(np.ceil((keys - behind) / size) - first, 0)  # those not seen by the last queries
        unseen = left * (keys - behind - size * (first + (left - 1) / 2))
        return tiles - first, rows - first * queries - unseen

    def _cut_anywhere(self, queries: Floats, keys: Floats, window: int | None) -> tuple[Floats, Floats]:
        """`_cut` for segments whose tiles begin anywhere: one more for every `key_block` keys."""
        seen = keys - queries
        if window is None:
            pairs = queries * (seen + (queries - 1) / 2)
            return 1 + (keys - 1) / self.key_block, queries + pairs / self.key_block
        unseen = np.maximum(seen - window + 1, 0)  # keys behind the window of the first query
        growing = np.clip(window - seen, 0, queries)  # queries that see all keys before theirs
        pairs = growing * (seen + (growing - 1) / 2) + (queries - growing) * (window - 1)
        return 1 + (keys - unseen - 1) / self.key_block, queries + pairs / self.key_block

    def _joined(self, keys: Floats, parts: Floats) -> Floats:
        """How many of `parts` begin blocks of their own: whole segments in one tile share its walk."""
        cut = np.minimum((keys - 1) / self.key_block, 1)
        whole = np.maximum(self.key_block / keys - 1, 1)  # of them in a tile
        return parts - (1 - cut) * (1 - 1 / whole)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Costs of one pass in seconds; all but `launch` for one query head on one unit."""

    tiling: KeyTiling | Tiling
    launch: float  # the whole pass
    key: float  # that the rank has
    segment: float
    tile: float
    block: float  # of a tile
    masked: float  # added to a block that must be masked
    query: float = 0.0  # of a segment
    tail: float = 0.0  # share of its longest program by which a launch ends later than evenly spread work

    def slower(self, factor: float) -> KernelCost:
        """A kernel whose work, but not its launch, takes `factor` times as long."""
        costs = ("key", "segment", "tile", "block", "masked", "query")
        return replace(self, **{name: getattr(self, name) * factor for name in costs})

    def work(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None = None) -> Floats:
        """float64 (n,), seconds of segments."""
        counts = self.tiling.count(q_len, kv_len, window)
        return self._tile_seconds(counts) + self.segment + self.query * q_len

    def _tile_seconds(self, counts: Floats) -> Floats:
        # No matrix product: BLAS rounds differently on other CPUs, and plans must be the same on all.
        tiles, blocks, masked = counts
        return np.asarray(self.tile * tiles + self.block * blocks + self.masked * masked)

    def longest_tile(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None = None) -> Floats:
        """float64 (n,), seconds of the largest tile that a segment can have, for all heads of a program."""
        of_head = self._tile_seconds(self.tiling.largest(q_len, kv_len, window)) + self.segment
        return of_head * self.tiling.heads_per_tile

    def ends(self, work: Floats, tile: Floats) -> Floats:
        """float64 (n,), when launches end; `work` and `tile` as of `Tiling.program`."""
        program = self.tiling.program(tile, work)
        return np.maximum(work + self.tail * program, program)


@dataclass(frozen=True, slots=True)
class AttentionLatency:
    """Predicts one layer's attention on one device; the mean over layers if some have sliding windows."""

    forward: KernelCost
    backward: KernelCost
    units: int  # programs that the device runs side by side: its multiprocessors
    heads: int  # query heads on this device: those of the model over the tensor-parallel degree
    source: str  # where the coefficients come from, for reports
    measured_to: int | None = None  # keys of the longest measured segment, beyond which it extrapolates
    windows: Windows = ()
    group: int = 1  # query heads that share a key head

    def work(self, q_len: NDArray[Any], kv_len: NDArray[Any]) -> Floats:
        """float64 (2, n), seconds that each segment adds to the forward and to the backward of its rank."""
        result = np.zeros((2, len(q_len)))
        for window, share in self._kinds():
            result += share * self._work(q_len, kv_len, window)
        return result

    def _kinds(self) -> list[tuple[int | None, float]]:
        rest = 1.0 - sum(share for _, share in self.windows)
        return [*([(None, rest)] if rest > 1e-9 else []), *self.windows]

    def _work(self, q_len: NDArray[Any], kv_len: NDArray[Any], window: int | None) -> Floats:
        passes = [kernel.work(q_len, kv_len, window) for kernel in (self.forward, self.backward)]
        return np.stack(passes) * (self.heads / self.units)

    def fixed(self, keys: Ints) -> Floats:
        """float64 (ranks, 2), seconds of both passes that only depend on the number of a rank's `keys`."""
        launch, key = np.array([(kernel.launch, kernel.key) for kernel in (self.forward, self.backward)]).T
        return np.asarray(launch + key * (keys * self.heads / self.units)[:, None])

    def seconds(self, sharding: Sequence[Ints], held: Ints | None = None) -> Floats:
        """float64 (ranks, 2), forward and backward seconds of a sharding, an int64 (m, 3) for each rank.
        `held` are the ranks' keys, int64 (ranks,), by default those of all tokens. Padding costs nothing."""
        ranks = len(sharding)
        pieces = np.concatenate(sharding)
        q_len, kv_len = pieces[:, COUNT], pieces[:, OFFSET] + pieces[:, COUNT]
        owner = np.repeat(np.arange(ranks), [len(shard) for shard in sharding])
        queries, keys = np.zeros((2, ranks), dtype=np.int64)  # of each rank's largest segment
        np.maximum.at(queries, owner, q_len)
        np.maximum.at(keys, owner, kv_len)
        result = self.fixed(np.full(ranks, q_len.sum()) if held is None else held)
        for window, share in self._kinds():
            work = self._work(q_len, kv_len, window)
            for column, kernel in enumerate((self.forward, self.backward)):
                longest: Floats = kernel.longest_tile(queries, keys, window) * (keys > 0)
                spread: Floats = np.bincount(owner, work[column], ranks).astype(np.float64)
                result[:, column] += share * kernel.ends(spread, longest)
        return result


def slowest(seconds: Floats) -> float:
    """The slowest forward plus the slowest backward of all ranks, which meet in each pass."""
    return float(seconds.max(axis=0).sum())
