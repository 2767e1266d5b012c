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
from itertools import pairwise

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.bins import REMAINS, Bins
from wlb_titan.context.all_gather import Adaptive
from wlb_titan.context.layout import Joined, Sharding, document_chunks, from_runs
from wlb_titan.context.places import Large, Places, fill, search

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

    def candidates(self, packs: Joined) -> list[tuple[str, Sharding]]:
        large = self.large(packs)
        chosen = search(self.places, large, packs.totals // self.ranks)
        return [*super().candidates(packs), ("hybrid", self.spread(packs, large, chosen))]

    def large(self, packs: Joined) -> Large:
        """The documents that are worth a search; attention is that of a group's first chunk and its last, as
        the two of any other rank have about the same work together."""
        lengths, of, firsts = packs.lengths, packs.micro_batch, packs.firsts
        prefix, cached = packs.slices or (np.zeros_like(lengths), lengths < 0)
        sizes, bounds = np.array(self.levels)[:, None], list(pairwise(firsts.tolist()))
        work = self.latency.work(lengths, lengths + prefix).sum(axis=0)
        long = cached | (lengths > (packs.totals // self.ranks)[of] // 2)
        searched = np.maximum(np.bincount(of, long, len(bounds)), max(SEARCHED, 2 * self.ranks))
        order = np.lexsort((-work, ~cached, of))
        number = np.arange(len(of)) - firsts[of]  # within the micro-batch
        picked = number < searched[of]
        found, place = order[picked], (number[picked], of[picked])
        chunks = np.maximum(lengths[found] // (2 * sizes), 1)
        ends = np.stack([prefix[found] + chunks, np.broadcast_to((prefix + lengths)[found], chunks.shape)])
        pairs = self.latency.work(np.broadcast_to(chunks, ends.shape).ravel(), ends.ravel()).sum(axis=0)
        rows = np.full((int(place[0].max()) + 1, len(bounds)), -1)
        rows[place] = found
        attention = np.zeros((1 + len(sizes), *rows.shape))
        attention[:, *place] = np.vstack([work[found], pairs.reshape(ends.shape).sum(axis=0)])
        there = rows >= 0
        whole = np.array([work[first:stop].sum() for first, stop in bounds])
        rest = whole - [work[own[own >= 0]].sum() for own in rows.T]
        return Large(rows, lengths[rows] * there, attention, cached[rows] & there, work, whole, rest)

    def spread(self, packs: Joined, large: Large, chosen: Ints) -> Sharding:
        """The sharding with each of the large documents in its chosen place."""
        lengths, of, places, ranks = packs.lengths, packs.micro_batch, self.places, self.ranks
        begins, last = np.cumsum(lengths) - lengths, len(places.level) - 1
        picked = np.nonzero(large.rows.T >= 0)[::-1]  # micro-batch by micro-batch
        rows, chosen, share = large.rows[picked], chosen[picked], packs.totals // ranks
        level, runs = places.level[chosen], [np.zeros((3, 0), dtype=np.int64)]  # as of `from_runs`
        for number, size in enumerate(places.sizes[:-1].tolist()):
            (own,) = np.nonzero(level == number)
            first = of[rows[own]] * ranks + places.has.argmax(axis=0)[chosen[own]]
            order = np.lexsort((rows[own], first))
            members = rows[own[order]]
            runs.append(np.stack(document_chunks(begins[members], lengths[members], size, first[order])))
        owner, begin, end = np.concatenate(runs, axis=1)
        counts = np.bincount(owner, end - begin, ranks * len(share)).astype(np.int64)
        room = share - counts.reshape(-1, ranks).T
        filling = np.sort(rows[chosen == last])
        tokens = np.bincount(of[filling], lengths[filling], len(share)).astype(np.int64)
        filled = fill(tokens, room)
        runs += _in_halves(begins[filling], lengths[filling], of[filling], filled.copy())

        work, attention = large.work, large.attention[level, *picked]
        others = np.ones(len(of), dtype=np.bool_)
        others[rows] = False
        order = np.lexsort((-work, of))
        order = order[others[order]]
        padding = packs.totals - np.bincount(of, lengths).astype(np.int64)
        for number in np.unique(of[order]).tolist():
            own, mine = order[of[order] == number], of[rows] == number
            load = (attention[mine] * places.has[:, chosen[mine]]).sum(axis=1)
            most = max(filled[:, number].mean(), 1)
            load += attention[mine & (chosen == last)].sum() * filled[:, number] / most
            bins = Bins(ranks, int(share[number]), load.tolist())
            bins.lengths = (share[number] - room[:, number] + filled[:, number]).tolist()
            dealt = bins.place(lengths[own], work[own])
            fits = dealt != REMAINS
            begin = begins[own[fits]]
            runs.append(np.stack([dealt[fits] + number * ranks, begin, begin + lengths[own[fits]]]))
            if not fits.all():
                cut, left = own[~fits], share[number] - np.array(bins.lengths)
                filled_up = _fill(begins[cut], begins[cut] + lengths[cut], left, int(padding[number]))
                runs.append(filled_up + np.array([[number * ranks], [0], [0]]))
        owner, begin, end = np.concatenate(runs, axis=1)
        return from_runs(owner, begin, end, lengths, ranks * len(share))


def _in_halves(begins: Ints, lengths: Ints, of: Ints, tokens: Ints) -> list[Ints]:
    """Documents over all ranks of their micro-batch, `of`, rising, in proportion to its `tokens`, (ranks, P):
    first documents of all micro-batches, second ones, ..., each int64 (3, n), as of `from_runs`."""
    ranks, runs = np.arange(len(tokens)), []
    there_and_back = np.concatenate([ranks, ranks[::-1]])[:, None]
    turn = np.arange(len(of)) - np.searchsorted(of, of)
    for number in range(int(turn.max(initial=-1)) + 1):
        (now,) = np.nonzero(turn == number)
        length, own = lengths[now], tokens[:, of[now]]
        exact = length * own / own.sum(axis=0)
        taken = np.floor(exact).astype(np.int64)
        order = np.argsort(taken - exact, axis=0, kind="stable")
        taken += np.argsort(order, axis=0) < length - taken.sum(axis=0)
        tokens[:, of[now]] -= taken
        chunks = np.concatenate([taken // 2, (taken - taken // 2)[::-1]])
        ends = begins[now] + np.cumsum(chunks, axis=0)
        runs.append(np.stack([there_and_back + of[now] * len(tokens), ends - chunks, ends]).reshape(3, -1))
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
