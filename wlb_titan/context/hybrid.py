"""Hybrid sharding: long documents over as many ranks as they need, short ones whole.

The paper names this as future work (docs/context_parallel.md):

- `places.search` chooses places for the heaviest documents, by predicted time: a rank, a group of 2, 8, ...
  neighbours (`levels_of`), or all ranks.
- Equal tokens: a rank has room for total / ranks. A group divides its documents evenly. Those over all ranks
  come last and fill the room that is left, as evenly as it allows: a long document on few ranks needs others
  to be long elsewhere. Each rank has two chunks, equally far from both ends of the document, so its work
  follows its tokens, however unequal these are.
- All other documents are dealt whole: to the rank with least work among those with room.
  Those that fit nowhere are cut, and padding fills the smallest rooms, so that at most `ranks` are cut.

Example: documents of 8192, 100 and 100 tokens on 2 ranks, 8 tokens of padding: the long one is cut into four
chunks, and each rank keeps one short one whole.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.bins import REMAINS, Bins
from wlb_titan.context.all_gather import Adaptive
from wlb_titan.context.layout import Sharding, document_chunks, from_runs
from wlb_titan.context.places import Large, Places, fill, search
from wlb_titan.plan import Slices

SEARCHED = 40  # documents, the heaviest; more if more are long or have to go over all ranks


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

    @cached_property
    def places(self) -> Places:
        sizes = (1, *self.levels)
        attention = np.diff(self.latency.fixed(np.array([0, 1])), axis=0).sum()  # of a key
        token, start = np.zeros((2, len(sizes)))
        for level, move in enumerate(self.moves, start=1):
            token[level], start[level] = move
        token[1:] += attention
        return Places.of(sizes, token * sizes, start)

    def candidates(self, lengths: Ints, total: int, slices: Slices | None) -> list[tuple[str, Sharding]]:
        large = self.large(lengths, total, slices)
        hybrid = self.spread(lengths, total, large, search(self.places, large, total // self.ranks))
        return [*super().candidates(lengths, total, slices), ("hybrid", hybrid)]

    def large(self, lengths: Ints, total: int, slices: Slices | None) -> Large:
        """The documents that are worth a search; attention is that of a group's first chunk and its last, as
        the two of any other rank have about the same work together."""
        share, sizes = total // self.ranks, np.array(self.levels)[:, None]
        prefix, cached = (np.zeros_like(lengths), lengths < 0) if slices is None else slices
        work = self.latency.work(lengths, lengths + prefix).sum(axis=0)
        searched = max(SEARCHED, 2 * self.ranks, int((cached | (lengths > share // 2)).sum()))
        rows = np.lexsort((-work, ~cached))[:searched]
        chunks = np.maximum(lengths[rows] // (2 * sizes), 1)
        ends = np.stack([prefix[rows] + chunks, np.broadcast_to((prefix + lengths)[rows], chunks.shape)])
        pairs = self.latency.work(np.broadcast_to(chunks, ends.shape).ravel(), ends.ravel()).sum(axis=0)
        attention = np.vstack([work[rows], pairs.reshape(ends.shape).sum(axis=0)])
        return Large(rows, lengths[rows], attention, cached[rows], work)

    def spread(self, lengths: Ints, total: int, large: Large, chosen: Ints) -> Sharding:
        """The sharding with each of the `large` documents in its chosen place."""
        begins, share, places = np.cumsum(lengths) - lengths, total // self.ranks, self.places
        last = len(places.level) - 1
        runs = [np.zeros((3, 0), dtype=np.int64)]  # owner, begin and end, as of `from_runs`
        for place in np.unique(chosen[chosen != last]).tolist():
            members = np.sort(large.rows[chosen == place])
            size, first = int(places.sizes[places.level[place]]), int(places.has[:, place].argmax())
            owner, begin, end = document_chunks(begins[members], lengths[members], size)
            runs.append(np.stack([owner + first, begin, end]))
        owner, begin, end = np.concatenate(runs, axis=1)
        room = share - np.bincount(owner, end - begin, self.ranks).astype(np.int64)
        filling = np.sort(large.rows[chosen == last])
        filled = fill(int(lengths[filling].sum()), room)
        runs += _in_halves(begins[filling], lengths[filling], filled)

        attention = large.attention[places.level[chosen], np.arange(len(chosen))]
        load = (attention * places.has[:, chosen]).sum(axis=1)
        load += attention[chosen == last].sum() * filled / max(filled.mean(), 1)
        bins = Bins(self.ranks, share, load.tolist())
        bins.lengths = (share - room + filled).tolist()
        others = np.argsort(-large.work, kind="stable")
        others = others[~np.isin(others, large.rows)]
        dealt = bins.place(lengths[others], large.work[others])
        fits = dealt != REMAINS
        runs.append(np.stack([dealt, begins[others], begins[others] + lengths[others]])[:, fits])
        cut, left = others[~fits], share - np.array(bins.lengths)
        runs.append(_fill(begins[cut], begins[cut] + lengths[cut], left, total - int(lengths.sum())))
        owner, begin, end = np.concatenate(runs, axis=1)
        return from_runs(owner, begin, end, lengths, self.ranks)


def _in_halves(begins: Ints, lengths: Ints, tokens: Ints) -> list[Ints]:
    """Documents over all ranks in proportion to `tokens`: each int64 (3, 2 ranks), as of `from_runs`."""
    there_and_back = np.concatenate([np.arange(len(tokens)), np.arange(len(tokens))[::-1]])
    runs = []
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        exact = length * tokens / tokens.sum()
        taken = np.floor(exact).astype(np.int64)
        taken[np.argsort(taken - exact, kind="stable")[: length - int(taken.sum())]] += 1
        tokens = tokens - taken
        chunks = np.concatenate([taken // 2, (taken - taken // 2)[::-1]])
        ends = begin + np.cumsum(chunks)
        runs.append(np.stack([there_and_back, ends - chunks, ends]))
    return runs


def _fill(begins: Ints, ends: Ints, room: Ints, padding: int) -> Ints:
    """Cuts runs to fill the ranks' rooms, after padding the smallest: int64 (3, n), as of `from_runs`."""
    order = np.argsort(room, kind="stable")
    padded = np.diff(np.minimum(np.cumsum(room[order]), padding), prepend=0)
    order, rooms = order[::-1], np.cumsum((room[order] - padded)[::-1])
    sizes = ends - begins
    stops = np.cumsum(sizes)
    edges = np.union1d(stops, rooms)
    starts = np.append(0, edges[:-1])[edges > 0]
    run, place = (np.searchsorted(of, starts, side="right") for of in (stops, rooms))
    first = begins[run] + starts - (stops - sizes)[run]
    return np.stack([order[place], first, first + edges[edges > 0] - starts])
