"""Tile lists: exactly the work that exists, heaviest first, found once per micro-batch on the CPU.

A kernel launched over (longest document / tile, heads, documents) mostly starts programs with nothing to do,
and one that searches for its document in a list costs more than the attention of short documents. Here numpy
cuts the segments into tiles once, every layer and both passes reuse the list, and a program just reads its
row.

Query tiles (forward and dQ) are runs of at most `tokens` query tokens with the interval of keys that any of
them sees. Key tiles (dK and dV) are runs of at most `block_n` keys with the query intervals that see any of
them, so that several query segments over the same keys are summed inside one program and nothing is added
atomically.

Every query row attends to one interval of keys. That is all a kernel needs to know of a row, so a tile may
hold rows of several documents: neighbouring short segments are merged (paper section 5.2: a tile costs the
same however few of its rows are used). Long ones are not, because all blocks of a mixed tile must be masked.

    >>> import numpy as np
    >>> two = np.array([[0, 200, 0, 200], [200, 30, 200, 30]], dtype=np.int32)
    >>> query_tiles(two, 230, tokens=128)       # q_begin, q_end, kv_begin, kv_shared, kv_end
    array([[128, 230,   0,   0, 230],
           [  0, 128,   0,   1, 128]], dtype=int32)

All lists are int32. Positions are tokens; the kernels multiply by the heads that share a tile.
"""

import numpy as np
import torch
from torch import Tensor

# Segments that see more keys than this are cut on their own. Merging saves about one tile at a boundary and
# costs the masking of all blocks of the tile that holds it, some 20 % of each.
MERGE_KEYS = 1024
MERGE_SLACK = (
    128  # keys that a merged pair may span beyond the sum of its parts: about what a tile's start costs
)
ROW_ALIGNMENT = (
    4  # of the rows a key tile reads from: TMA reads their float32 statistics in units of 16 bytes
)
MASK_COST = 1.2  # work of a masked position over that of an unmasked one


def row_bounds(segments: np.ndarray, q_tokens: int, device: torch.device | str) -> Tensor:
    """(2, q_tokens) int32 on `device`: the first key each query sees and one past the last; 0, 0 for padding.

    Only one number a segment is sent; the rows are written where they are needed.
    """
    q0, q1, k0, k1 = _cover(segments, q_tokens)
    table = np.stack([q1 - q0, k0, k1 - q1 + 1, k1 > k0]).astype(np.int32)
    length, first, shift, used = torch.from_numpy(table).to(device, non_blocking=True)
    segment = torch.repeat_interleave(length, output_size=q_tokens)
    last = (torch.arange(q_tokens, dtype=torch.int32, device=device) + shift[segment]) * used[segment]
    return torch.stack([first[segment], last])


def query_tiles(segments: np.ndarray, q_tokens: int, *, tokens: int, merge: bool = True) -> np.ndarray:
    """(n, 5) tiles over all query rows, padding included: q_begin, q_end, kv_begin, kv_shared, kv_end.

    All rows of a tile see the keys kv_begin ... kv_shared (end excluded); from there to kv_end each row has
    its own bounds. A tile of padding has kv_begin = kv_end, and no other has. Without `merge` a tile has rows
    of one segment.
    """
    if q_tokens == 0:
        return np.zeros((0, 5), np.int32)
    q0, q1, k0, k1 = _cover(segments, q_tokens)
    span = np.maximum(k1[1:], k1[:-1]) - np.minimum(k0[1:], k0[:-1])
    length = k1 - k0
    short = (length > 0) & (length <= MERGE_KEYS) & merge
    merged = short[1:] & short[:-1] & (span <= length[1:] + length[:-1] + MERGE_SLACK)
    t0, t1 = _cut(q0, q1, merged, tokens)

    # Pieces: where tiles and segments cross. Each has one segment and one tile.
    p0 = np.sort(np.concatenate([q0, t0]))
    p0 = p0[np.append(True, p0[1:] > p0[:-1])]
    p1 = np.append(p0[1:], q_tokens)
    segment = np.searchsorted(q0, p0, side="right") - 1
    first = np.searchsorted(p0, t0)
    shift = (k1 - q1)[segment]
    real = k1[segment] > k0[segment]
    kv_begin = np.minimum.reduceat(k0[segment], first)
    kv_end = np.maximum.reduceat(np.where(real, p1 + shift, 0), first)
    seen_by_all = np.minimum.reduceat(np.where(real, p0 + 1 + shift, 0), first)
    one_begin = np.maximum.reduceat(k0[segment], first) == kv_begin
    kv_shared = np.where(one_begin, np.maximum(seen_by_all, kv_begin), kv_begin)
    work = kv_shared - kv_begin + MASK_COST * (kv_end - kv_shared)
    tiles = np.stack([t0, t1, kv_begin, kv_shared, kv_end], axis=1)
    return tiles[np.argsort(-work, kind="stable")].astype(np.int32)


