"""The search behind hybrid sharding: over which ranks each document is divided, by predicted time.

A place is a rank, a group of neighbours that divide a document evenly, or all ranks, which divide documents
by the room that others leave. The time of a layer is that of attention on the rank with most of it, and at
least the mean, since documents that have no place yet may still make the ranks equal; and of a collective for
each size of group, which takes as long as the group with most tokens.

Heaviest first, each document goes where this time rises least; then the heaviest move again. A maximum often
falls only after several documents have moved, so there are several beginnings: with all places; without the
groups of each size; and with the narrowest groups that keep a document's share of a rank below a bound. The
second time all places are open. Beginnings and micro-batches lie side by side in the same array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints

BOUNDS = (0.8, 0.4, 0.15)  # of a document's tokens and attention on a rank, over the mean rank's
AGAIN = 8  # documents that move again
TIES = 1e-3  # weight of a place's own time where the largest stays the same
CLOSED = 1e3  # seconds


@dataclass(frozen=True, eq=False)
class Places:
    """Where documents can go: ranks, groups by size, and last all ranks."""

    sizes: Ints  # int64 (levels,), ranks of a group: 1, ..., all
    level: Ints  # int64 (places,), the size of each place, as an index into `sizes`
    has: Floats  # float64 (ranks, places), 1 where a rank belongs to a place; 0 for the last
    token: Floats  # float64 (levels,), seconds for each token that every rank of a group sends
    start: Floats  # float64 (levels,), seconds of a collective of any length

    @classmethod
    def of(cls, sizes: Sequence[int], token: Floats, start: Floats) -> Places:
        """`sizes`: 1, ..., all ranks, each a divisor of the last."""
        ranks = sizes[-1]
        groups = [np.repeat(np.eye(ranks // size), size, axis=0) for size in sizes[:-1]]
        level = np.repeat(np.arange(len(sizes)), [ranks // size for size in sizes])
        return cls(np.array(sizes), level, np.hstack([*groups, np.zeros((ranks, 1))]), token, start)


class Large(NamedTuple):
    """The documents of P micro-batches that are worth a search, at most n of each, heaviest first; 0 where a
    micro-batch has fewer."""

    rows: Ints  # int64 (n, P), which they are; -1 for none
    lengths: Ints  # int64 (n, P), tokens
    attention: Floats  # float64 (levels, n, P), seconds on each rank of a group over which they are divided
    everywhere: Bools  # bool (n, P), those that have to go over all ranks
    work: Floats  # float64 (documents,), seconds of attention of each document of all micro-batches, whole
    total: Floats  # float64 (P,), of all documents of a micro-batch together
    rest: Floats  # float64 (P,), of those that are not worth a search


def search(places: Places, large: Large, share: Ints) -> Ints:
    """int64 (n, P), the place of each large document; `share`, int64 (P,), is the tokens for which a rank of
    each micro-batch has room."""
    movable = (large.lengths > 0) & ~large.everywhere
    chosen = np.full(movable.shape, len(places.level) - 1)
    (some,) = np.nonzero(movable.any(axis=0))  # the others have no choice
    if len(some):
        arrays = "rows", "lengths", "attention", "everywhere", "total", "rest"
        own = large._replace(**{name: getattr(large, name)[..., some] for name in arrays})
        chosen[:, some] = _searched(places, own, share[some], movable[:, some])
    return chosen


def _searched(places: Places, large: Large, share: Ints, movable: Bools) -> Ints:
    """`search`, with at least one document of each micro-batch `movable`, bool (n, P)."""
    state = _Beginnings(places, large, share)
    closed = _closed(places, large, share)
    for document, shut in enumerate(closed):
        documents = np.full(len(share), document)
        state.move(documents, (state.costs(documents) + shut).argmin(axis=0))
    least, columns = np.zeros(state.columns.shape), np.arange(len(state.columns))
    numbers = np.cumsum(movable, axis=0)
    for number in range(1, min(AGAIN, int(numbers.max())) + 1):
        documents = (numbers >= number).argmax(axis=0)
        moves = (numbers[-1] >= number)[state.columns]
        was = state.chosen[documents[state.columns], columns]
        state.move(documents, was, -moves.astype(np.int64))
        cost = state.costs(documents)
        state.move(documents, np.where(moves, cost.argmin(axis=0), was), moves.astype(np.int64))
        least = np.where(moves, cost.min(axis=0), least)
    best = least.reshape(len(share), -1).argmin(axis=1)
    return np.asarray(
        state.chosen.reshape(len(large.lengths), len(share), -1)[:, np.arange(len(share)), best]
    )


def _closed(places: Places, large: Large, share: Ints) -> Floats:
    """float64 (n, places, P x beginnings), CLOSED where a document may not go at first."""
    levels, mean, last = len(places.sizes), large.total / places.sizes[-1], len(places.level) - 1
    part = np.maximum(large.lengths / places.sizes[:, None, None] / share, large.attention / mean)
    part[-1] = 0
    narrowest = (part <= np.array(BOUNDS)[:, None, None, None]).argmax(axis=1)
    level, lacking = places.level[:, None, None], np.arange(levels)  # 0 for none
    closed = np.empty((len(large.lengths), last + 1, len(share), len(BOUNDS) + levels))
    closed[..., : len(BOUNDS)] = level != np.moveaxis(narrowest, 0, -1)[:, None]
    closed[..., len(BOUNDS) :] = (level == lacking) & (lacking > 0)
    np.copyto(closed[:, :last], 2, where=large.everywhere[:, None, :, None])
    return CLOSED * closed.reshape(*closed.shape[:2], -1)


class _Beginnings:
    """What is placed so far. The last axis of arrays has a column for each beginning of each micro-batch."""

    def __init__(self, places: Places, large: Large, share: Ints) -> None:
        self.places, (ranks, last) = places, (len(places.has), len(places.level) - 1)
        self.columns = np.repeat(np.arange(len(share)), len(BOUNDS) + len(places.sizes))
        """The micro-batch of each column."""
        self.last = np.arange(last + 1)[:, None] == last
        self.first_of_level = np.searchsorted(places.level, np.arange(len(places.sizes)))
        self.token, self.start = places.token[places.level, None], places.start[places.level, None]
        lengths, attention = large.lengths.astype(np.float64), large.attention
        self.brought = np.zeros((5, last + 1, *lengths.shape))
        """(5, places, n, P), what documents add in each place: to a rank's room, which they take, and to its
        seconds; to tokens and to seconds over all ranks; and to the seconds of what has no place."""
        self.brought[0, :last] = -lengths / places.sizes[places.level[:last], None, None]
        self.brought[1] = attention[places.level]
        self.brought[2, last], self.brought[3, last] = lengths, attention[-1] * ranks
        self.brought[4] = -attention[0]
        self.ranks = np.zeros((2, ranks, len(self.columns)))  # room and seconds
        self.ranks[0] = share[self.columns]
        self.sums = np.zeros((3, len(self.columns)))  # the other three
        self.sums[2] = large.total[self.columns]
        self.sending = np.zeros((last + 1, len(self.columns)))
        tokens = share * ranks - large.lengths.sum(axis=0)
        rate = np.maximum(large.rest / np.maximum(tokens, 1), 0.0)
        self.rate = rate[self.columns]  # of other documents, which fill the rest of the room
        self.chosen = np.zeros((len(lengths), len(self.columns)), dtype=np.int64)

    def move(self, documents: Ints, to: Ints, sign: Ints | int = 1) -> None:
        """Puts a document of each micro-batch into places, or takes it out with the sign -1."""
        documents, column = documents[self.columns], np.arange(len(to))
        brought = sign * self.brought[:, to, documents, self.columns]
        self.chosen[documents, column] = to
        self.ranks += brought[:2, None] * self.places.has[:, to]
        self.sending[to, column] -= brought[0]
        self.sums += brought[2:]

    def costs(self, documents: Ints) -> Floats:
        """float64 (places, columns), seconds of the layer with a micro-batch's document in each place."""
        places, ranks = self.places, len(self.places.has)
        brought = self.brought[:, :, documents[self.columns], self.columns]
        room, load = self.ranks[:, :, None] + brought[:2, None] * places.has[..., None]
        filling, seconds, rest = self.sums[:, None] + brought[2:]
        # Exact but for ranks that have less room with the document than without.
        height = _height(self.ranks[0, :, None], filling[-2:])
        full = room < np.where(self.last, height[1], height[0])
        height = (filling - (room * full).sum(axis=0)) / np.maximum(ranks - full.sum(axis=0), 1)
        filled = np.minimum(room, height)
        load += seconds / np.maximum(filling, 1.0) * filled
        mean = (load.sum(axis=0) + rest) / ranks
        slowest = (load + self.rate * (room - filled)).max(axis=0)

        token, start = places.token[:, None], places.start[:, None]
        most = np.maximum.reduceat(self.sending, self.first_of_level, axis=0)
        moved = (token * most + start * (most > 0)).sum(axis=0)
        before, after = most[places.level], self.sending - brought[0]
        moved = moved + self.token * np.maximum(after - before, 0.0)
        moved += self.start * ((before == 0) & (after > 0))
        moved += token[-1] * height
        moved += start[-1] * (filling > 0)
        result = np.maximum(slowest, mean) + moved + TIES * (slowest + self.token * after)
        # Chunks of a document may differ by a token, on each size of group that divides evenly.
        result[(room.min(axis=0) < len(places.sizes) - 2) & ~self.last] = np.inf
        return np.asarray(result)


def _height(room: Floats, tokens: Floats) -> Floats:
    """float64, most tokens on a rank where `tokens` (...) go as evenly as `room` (ranks, ...) allows."""
    rising = np.sort(room, axis=0)
    left = np.arange(len(room), 0, -1).reshape(-1, *[1] * tokens.ndim)
    height = (tokens - (np.cumsum(rising, axis=0) - rising)) / left
    first = (height <= rising).argmax(axis=0)
    return np.asarray(height[first, *np.indices(first.shape, sparse=True)])


def fill(tokens: Ints, room: Ints) -> Ints:
    """int64 (ranks, n), `tokens` (n,) divided as evenly as `room` (ranks, n) allows."""
    height = _height(room.astype(np.float64), tokens.astype(np.float64))
    result = np.minimum(room, np.floor(height).astype(np.int64))
    free = result < room
    return np.asarray(result + (free & (np.cumsum(free, axis=0) <= tokens - result.sum(axis=0))))
