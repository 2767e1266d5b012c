"""Hybrid sharding: long documents over as many ranks as they need, short ones whole, by predicted time.

The paper names this as future work. Cutting a long document keeps the ranks equal, but its keys travel among
all ranks that have a part of it; cutting a short one also wastes most of each tile. So a document goes over
1, 2, 8, ... neighbouring ranks (`levels_of`), which have the fastest links: as few as keep its share of each
rank's work and tokens below a bound.

- Bound: the lower it is, the better the balance, and the more keys travel. Of several bounds the `TRIES` with
  the least expected time are tried: mean attention, collectives, and a part of the largest share, for the
  imbalance.
- Widest first, documents go to the group with the least work that has room for their tokens; heaviest first
  within a width (LPT). Where no group has room a document goes over more ranks.
- Equal tokens: a rank has room for total / ranks. Documents that fit nowhere whole are cut to fill the
  remaining room, and padding fills the smallest rooms, so that at most `ranks` documents are cut this way.
- Neighbours in the sequence that are short even together are dealt as one item: a kernel can still merge them
  into one tile, and there are few items however many documents there are.

Example: documents of 8192, 100 and 100 tokens on 2 ranks, 8 tokens of padding: the long one is cut into four
chunks, and each rank keeps one short one whole.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints
from wlb_titan.bins import REMAINS, Bins
from wlb_titan.context.all_gather import Adaptive
from wlb_titan.context.layout import Sharding, document_chunks, from_runs
from wlb_titan.plan import Slices

BOUNDS = (4.0, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.12, 0.06, 0.0)
"""Most work of a document on a rank, over the mean rank's. With 0 all long documents go over all ranks."""

TRIES = 2
GAP = 0.1  # LPT misses the mean by about this much of the largest share
ROOM = 0.8  # largest share of a rank's tokens for one document, as others must fit beside it
NEGLIGIBLE = 0.02  # documents below this share of a rank's mean work need not be cut for balance
ITEMS_PER_RANK = 32  # neighbours are dealt together up to 1 / 32 of a rank's tokens


def levels_of(ranks: int) -> tuple[int, ...]:
    """Sizes of the groups of neighbours within which documents may be exchanged: 2, 8, 32, ... as far as they
    divide `ranks`, and all ranks."""
    sizes = []
    size = 2
    while size < ranks and ranks % size == 0:
        sizes.append(size)
        size *= 4
    return (*sizes, ranks)


