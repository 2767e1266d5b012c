"""Hybrid sharding: long documents per document, short ones whole, balanced by predicted time.

The paper names this as future work. Cutting a long document keeps the ranks equal and costs next to nothing;
cutting a short one wastes most of each tile. So the k longest documents are sharded per document, and the
others stay whole on one rank each, longest first to the rank with the least work that has room for its tokens
(LPT).

- Equal tokens: a rank has room for total / ranks. Documents that fit nowhere whole are cut over the rooms
  that are left, and padding fills the smallest of these, so that at most `ranks` documents are cut this way.
- k: for each k there is a bound below which no such sharding can be: the mean over the ranks, or a rank's
  share of the long documents plus the longest short one. The `TRIES` most promising k are tried, except where
  the bound says that a try cannot win.
- Neighbours in the sequence that are short even together are dealt as one item. A kernel that merges
  neighbours into one tile can then still do so, and items are few however many documents there are.

Example: documents of 8192, 100 and 100 tokens on 2 ranks, 8 tokens of padding: the long one is cut into four
chunks, and each rank keeps one short one whole.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from wlb_titan.context.document import document_runs
from wlb_titan.context.layout import Ints, Sharding, from_runs
from wlb_titan.cost.attention_latency import AttentionLatency, Floats, slowest

TRIES = 2
TOLERANCE = 0.01  # no more is tried to win less than this share
GAP = 0.1  # by how much of its longest item LPT misses the bound, about
NEGLIGIBLE = 0.02  # documents below this share of a rank's mean work need not be cut for balance
ITEMS_PER_RANK = 24  # neighbours are dealt together up to this share of a rank's tokens


def hybrid(lengths: Ints, total: int, ranks: int, latency: AttentionLatency) -> Sharding:
    """Shards long documents per document and keeps short ones whole.

    Args:
        lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
        total: tokens of the sequence with its padding; a multiple of 2 x ranks.
        ranks: context-parallel degree.
        latency: predicts the time of segments.

    Returns:
        Per rank an int64 (m, 3), columns DOCUMENT, OFFSET, COUNT.
    """
    assert total % (2 * ranks) == 0, f"{total} tokens do not divide into {2 * ranks} chunks"
    work = latency.work(lengths, lengths).sum(axis=0)
    by_length = np.argsort(-lengths, kind="stable")
    bounds, expected = _bounds(lengths[by_length], work[by_length], total // ranks, ranks, latency)
    fixed = latency.fixed(int(lengths.sum())).sum()
    best: Sharding | None = None
    least = np.inf
    for cut in np.argsort(expected, kind="stable")[:TRIES].tolist():
        if bounds[cut] + fixed >= least * (1 - TOLERANCE):
            continue
        is_long = np.zeros(len(lengths), dtype=np.bool_)
        is_long[by_length[:cut]] = True
        candidate = _shard(lengths, is_long, work, total, ranks)
        predicted = slowest(latency.seconds(candidate))
        if predicted < least:
            best, least = candidate, predicted
    assert best is not None  # cutting all long documents is always possible, so the first bound is finite
    return best


def _bounds(
    lengths: Ints, work: Floats, share: int, ranks: int, latency: AttentionLatency
) -> tuple[Floats, Floats]:
    """Two float64 (m + 1,), for k = 0 .. m the least and the expected time of the slowest rank if k are cut.

    `lengths` are sorted, longest first, and `work` are their seconds if they stay whole.
    """
    rank_mean = work.sum() / ranks
    long = int(np.count_nonzero((work > NEGLIGIBLE * rank_mean) | (lengths > share // ITEMS_PER_RANK)))
    _, begin, end = document_runs(np.zeros(long, dtype=np.int64), lengths[:long], ranks)
    pieces = latency.work(np.maximum(end - begin, 1), np.maximum(end, 1)).sum(axis=0)
    long_share = np.append(0.0, np.cumsum(pieces.reshape(ranks, long, 2).sum(axis=(0, 2)))) / ranks
    short_share = rank_mean - np.append(0.0, np.cumsum(work[:long])) / ranks
    longest_short = np.append(work, 0.0)[: long + 1]
    room = share - np.append(0, np.cumsum(lengths[:long])) / ranks
    fits = np.append(lengths, 0)[: long + 1] <= room
    fits[long] = True  # what is left then is negligible, and may be cut anywhere
    least = np.where(fits, long_share + np.maximum(short_share, longest_short), np.inf)
    return least, least + GAP * longest_short


def _shard(lengths: Ints, is_long: NDArray[np.bool_], work: Floats, total: int, ranks: int) -> Sharding:
    """The sharding that cuts exactly the documents `is_long`."""
    begins = np.cumsum(lengths) - lengths
    owner, begin, end = document_runs(begins[is_long], lengths[is_long], ranks)
    room = total // ranks - np.bincount(owner, end - begin, ranks).astype(np.int64)
    item_begin, item_end, item_work = _items(lengths, begins, is_long, work, total // ranks // ITEMS_PER_RANK)
    item_owner, room, left = _deal(item_end - item_begin, item_work, room)
    dealt = item_owner >= 0
    cut = _fill(item_begin[left], item_end[left], room, total - int(lengths.sum()))
    return from_runs(
        np.concatenate([owner, item_owner[dealt], cut[0]]),
        np.concatenate([begin, item_begin[dealt], cut[1]]),
        np.concatenate([end, item_end[dealt], cut[2]]),
        lengths,
        ranks,
    )


def _items(
    lengths: Ints, begins: Ints, is_long: NDArray[np.bool_], work: Floats, most: int
) -> tuple[Ints, Ints, Floats]:
    """Begin, end and work of the short documents, neighbours of together some `most` tokens as one."""
    short = np.flatnonzero(~is_long)
    if not short.size:
        return short, short, np.zeros(0)
    ends = np.cumsum(lengths[short])
    span = (ends - 1) // max(most, 1)
    opens = np.append(True, (np.diff(span) > 0) | (np.diff(short) > 1))
    head, tail = short[opens], short[np.append(opens[1:], True)]
    return begins[head], begins[tail] + lengths[tail], np.add.reduceat(work[short], np.flatnonzero(opens))


def _deal(tokens: Ints, work: Floats, room: Ints) -> tuple[Ints, Ints, list[int]]:
    """Gives items, most work first, to the least loaded rank with room for them.

    Returns:
        int64 (items,), the rank of each, -1 for those that fit nowhere; int64 (ranks,), the room left; and
        the items that fit nowhere.
    """
    owner = np.full(len(tokens), -1, dtype=np.int64)
    rooms, sizes, loads = room.tolist(), tokens.tolist(), work.tolist()
    queue = [(0.0, rank) for rank in range(len(rooms))]
    left = []
    for item in np.argsort(-work, kind="stable").tolist():
        full = []
        while queue and rooms[queue[0][1]] < sizes[item]:
            full.append(heapq.heappop(queue))
        if queue:
            load, rank = queue[0]
            heapq.heapreplace(queue, (load + loads[item], rank))
            rooms[rank] -= sizes[item]
            owner[item] = rank
        else:
            left.append(item)
        for entry in full:
            heapq.heappush(queue, entry)
    return owner, np.array(rooms, dtype=np.int64), left


def _fill(begins: Ints, ends: Ints, room: Ints, padding: int) -> tuple[Ints, Ints, Ints]:
    """Cuts runs over the ranks' rooms, the smallest of which take the padding.

    Returns:
        Owner, begin and end of the pieces.
    """
    order = np.argsort(room, kind="stable").tolist()
    rooms = room.tolist()
    for rank in order:
        taken = min(rooms[rank], padding)
        rooms[rank] -= taken
        padding -= taken
    pieces: list[tuple[int, int, int]] = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        while begin < end:
            while not rooms[order[-1]]:
                order.pop()
            rank = order[-1]
            stop = min(end, begin + rooms[rank])
            rooms[rank] -= stop - begin
            pieces.append((rank, begin, stop))
            begin = stop
    table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]