def key_tiles(
    segments: np.ndarray, kv_tokens: int, *, tokens: int, block_n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles over all keys, and the query intervals that each of them needs.

    Returns (n, 4) tiles: kv_begin, kv_end, item_begin, item_end; and (m, 4) items: q_begin, q_full, q_tail,
    q_end. Rows q_full ... q_tail see all keys of the tile; they begin at a multiple of `ROW_ALIGNMENT` and
    are a multiple of `tokens` (itself one of ROW_ALIGNMENT). The rows before and after have their own bounds.
    Keys that nobody sees lie in tiles without items, because their gradient must be written too.
    """
    if tokens % ROW_ALIGNMENT != 0:
        raise ValueError(f"tiles of {tokens} query tokens are not a multiple of {ROW_ALIGNMENT}")
    if kv_tokens == 0:
        return np.zeros((0, 4), np.int32), np.zeros((0, 4), np.int32)
    q_start, q_len, kv_start, kv_len = segments[segments[:, 1] > 0].astype(np.int64).T
    order = np.argsort(q_start, kind="stable")
    q0, k0 = q_start[order], kv_start[order]
    q1, k1 = q0 + q_len[order], k0 + kv_len[order]

    # Documents: connected key ranges, and the gaps between them.
    by_key = np.argsort(k0, kind="stable")
    reach = np.maximum.accumulate(k1[by_key]) if len(k1) else k1
    opens = np.append(True, k0[by_key][1:] >= reach[:-1])[: len(k1)]
    d0 = k0[by_key][opens]
    d1 = reach[np.append(opens[1:], True)[: len(k1)]]
    d0, d1, used = _fill_gaps(d0, d1, kv_tokens)
    short = used & (d1 - d0 <= MERGE_KEYS)
    t0, t1 = _cut(d0, d1, short[1:] & short[:-1], block_n)

    # Pairs of a segment and a tile whose keys it sees, by tile and then by query.
    first = np.searchsorted(t1, k0, side="right")
    count = np.searchsorted(t0, k1, side="left") - first
    segment = np.repeat(np.arange(len(q0)), count)
    tile = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)
    order = np.argsort(tile, kind="stable")
    segment, tile = segment[order], tile[order]
    shift = (k1 - q1)[segment]
    end = q1[segment]
    begin = np.maximum(q0[segment], t0[tile] - shift)
    full = np.where(k0[segment] <= t0[tile], np.clip(t1[tile] - 1 - shift, begin, end), end)

    # Short neighbours become one item, all of it masked.
    length = end - begin
    joins = (tile[1:] == tile[:-1]) & (begin[1:] == end[:-1])
    joins &= (length[1:] <= MERGE_KEYS) & (length[:-1] <= MERGE_KEYS)
    heads = np.append(True, ~joins)[: len(tile)]
    tails = np.append(~joins, True)[: len(tile)]
    alone = (heads & tails)[heads]
    begin, end, full, tile = begin[heads], end[tails], full[heads], tile[heads]
    full = -(-full // ROW_ALIGNMENT) * ROW_ALIGNMENT
    full_rows = np.where(alone, np.maximum(end - full, 0) // tokens * tokens, 0)
    full = np.where(full_rows > 0, full, end)
    items = np.stack([begin, full, full + full_rows, end], axis=1)

    item_end = np.searchsorted(tile, np.arange(len(t0)), side="right")
    item_begin = np.append(0, item_end[:-1])
    work = np.bincount(tile, weights=full_rows + MASK_COST * (end - begin - full_rows), minlength=len(t0))
    tiles = np.stack([t0, t1, item_begin, item_end], axis=1)
    return tiles[np.argsort(-work, kind="stable")].astype(np.int32), items.astype(np.int32)


def _cover(segments: np.ndarray, q_tokens: int) -> tuple[np.ndarray, ...]:
    """q begin, q end, key begin, key end of segments in query order; padding has key begin = key end = 0."""
    q_start, q_len, kv_start, kv_len = segments[segments[:, 1] > 0].astype(np.int64).T
    order = np.argsort(q_start, kind="stable")
    q0, q1, used = _fill_gaps(q_start[order], (q_start + q_len)[order], q_tokens)
    k0, k1 = np.zeros_like(q0), np.zeros_like(q0)
    k0[used], k1[used] = kv_start[order], (kv_start + kv_len)[order]
    return q0, q1, k0, k1


def _fill_gaps(begin: np.ndarray, end: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intervals in order, with the gaps between them so that they cover 0 ... total; and which were given."""
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