class Hybrid(Adaptive):
    """Long documents over some ranks or all, short ones whole on one, where that is predicted fastest."""

    keeps_short = True

    @property
    def levels(self) -> tuple[int, ...]:
        return levels_of(self.ranks)

    def candidates(self, lengths: Ints, total: int, slices: Slices | None) -> list[tuple[str, Sharding]]:
        work = self.latency.work(lengths, lengths).sum(axis=0)
        tried = self._widths(lengths, work, total // self.ranks, None if slices is None else slices.cached)
        hybrid = [("hybrid", self._spread(lengths, widths, work, total)) for widths in tried]
        return [*super().candidates(lengths, total, slices), *hybrid]

    def _widths(self, lengths: Ints, work: Floats, share: int, cached: Bools | None) -> list[Ints]:
        """int64 (n,), over how many ranks each document goes, for each of the most promising bounds.

        Args:
            cached: bool (n,), documents that have to go over all ranks; None for none.
        """
        ranks, mean, everywhere = self.ranks, work.sum() / self.ranks, len(self.levels)
        long = (work > NEGLIGIBLE * mean) | (lengths > share // ITEMS_PER_RANK)
        if cached is not None:
            long |= cached
        (rows,) = np.nonzero(long)
        sizes = np.array([1, *self.levels])
        shares, tokens = work[rows] / sizes[:, None], lengths[rows] / sizes[:, None]  # on a rank, by size
        rest = work.sum() - work[rows].sum()
        _, begin, end = document_chunks(np.zeros(len(rows), dtype=np.int64), lengths[rows], ranks)
        pieces = self.latency.work(np.maximum(end - begin, 1), np.maximum(end, 1)).sum(axis=0)
        # Of documents over all ranks; over fewer, as if whole.
        cut_work = pieces.reshape(ranks, len(rows), 2).sum(axis=(0, 2))
        token_seconds, each = np.zeros((2, len(sizes)))
        for place, move in enumerate(self.moves, start=1):
            token_seconds[place], each[place] = move

        tried: dict[bytes, tuple[float, Ints]] = {}
        for bound in BOUNDS:
            room = ROOM * min(max(bound, 0.3), 1.0) * share
            narrow = (shares <= bound * mean) & (tokens <= room)
            choice = np.where(narrow.any(axis=0), narrow.argmax(axis=0), everywhere)  # places in `sizes`
            if cached is not None:
                choice[cached[rows]] = everywhere
            if choice.tobytes() in tried:
                continue
            largest = shares[choice, np.arange(len(rows))].max(initial=0.0)
            computed = (rest + np.where(choice == everywhere, cut_work, work[rows]).sum()) / ranks
            travelling = np.bincount(choice, lengths[rows], len(sizes)) * sizes / ranks
            moved = (travelling * token_seconds + (travelling > 0) * each).sum()
            widths = np.ones(len(lengths), dtype=np.int64)
            widths[rows] = sizes[choice]
            tried[choice.tobytes()] = max(computed, largest) + GAP * largest + moved, widths
        return [widths for _, widths in sorted(tried.values(), key=itemgetter(0))[:TRIES]]

    def _spread(self, lengths: Ints, widths: Ints, work: Floats, total: int) -> Sharding:
        """The sharding with each document over `widths` ranks, or more where there is no room."""
        begins, share = np.cumsum(lengths) - lengths, total // self.ranks
        groups, loads, left = self._place(lengths, widths, work, share)
        runs = [np.zeros((3, 0), dtype=np.int64)]  # owner, begin and end, as of `from_runs`
        for (size, place), members in groups.items():
            owner, begin, end = document_chunks(begins[members], lengths[members], size)
            runs.append(np.stack([owner + place * size, begin, end]))
        owner, begin, end = np.concatenate(runs, axis=1)
        item_begin, item_end, item_work = _items(lengths, begins, widths > 1, work, share // ITEMS_PER_RANK)
        bins = Bins(self.ranks, share, loads)
        bins.lengths = np.bincount(owner, end - begin, self.ranks).astype(np.int64).tolist()
        dealt = bins.place(item_end - item_begin, item_work)
        fits = dealt != REMAINS
        runs.append(np.stack([dealt, item_begin, item_end])[:, fits])
        cut = _fill(
            np.concatenate([begins[left], item_begin[~fits]]),
            np.concatenate([begins[left] + lengths[left], item_end[~fits]]),
            share - np.array(bins.lengths),
            total - int(lengths.sum()),
        )
        owner, begin, end = np.concatenate([*runs, cut], axis=1)
        return from_runs(owner, begin, end, lengths, self.ranks)

    def _place(
        self, lengths: Ints, widths: Ints, work: Floats, share: int
    ) -> tuple[dict[tuple[int, int], Ints], list[float], list[int]]:
        """Gives the documents that go over several ranks to groups.

        Returns:
            Rows of the documents of each group, by its size and its place among groups of that size; work of
            each rank; and documents without room.
        """
        ranks, sizes = self.ranks, self.levels
        loads = [0.0] * ranks
        rooms = [float(share - len(sizes))] * ranks  # on each level a rank may have one token more
        groups: dict[tuple[int, int], list[int]] = {}
        left = []
        (rows,) = np.nonzero(widths > 1)
        for row in rows[np.lexsort((-work[rows], -widths[rows]))].tolist():
            for size in sizes[sizes.index(int(widths[row])) :]:
                need, added = lengths[row] / size, float(work[row]) / size
                firsts = [at for at in range(0, ranks, size) if min(rooms[at : at + size]) >= need]
                if firsts:
                    first = min(firsts, key=lambda at: max(loads[at : at + size]))
                    for rank in range(first, first + size):
                        loads[rank] += added
                        rooms[rank] -= need
                    groups.setdefault((size, first // size), []).append(row)
                    break
            else:
                left.append(row)
        return {key: np.sort(np.array(members)) for key, members in groups.items()}, loads, left


def _items(lengths: Ints, begins: Ints, is_long: Bools, work: Floats, most: int) -> tuple[Ints, Ints, Floats]:
    """First token, end and work of the items, neighbouring short documents of about `most` tokens; most work
    first."""
    short = np.flatnonzero(~is_long)
    if not short.size:
        return short, short, np.zeros(0)
    ends = np.cumsum(lengths[short])
    span = (ends - 1) // max(most, 1)
    opens = np.append(True, (np.diff(span) > 0) | (np.diff(short) > 1))
    head, tail = short[opens], short[np.append(opens[1:], True)]
    works = np.add.reduceat(work[short], np.flatnonzero(opens))
    order = np.argsort(-works, kind="stable")
    return begins[head][order], (begins[tail] + lengths[tail])[order], works[order]


def _fill(begins: Ints, ends: Ints, room: Ints, padding: int) -> Ints:
    """Cuts runs to fill the ranks' rooms, after padding the smallest: int64 (3, n), as of `from_runs`."""
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
    return np.array(pieces, dtype=np.int64).reshape(-1, 3).T
