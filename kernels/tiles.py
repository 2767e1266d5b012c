"""Tile lists: exactly the work that exists, found once per micro-batch on the CPU, document by document
(docs/kernels.md).

Query tiles (forward and dQ) are runs of at most `tokens` query tokens with the interval of keys that any of
them sees. Key tiles (dK and dV) are runs of at most `block_n` keys with the query intervals that see any of
them, so that one program sums all query segments over the same keys, without atomics.

Every query row attends to one interval of keys: row r of a segment to

    first(r) = max(kv_start, r + 1 + shift - window)   ...   last(r) = min(r + 1 + shift, kv_start + kv_len)

(the end excluded), where shift aligns the segment's last query with its last key. A kernel needs to know
nothing else of a row, so a tile may hold rows of several documents: short neighbours are merged (paper
section 5.2: a tile costs the same however few of its rows are used). Long ones are not, because all blocks of
a mixed tile must be masked.

    >>> import numpy as np
    >>> two = np.array([[0, 200, 0, 200], [200, 30, 200, 30]], dtype=np.int32)
    >>> query_tiles(two, 230, tokens=128)  # q_begin, q_end, kv_begin, shared_begin, shared_end, kv_end
    array([[128, 230,   0,   0,   0, 230],
           [  0, 128,   0,   0,   1, 128]], dtype=int32)

Lists are in chains: tiles that share keys (key tiles: queries) follow one another, the chain of the heaviest
tile first, to find what they share in the L2 cache.

All lists are int32 except `edges`, by which torch indexes. Positions are tokens; the kernels multiply by the
heads that share a tile.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .segments import NO_WINDOW

# Segments that see more keys than this are cut on their own: merging saves about one tile at a boundary, but
# all blocks of the tile across it must be masked, some 20 % of each.
MERGE_KEYS = 1024
# Keys that a merged pair may span beyond the sum of its parts: about what a tile's start costs.
MERGE_SLACK = 128
# Rows that a key tile reads begin at multiples of this: TMA reads their float32 statistics by 16 bytes.
ROW_ALIGNMENT = 4
MASK_COST = 1.2  # work of a masked position over that of an unmasked one


class Cut(NamedTuple):
    """How a pass cuts its work, as a profile's file has it (wlb_titan/cost/profile.py)."""

    tiles_of: str  # "queries" or "keys"
    query_tile: int  # query tokens of a tile, or of a step where tiles are of keys
    key_block: int  # keys that a tile reads at a time, or has
    merge_keys: int = MERGE_KEYS
    heads_per_tile: int = 1


class Cover(NamedTuple):
    """Segments in query order with the gaps between them, int64 (n,) each; gaps have no keys, k0 = k1 = 0."""

    q0: np.ndarray
    q1: np.ndarray
    k0: np.ndarray
    k1: np.ndarray
    shift: np.ndarray

    def first(self, segment: np.ndarray, row: np.ndarray, reach: int) -> np.ndarray:
        """First key that `row` of `segment` sees."""
        return np.maximum(self.k0[segment], row + 1 + self.shift[segment] - reach)

    def last(self, segment: np.ndarray, row: np.ndarray) -> np.ndarray:
        """One past the last key that `row` of `segment` sees."""
        return np.minimum(self.k1[segment], row + 1 + self.shift[segment])


def row_bounds(segments: np.ndarray, q_tokens: int, reach: int, device: torch.device | str) -> Tensor:
    """(2, q_tokens) int32 on `device`: the first key each query sees and one past the last; 0, 0 for padding.
    Only five numbers a segment are sent there."""
    cover = cover_of(segments, q_tokens)
    table = np.stack([cover.q1 - cover.q0, cover.k0, cover.k1, cover.shift + 1, cover.k1 > cover.k0])
    length, k0, k1, shift, used = send(table.astype(np.int32), device)
    segment = torch.repeat_interleave(length, output_size=q_tokens)
    end = torch.arange(q_tokens, dtype=torch.int32, device=device) + shift[segment]
    first = torch.maximum(k0[segment], end - reach)
    last = torch.minimum(k1[segment], end)
    return torch.stack([first, last]) * used[segment]


