"""Which layers of which micro-batches repeat what, so that a pipeline rank's run fits: a greedy walk
(docs/recompute.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.layers.recompute import KINDS
from wlb_titan.memory.run import RunArrays

HIDDEN = 0.05  # weight of a second for which no other pass waits
MOVES = np.array(list(combinations(range(len(KINDS)), 2)))  # from a kind to one that keeps less


def mixed(run: RunArrays, seconds: Floats, slack: Floats, room: float) -> Ints:
    """Layers of each kind, int64 (C, K), with which the run takes at most `room` bytes; the last that were
    tried if nothing does.

    Args:
        seconds: (C, K), that a layer of each kind repeats.
        slack: (C,), seconds for which nothing waits when the chunk's backward pass takes them longer.
    """
    counts, slack, (start, end) = run.counts(0), slack.copy(), MOVES.T
    gained = np.where(run.free[:, None], run.kept[:, start] - run.kept[:, end], 0.0)
    repeated = seconds[:, end] - seconds[:, start]
    parts = run.parts(counts)
    bytes_ = run.there + parts.sum(axis=0)

    def moved(chunk: int, move: int, layers: int) -> tuple[Ints, Floats, Floats]:
        """The chunk's layers of each kind after a move, its part, and the bytes of all passes."""
        changed = counts[chunk].copy()
        changed[MOVES[move]] += [-layers, layers]
        (part,) = run.parts(changed[None], chunk)
        return changed, part, bytes_ + (part - parts[chunk])

    def price_of(chunks: Any) -> Floats:
        """Seconds for each byte that moves gain, in the shape of `gained[chunks]`."""
        again, gain = repeated[chunks], gained[chunks]
        waited = np.maximum(again - slack[chunks, None], 0) + HIDDEN * again
        possible = (gain > 0) & (counts[chunks][..., start] > 0)
        return np.where(possible, waited / np.where(possible, gain, 1), np.inf)

    prices = price_of(slice(None))
    while True:
        fullest = int(bytes_.argmax())
        over = bytes_[fullest] - room
        if over <= 0:
            break
        price = np.where(run.in_flight[fullest, :, None] > 0, prices, np.inf)
        while True:
            cheapest = int(price.argmin())
            c, m = divmod(cheapest, len(MOVES))
            if np.isinf(price[c, m]):
                return counts
            own, layers = c == run.own[fullest], int(counts[c, start[m]])
            if not own:
                layers = min(layers, int(np.ceil(over / gained[c, m])))
            if min(slack[c], repeated[c, m]) > 0:
                layers = min(layers, max(1, int(slack[c] / repeated[c, m])))
            changed, part, after = moved(c, m, layers)
            # In its own backward pass the first layer that repeats more may need more than it frees.
            if not own or after[fullest] < bytes_[fullest]:
                break
            price[c, m] = np.inf
        counts[c], parts[c], bytes_ = changed, part, after
        slack[c] = max(slack[c] - layers * repeated[c, m], 0)
        prices[c] = price_of([c])
    price = repeated / np.where(gained > 0, gained, np.nan)
    dearest = np.argsort(-price, axis=None)[: np.count_nonzero(gained > 0)]
    for c, m in zip(*(places.tolist() for places in np.divmod(dearest, len(MOVES))), strict=True):
        if counts[c, end[m]]:
            room_left = room - bytes_[run.in_flight[:, c] > 0].max()
            layers = min(int(counts[c, end[m]]), int(room_left // gained[c, m]))
            if layers > 0:
                changed, part, after = moved(c, m, -layers)
                if after.max() <= room:
                    counts[c], parts[c], bytes_ = changed, part, after
    return counts


def shares(mixes: Iterable[Ints]) -> dict[str, float]:
    """The share of layers of each kind, in arrays (..., kinds)."""
    counts = np.sum([mix.reshape(-1, len(KINDS)).sum(axis=0) for mix in mixes], axis=0)
    return {kind.name: float(count / counts.sum()) for kind, count in zip(KINDS, counts, strict=True)}


def kinds_of_layers(mix: Ints) -> tuple[str, ...]:
    """The kind of each layer of the model, in order, from `MicroBatch.mix`."""
    names = [kind.name for kind in reversed(KINDS)]
    return tuple(name for stage in mix for name in np.repeat(names, stage[::-1]).tolist())
