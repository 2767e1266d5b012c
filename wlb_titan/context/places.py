"""The search behind hybrid sharding: over which ranks each document is divided, by predicted time.

A place is a rank, a group of neighbours that divide a document evenly, or all ranks, which divide documents
by the room that others leave. The time of a layer is that of attention on the rank with most of it, and at
least the mean, since documents that have no place yet may still make the ranks equal; and of a collective for
each size of group, which takes as long as the group with most tokens.

Heaviest first, each document goes where this time rises least; then the heaviest move again. A maximum often
falls only after several documents have moved, so there are several beginnings, side by side in the same array
operations: with all places; without the groups of each size; and with the narrowest groups that keep a
document's share of a rank below a bound. The second time all places are open.
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
    """The documents of a micro-batch that are worth a search, heaviest first."""

    rows: Ints  # int64 (n,), which they are
    lengths: Ints  # int64 (n,), tokens
    attention: Floats  # float64 (levels, n), seconds on each rank of a group over which they are divided
    everywhere: Bools  # bool (n,), those that have to go over all ranks
    work: Floats  # float64 (documents,), seconds of attention of each document of the micro-batch, whole


def search(places: Places, large: Large, share: int) -> Ints:
    """int64 (n,), the place of each large document; `share` is the tokens for which a rank has room."""
    state = _Beginnings(places, large, share)
    closed = _closed(places, large, share)
    for document in range(len(large.rows)):
        state.move(document, (state.costs(document) + closed[:, document]).argmin(axis=1))
    cost = np.zeros((1, 1))
    for document in np.flatnonzero(~large.everywhere)[:AGAIN]:
        state.move(document, state.chosen[document].copy(), -1)
        cost = state.costs(document)
        state.move(document, cost.argmin(axis=1))
    return state.chosen[:, cost.min(axis=1).argmin()]


def _closed(places: Places, large: Large, share: int) -> Floats:
    """float64 (beginnings, n, places), CLOSED where a document may not go at first."""
    levels, mean = len(places.sizes), large.work.sum() / places.sizes[-1]
    part = np.maximum(large.lengths / places.sizes[:, None] / share, large.attention / mean)
    part[-1] = 0
    narrowest = (part <= np.array(BOUNDS)[:, None, None]).argmax(axis=1)
    lacking = np.arange(levels)[:, None, None]  # 0 for none
    closed = [places.level != narrowest[:, :, None]]
    closed += [np.repeat((places.level == lacking) & (lacking > 0), len(large.rows), axis=1)]
    everywhere = large.everywhere[:, None] & (np.arange(len(places.level)) < len(places.level) - 1)
    return np.where(everywhere, 2 * CLOSED, CLOSED * np.concatenate(closed))


class _Beginnings:
    """What is placed so far. Arrays have a row or column for each of the beginnings."""

    def __init__(self, places: Places, large: Large, share: int) -> None:
        self.places, self.lengths, self.attention = places, large.lengths, large.attention
        (ranks, count), levels = places.has.shape, len(places.sizes)
        beginnings = len(BOUNDS) + levels
        self.last = np.arange(count) == count - 1
        self.first_of_level = np.searchsorted(places.level, np.arange(levels))
        # Of each document in each place: tokens that a rank sends, and a rank's tokens and seconds.
        self.sent = np.where(self.last, 0.0, large.lengths[:, None] / places.sizes[places.level])
        self.tokens = self.sent[:, None] * places.has
        self.seconds = large.attention.T[:, None, places.level] * places.has
        self.room, self.load = np.full((ranks, beginnings), float(share)), np.zeros((ranks, beginnings))
        self.sending = np.zeros((beginnings, count))
        self.filling, self.filling_seconds = np.zeros((2, beginnings))  # over all ranks
        self.rest = np.full(beginnings, large.work.sum())  # seconds of what has no place
        work, tokens = large.work.sum() - large.work[large.rows].sum(), share * ranks - large.lengths.sum()
        self.rate = max(work / max(tokens, 1), 0.0)  # of other documents, which fill the rest of the room
        self.chosen = np.zeros((len(large.rows), beginnings), dtype=np.int64)

    def move(self, document: int, to: Ints, sign: int = 1) -> None:
        """Puts a document into a place, or takes it out with the sign -1."""
        self.chosen[document] = to
        self.room = self.room - sign * self.tokens[document][:, to]
        self.load = self.load + sign * self.seconds[document][:, to]
        self.sending[np.arange(len(to)), to] += sign * self.sent[document, to]
        fills = sign * self.last[to]
        self.filling = self.filling + fills * self.lengths[document]
        self.filling_seconds = self.filling_seconds + fills * self._divided(document)
        self.rest = self.rest - sign * self.attention[0, document]

    def _divided(self, document: int) -> float:
        """Seconds on all ranks together of a document over all ranks."""
        return float(self.attention[-1, document] * len(self.room))

    def costs(self, document: int) -> Floats:
        """float64 (beginnings, places), seconds of the layer with the document in each place."""
        places, ranks = self.places, len(self.room)
        room = self.room[:, :, None] - self.tokens[document][:, None]
        load = self.load[:, :, None] + self.seconds[document][:, None]
        filling = self.filling[:, None] + self.last * self.lengths[document]
        seconds = self.filling_seconds[:, None] + self.last * self._divided(document)
        # Exact but for ranks that have less room with the document than without.
        height = _height(np.hstack([self.room, self.room]), np.concatenate([self.filling, filling[:, -1]]))
        height = np.where(self.last, height[len(filling) :, None], height[: len(filling), None])
        full = (room < height).astype(np.float64)
        height = (filling - (room * full).sum(axis=0)) / np.maximum(ranks - full.sum(axis=0), 1)
        filled = np.minimum(room, height)
        load = load + seconds / np.maximum(filling, 1.0) * filled
        mean = (load.sum(axis=0) + (self.rest - self.attention[0, document])[:, None]) / ranks
        slowest = (load + self.rate * (room - filled)).max(axis=0)

        most = np.maximum.reduceat(self.sending, self.first_of_level, axis=1)
        before, after = most[:, places.level], self.sending + self.sent[document]
        token, start = places.token[places.level], places.start[places.level]
        moved = (places.token * most + places.start * (most > 0)).sum(axis=1)[:, None]
        moved = moved + token * np.maximum(after - before, 0.0) + start * ((before == 0) & (after > 0))
        moved = moved + places.token[-1] * height + places.start[-1] * (filling > 0)
        result = np.maximum(slowest, mean) + moved + TIES * (slowest + token * after)
        # Chunks of a document may differ by a token, on each size of group that divides evenly.
        result[(room.min(axis=0) < len(places.sizes) - 2) & ~self.last] = np.inf
        return np.asarray(result)


def _height(room: Floats, tokens: Floats) -> Floats:
    """float64 (n,), most tokens on a rank where `tokens` (n,) go as evenly as `room` (ranks, n) allows."""
    rising = np.sort(room, axis=0)
    height = (tokens - (np.cumsum(rising, axis=0) - rising)) / np.arange(len(room), 0, -1)[:, None]
    return np.asarray(height[(height <= rising).argmax(axis=0), np.arange(len(tokens))])


def fill(tokens: int, room: Ints) -> Ints:
    """int64 (ranks,), `tokens` divided as evenly as the ranks' `room` allows."""
    height = _height(room[:, None].astype(np.float64), np.array([float(tokens)]))
    result = np.minimum(room, np.floor(height).astype(np.int64))
    result[np.flatnonzero(result < room)[: tokens - int(result.sum())]] += 1
    return result