def send(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Uses pinned memory for a GPU, so that the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def query_tiles(segments: np.ndarray, q_tokens: int, reach: int = NO_WINDOW, *, tokens: int) -> np.ndarray:
    """(n, 6) tiles over all query rows, with padding, in chains, the heaviest of each chain first.

    Columns: q_begin, q_end, kv_begin, shared_begin, shared_end, kv_end. All rows of a tile see the keys
    shared_begin ... shared_end (end excluded); before and after, from kv_begin and to kv_end, each row has
    its own bounds. Only tiles of padding have kv_begin = kv_end.
    """
    if q_tokens == 0:
        return np.zeros((0, 6), np.int32)
    cover = cover_of(segments, q_tokens)
    q0, q1, k0, k1, _ = cover
    span = np.maximum(k1[1:], k1[:-1]) - np.minimum(k0[1:], k0[:-1])
    length = k1 - k0
    short = (length > 0) & (length <= MERGE_KEYS)
    merged = short[1:] & short[:-1] & (span <= length[1:] + length[:-1] + MERGE_SLACK)
    t0, t1 = _cut(q0, q1, merged, tokens)

    # Pieces, each of one segment and one tile.
    p0 = np.sort(np.concatenate([q0, t0]))
    p0 = p0[np.append(True, p0[1:] > p0[:-1])]
    p1 = np.append(p0[1:], q_tokens)
    segment = np.searchsorted(q0, p0, side="right") - 1
    tile = np.searchsorted(p0, t0)
    real = k1[segment] > k0[segment]

    def over_tile(reduce: np.ufunc, bound: np.ndarray) -> np.ndarray:
        return reduce.reduceat(np.where(real, bound, 0), tile)

    kv_begin = over_tile(np.minimum, cover.first(segment, p0, reach))
    shared_begin = over_tile(np.maximum, cover.first(segment, p1 - 1, reach))
    shared_end = over_tile(np.minimum, cover.last(segment, p0))
    kv_end = over_tile(np.maximum, cover.last(segment, p1 - 1))
    some = shared_begin < shared_end
    shared_begin, shared_end = np.where(some, shared_begin, kv_begin), np.where(some, shared_end, kv_begin)
    shared = shared_end - shared_begin
    work = shared + MASK_COST * (kv_end - kv_begin - shared)
    tiles = np.stack([t0, t1, kv_begin, shared_begin, shared_end, kv_end], axis=1)
    linked = np.maximum(kv_begin[1:], kv_begin[:-1]) < np.minimum(kv_end[1:], kv_end[:-1])
    chain, heaviest = _chains(work, linked)
    return tiles[np.lexsort((-work, chain, -heaviest))].astype(np.int32)


class KeyTiles(NamedTuple):
    """What `key_tiles` returns; in a chain, tiles are in the order of their keys."""

    tiles: np.ndarray | Tensor  # (n, 4) kv_begin, kv_end, item_begin, item_end, in chains
    items: np.ndarray | Tensor  # (m, 6) q_begin, q_full, q_tail, q_end, turns, turn
    first_turns: np.ndarray | Tensor  # (c,), the last of which is 0 and no counter
    edges: np.ndarray | Tensor  # (e,), blocks in which a segment begins or ends
    heaviest: int = 0  # steps of the heaviest tile
    steps: int = 0  # of all tiles

    def to(self, device: torch.device) -> "KeyTiles":
        return KeyTiles(*(send(x, device) for x in self[:4]), self.heaviest, self.steps)


def key_tiles(
    segments: np.ndarray,
    kv_tokens: int,
    reach: int = NO_WINDOW,
    *,
    tokens: int,
    block_n: int,
    turn_rows: int = 0,
) -> KeyTiles:
    """Tiles over all keys, and items: the query intervals that each of them needs.

    Rows q_full ... q_tail of an item see all keys of the tile; they begin at a multiple of ROW_ALIGNMENT, and
    their number is a multiple of `tokens` (itself one of that). The other rows have their own bounds.
    Keys that nobody sees lie in tiles without items, because their gradient must be written too.

    Turns, if turn_rows > 0, fix the order in which tiles add to the same rows of dQ: an item adds to block b
    of `turn_rows` rows when counter `turns` + b is twice its `turn`, or one more, and then raises it by two.
    Counters start at first_turns. Turns follow the list, so a tile waits for earlier ones only; it first adds
    what later ones wait for, or neighbours that share tiles would wait in one chain through the whole batch.
    An item whose rows no other tile sees has turn -1 and waits for nobody. Counters belong to a segment: if
    two segments have rows in one block, tiles add only zeros to the rows of the other segment.

    dQ starts as zero only in `edges`, blocks that a segment does not fill, to which those of another may add
    at any time. Elsewhere the first tile stores instead of adding. A counter is odd once its block has
    something. Blocks filled by the rows of an item that waits for nobody have nothing.
    """
    if tokens % ROW_ALIGNMENT != 0:
        raise ValueError(f"tiles of {tokens} query tokens are not a multiple of {ROW_ALIGNMENT}")
    if kv_tokens == 0:
        tiles, items = np.zeros((0, 4), np.int32), np.zeros((0, 6), np.int32)
        return KeyTiles(tiles, items, np.zeros(0, np.int32), np.zeros(0, np.int64))
    used = (segments[:, 1] > 0) & (segments[:, 3] > 0)
    q_start, q_len, kv_start, kv_len = segments[used].astype(np.int64).T
    order = np.argsort(q_start, kind="stable")
    q0, k0 = q_start[order], kv_start[order]
    q1, k1 = q0 + q_len[order], k0 + kv_len[order]
    shift = k1 - q1

    # Documents: connected key ranges, and the gaps between them.
    by_key = np.argsort(k0, kind="stable")
    ends = np.maximum.accumulate(k1[by_key]) if len(k1) else k1
    opens = np.append(True, k0[by_key][1:] >= ends[:-1])[: len(k1)]
    d0 = k0[by_key][opens]
    d1 = ends[np.append(opens[1:], True)[: len(k1)]]
    d0, d1, seen = _fill_gaps(d0, d1, kv_tokens)
    short = seen & (d1 - d0 <= MERGE_KEYS)
    t0, t1 = _cut(d0, d1, short[1:] & short[:-1], block_n)

    # Pairs of a segment and a tile whose keys it sees, by tile and then by query.
    first_tile = np.searchsorted(t1, k0, side="right")
    count = np.searchsorted(t0, k1, side="left") - first_tile
    segment = np.repeat(np.arange(len(q0)), count)
    tile = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first_tile, count)
    order = np.argsort(tile, kind="stable")
    segment, tile = segment[order], tile[order]
    begin = np.maximum(q0[segment], t0[tile] - shift[segment])
    end = np.minimum(q1[segment], t1[tile] - 1 + reach - shift[segment])
    # Of a shorter tile, a document's last, no row sees all: what a kernel reads beyond it is masked.
    whole = (k0[segment] <= t0[tile]) & (t1[tile] <= k1[segment])
    full = np.where(whole, np.clip(t1[tile] - 1 - shift[segment], begin, end), end)
    tail = np.clip(t0[tile] + reach - shift[segment], full, end)
    some = begin < end  # a window may leave none
    segment, tile, begin, end, full, tail = (x[some] for x in (segment, tile, begin, end, full, tail))

    # Short neighbours become one item, all of it masked.
    length = end - begin
    may_join = length <= MERGE_KEYS
    if turn_rows:
        may_join &= count[segment] == 1
    joins = (tile[1:] == tile[:-1]) & (begin[1:] == end[:-1]) & may_join[1:] & may_join[:-1]
    heads = np.append(True, ~joins)[: len(tile)]
    tails = np.append(~joins, True)[: len(tile)]
    alone = (heads & tails)[heads]
    segment, tile, begin, end = segment[heads], tile[heads], begin[heads], end[tails]
    full, tail = full[heads], tail[heads]
    full = -(-full // ROW_ALIGNMENT) * ROW_ALIGNMENT
    full_rows = np.where(alone, np.maximum(tail - full, 0) // tokens * tokens, 0)
    full = np.where(full_rows > 0, full, end)

    turns = np.zeros_like(segment)
    turn = np.full_like(segment, -1)
    first_turns, edges = np.zeros(0, np.int32), np.zeros(0, np.int64)
    if turn_rows:
        ends = np.concatenate([q0, q1])
        edges = ends[ends % turn_rows > 0] // turn_rows
        counters, first_turns = _counters(q0, q1, t1, shift, first_tile, count, reach, turn_rows)
        first_turns = np.append(first_turns, np.int32(0))
        waits = count[segment] > 1
        turns[waits] = counters[segment[waits]]
        turn[waits] = (tile - first_tile[segment])[waits]
    items = np.stack([begin, full, full + full_rows, end, turns, turn], axis=1)
    haste = np.where(turn < 0, 1, 2 * turn)  # what later tiles wait for, what nobody does, what itself waits
    items = items[np.lexsort((-begin, haste, tile))]

    item_end = np.searchsorted(tile, np.arange(len(t0)), side="right")
    item_begin = np.append(0, item_end[:-1])
    work = np.bincount(tile, weights=full_rows + MASK_COST * (end - begin - full_rows), minlength=len(t0))
    tiles = np.stack([t0, t1, item_begin, item_end], axis=1)
    spans = np.zeros(len(t0) + 1, np.int64)
    np.add.at(spans, first_tile, 1)
    np.add.at(spans, np.maximum(first_tile + count - 1, first_tile), -1)
    chain, heaviest = _chains(work, linked=np.cumsum(spans)[: len(t0) - 1] > 0)
    tiles = tiles[np.lexsort((chain, -heaviest))]
    lists = KeyTiles(tiles.astype(np.int32), items.astype(np.int32), first_turns, edges)
    each = steps(lists, tokens)
    return lists._replace(heaviest=int(each.max(initial=0)), steps=int(each.sum()))


def steps(lists: KeyTiles, rows: int) -> np.ndarray:
    """(n,) int64: blocks of `rows` queries, each from a multiple of it on, that a tile walks over."""
    blocks = -(-lists.items[:, 3] // rows) - lists.items[:, 0] // rows
    before = np.append(0, np.cumsum(blocks, dtype=np.int64))
    return before[lists.tiles[:, 3]] - before[lists.tiles[:, 2]]


def _counters(q0, q1, t1, shift, first_tile, count, reach: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each segment's counters begin, less its first block's number; and all counters' first values.

    A segment has a counter for each block of `rows` that it touches, if several tiles see it. The tiles that
    add to a block follow one another; the first is 0 except with windows, which leave earlier keys behind.
    First values are twice that, and odd if the segment does not fill the block.
    """
    block, after = q0 // rows, -(-q1 // rows)
    blocks = np.where(count > 1, after - block, 0)
    start = np.cumsum(blocks) - blocks
    segment = np.repeat(np.arange(len(q0)), blocks)
    number = np.arange(len(segment)) - np.repeat(start - block, blocks)
    row = np.maximum(number * rows, q0[segment])
    gone = np.searchsorted(t1, row + 1 + shift[segment] - reach, side="right") - first_tile[segment]
    fills = (row == number * rows) & (row + rows <= q1[segment])
    return start - block, (2 * np.maximum(gone, 0) + ~fills).astype(np.int32)


def _chains(work: np.ndarray, linked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each tile's chain, and the work of its heaviest tile. linked[i]: i and i + 1 share a chain."""
    chain = np.cumsum(np.append(0, ~linked))
    heaviest = np.zeros(len(work))
    np.maximum.at(heaviest, chain, work)
    return chain, heaviest[chain]


def cover_of(segments: np.ndarray, q_tokens: int) -> Cover:
    q_start, q_len, kv_start, kv_len = segments[segments[:, 1] > 0].astype(np.int64).T
    order = np.argsort(q_start, kind="stable")
    q0, q1, used = _fill_gaps(q_start[order], (q_start + q_len)[order], q_tokens)
    k0, k1 = np.zeros_like(q0), np.zeros_like(q0)
    k0[used], k1[used] = kv_start[order], (kv_start + kv_len)[order]
    return Cover(q0, q1, k0, k1, k1 - q1)


def _fill_gaps(begin: np.ndarray, end: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The intervals in order, with the gaps that they leave in 0 ... total; and which were given."""
    edges = np.stack([np.append(0, end), np.append(begin, total)], axis=1)
    gap = edges[:, 0] < edges[:, 1]
    every = np.concatenate([np.stack([begin, end], axis=1), edges[gap]])
    order = np.argsort(every[:, 0], kind="stable")
    return every[order, 0], every[order, 1], order < len(begin)


def _cut(begin: np.ndarray, end: np.ndarray, merged: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of at most `size` of adjacent intervals; where merged[i], interval i + 1 continues i's run."""
    run0, run1 = begin[np.append(True, ~merged)], end[np.append(~merged, True)]
    pieces = -(-(run1 - run0) // size)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.repeat(run0, pieces) + (np.arange(len(first)) - first) * size
    return start, np.minimum(start + size, np.repeat(run1, pieces))
