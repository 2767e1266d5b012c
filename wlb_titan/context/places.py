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
    state = _Beginnings(places, large, share)
    closed = _closed(places, large, share)
    for document, shut in enumerate(closed):
        documents = np.full(len(share), document)
        state.move(documents, (state.costs(documents) + shut).argmin(axis=1))
    least = np.zeros(state.columns.shape)
    movable = (large.lengths > 0) & ~large.everywhere
    numbers = np.cumsum(movable, axis=0)
    for number in range(1, min(AGAIN, int(numbers.max(initial=0))) + 1):
        documents = (numbers >= number).argmax(axis=0)
        moves = (numbers[-1] >= number)[state.columns]
        was = state.chosen[documents[state.columns], np.arange(len(moves))]
        state.move(documents, was, -moves.astype(np.int64))
        cost = state.costs(documents)
        state.move(documents, np.where(moves, cost.argmin(axis=1), was), moves.astype(np.int64))
        least = np.where(moves, cost.min(axis=1), least)
    best = least.reshape(len(share), -1).argmin(axis=1)
    return np.asarray(
        state.chosen.reshape(len(large.lengths), len(share), -1)[:, np.arange(len(share)), best]
    )


def _closed(places: Places, large: Large, share: Ints) -> Floats:
    """float64 (n, P x beginnings, places), CLOSED where a document may not go at first."""
    levels, mean = len(places.sizes), large.total / places.sizes[-1]
    part = np.maximum(large.lengths / places.sizes[:, None, None] / share, large.attention / mean)
    part[-1] = 0
    narrowest = (part <= np.array(BOUNDS)[:, None, None, None]).argmax(axis=1)
    lacking = np.arange(levels)[:, None]  # 0 for none
    closed = np.empty((*large.lengths.shape, len(BOUNDS) + levels, len(places.level)), dtype=np.bool_)
    closed[:, :, : len(BOUNDS)] = places.level != np.moveaxis(narrowest, 0, -1)[..., None]
    closed[:, :, len(BOUNDS) :] = (places.level == lacking) & (lacking > 0)
    everywhere = large.everywhere[..., None, None] & (np.arange(len(places.level)) < len(places.level) - 1)
    return np.where(everywhere, 2 * CLOSED, CLOSED * closed).reshape(len(closed), -1, len(places.level))


class _Beginnings:
    """What is placed so far. Arrays have a column for each beginning of each micro-batch."""

    def __init__(self, places: Places, large: Large, share: Ints) -> None:
        self.places, ranks, beginnings = places, len(places.has), len(BOUNDS) + len(places.sizes)
        self.columns = np.repeat(np.arange(len(share)), beginnings)  # the micro-batch of each
        self.last = np.arange(len(places.level)) == len(places.level) - 1
        self.first_of_level = np.searchsorted(places.level, np.arange(len(places.sizes)))
        self.lengths = large.lengths.astype(np.float64)
        # Of each document in each place: tokens that a rank sends, and a rank's seconds.
        self.sent = np.where(self.last, 0.0, self.lengths[..., None] / places.sizes[places.level])
        self.seconds = np.moveaxis(large.attention[places.level], 0, -1)
        columns = len(self.columns)
        self.room = np.broadcast_to(share[self.columns].astype(np.float64), (ranks, columns))
        self.load = np.zeros((ranks, columns))
        self.sending = np.zeros((columns, len(places.level)))
        self.filling, self.filling_seconds = np.zeros((2, columns))  # over all ranks
        self.rest = large.total[self.columns]  # seconds of what has no place
        tokens = share * ranks - large.lengths.sum(axis=0)
        rate = np.maximum(large.rest / np.maximum(tokens, 1), 0.0)
        self.rate = rate[self.columns, None]  # of other documents, which fill the rest of the room
        self.chosen = np.zeros((len(self.lengths), columns), dtype=np.int64)

    def move(self, documents: Ints, to: Ints, sign: Ints | int = 1) -> None:
        """Puts a document of each micro-batch into places, or takes it out with the sign -1."""
        documents, column = documents[self.columns], np.arange(len(to))
        sent, seconds = (sign * of[documents, self.columns, to] for of in (self.sent, self.seconds))
        alone, everywhere = self.seconds[documents, self.columns][:, [0, -1]].T
        has, fills = self.places.has[:, to], sign * self.last[to]
        self.chosen[documents, column] = to
        self.room = self.room - sent * has
        self.load = self.load + seconds * has
        self.sending[column, to] += sent
        self.filling = self.filling + fills * self.lengths[documents, self.columns]
        self.filling_seconds = self.filling_seconds + fills * (everywhere * len(has))
        self.rest = self.rest - sign * alone

    def costs(self, documents: Ints) -> Floats:
        """float64 (columns, places), seconds of the layer with a micro-batch's document in each place."""
        places, ranks, documents = self.places, len(self.room), documents[self.columns]
        sent, of_rank = self.sent[documents, self.columns], self.seconds[documents, self.columns]
        has = places.has[:, None]
        room = self.room[:, :, None] - sent * has
        load = self.load[:, :, None] + of_rank * has
        filling = self.filling[:, None] + self.last * self.lengths[documents, self.columns][:, None]
        seconds = self.filling_seconds[:, None] + self.last * (of_rank[:, -1:] * ranks)
        # Exact but for ranks that have less room with the document than without.
        height = _height(self.room[:, :, None], filling[:, [0, -1]])
        height = np.where(self.last, height[:, 1:], height[:, :1])
        full = (room < height).astype(np.float64)
        height = (filling - (room * full).sum(axis=0)) / np.maximum(ranks - full.sum(axis=0), 1)
        filled = np.minimum(room, height)
        load = load + seconds / np.maximum(filling, 1.0) * filled
        mean = (load.sum(axis=0) + (self.rest - of_rank[:, 0])[:, None]) / ranks
        slowest = (load + self.rate * (room - filled)).max(axis=0)

        most = np.maximum.reduceat(self.sending, self.first_of_level, axis=1)
        before, after = most[:, places.level], self.sending + sent
        token, start = places.token[places.level], places.start[places.level]
        moved = (places.token * most + places.start * (most > 0)).sum(axis=1)[:, None]
        moved = moved + token * np.maximum(after - before, 0.0) + start * ((before == 0) & (after > 0))
        moved = moved + places.token[-1] * height + places.start[-1] * (filling > 0)
        result = np.maximum(slowest, mean) + moved + TIES * (slowest + token * after)
        # Chunks of a document may differ by a token, on each size of group that divides evenly.
        result[(room.min(axis=0) < len(places.sizes) - 2) & ~self.last] = np.inf
        return np.asarray(result)


def _height(room: Floats, tokens: Floats) -> Floats:
    """float64, most tokens on a rank where `tokens` (...) go as evenly as `room` (ranks, ...) allows."""
    rising = np.sort(room, axis=0)
    left = np.arange(len(room), 0, -1).reshape(-1, *[1] * tokens.ndim)
    height = (tokens - (np.cumsum(rising, axis=0) - rising)) / left
    return np.asarray(np.take_along_axis(height, (height <= rising).argmax(axis=0)[None], axis=0)[0])


def fill(tokens: Ints, room: Ints) -> Ints:
    """int64 (ranks, n), `tokens` (n,) divided as evenly as `room` (ranks, n) allows."""
    height = _height(room.astype(np.float64), tokens.astype(np.float64))
    result = np.minimum(room, np.floor(height).astype(np.int64))
    free = result < room
    return np.asarray(result + (free & (np.cumsum(free, axis=0) <= tokens - result.sum(axis=0))))
