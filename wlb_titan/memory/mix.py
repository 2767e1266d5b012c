"""Which layers of which micro-batches repeat what, so that a pipeline rank's run fits: a greedy walk
(docs/recompute.md).

A moment's bytes are what is there whatever layers keep, what the layers of all micro-batches in flight keep,
and what its own pass makes. In a stage the layers that keep most come last, so a backward pass frees them
first: when it comes to the layers of one kind, those that keep more are free. Where bytes depend on the layer
at hand, as FSDP's do without a pipeline, the most of any layer counts: a mix never needs more than the walk
says.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints
from wlb_titan.memory.rank import Passes, RankPeak
from wlb_titan.memory.recompute import KINDS

NEVER = -1e30  # bytes of what a pass does not make
UNCHOSEN = [kind.name for kind in KINDS].index("selective")  # the kind of layers for which none is chosen
HIDDEN = 0.05  # weight of a second for which no other pass waits
MOVES = np.array(list(combinations(range(len(KINDS)), 2)))  # from a kind to one that keeps less


class Moments(NamedTuple):
    """A run of one pipeline rank: P passes, C chunks (one stage's part of a micro-batch), K kinds; in bytes
    but for `own` and `layers`."""

    base: Floats  # (P,), there whatever layers keep
    in_flight: Floats  # (P, C), 1 where the chunk's activations are there
    own: Ints  # (P,), the chunk of the pass
    forward: Bools  # (P,), whether it is a forward pass
    loss: Floats  # (P,), made by the loss, or NEVER
    slices: Floats  # (P,), copies beside attention's gradients for the cache of slices, or NEVER
    kept: Floats  # (C, K), by one layer
    made: Floats  # (3, C, K), in one layer's forward pass, backward pass, and at attention's gradients
    layers: Ints  # (C,), of the chunk

    @classmethod
    def of(cls, rank: RankPeak, run: Passes, *, reduced: bool) -> Moments:
        tokens = rank.job.token_bytes_of
        chunks = [(stage, place) for stage in rank.stages for place in range(len(run.packs))]
        number = {chunk: i for i, chunk in enumerate(chunks)}
        rows, held, in_flight = [], [], np.zeros(len(chunks))
        for pass_ in rank.passes(run, reduced=reduced):
            kind, stage, place = pass_.action
            own = number[stage, place]
            if kind == "F":
                in_flight[own] = 1
            gathered = rank.most_gathered(pass_)
            loss = rank.in_loss(pass_) - gathered if kind == "F" else NEVER
            sliced = pass_.beside if kind != "F" and (pass_.made or pass_.beside) else NEVER
            there = pass_.ends + gathered + pass_.gradients + pass_.cached + pass_.made
            rows.append((there, own, kind == "F", loss, sliced))
            held.append(in_flight.copy())
            if kind in ("B", "W"):
                in_flight[own] = 0
        base, own_chunk, forward, losses, slices = (np.array(column) for column in zip(*rows, strict=True))
        # A layer's mean of what its stage keeps, and the most of what one makes.
        of_kept, of_made = [], []
        for stage, place in chunks:
            pack, numbers = run.packs[place], rank.job.numbers_of_stage(stage) or (0,)
            each = [
                [tokens(pack.sharers, pack.keys, kind, number) for kind in KINDS] for number in {*numbers}
            ]
            shares = [numbers.count(number) / len(numbers) for number in {*numbers}]
            length = pack.length * pack.sharers
            of_kept.append(length * (shares @ np.array([[b.kept for b in kinds] for kinds in each])))
            most = [[(b.forward, b.backward, b.attention) for b in kinds] for kinds in each]
            of_made.append(length * np.array(most).max(axis=0))
        kept, made = np.array(of_kept), np.moveaxis(np.array(of_made), -1, 0)
        layers = np.array([rank.job.layers[stage] for stage, _ in chunks])
        return cls(base, np.array(held), own_chunk, forward, losses, slices, kept, made, layers)

    def bytes_of(self, counts: Ints) -> Floats:
        """(P,), at the fullest moment of each pass, with int64 (C, K), layers of each kind."""
        return np.asarray(self.base + sum(map(self.of_chunk, range(len(counts)), counts)))

    def of_chunk(self, chunk: int, counts: Ints) -> Floats:
        """(P,), a chunk's part of `bytes_of`, with int64 (K,)."""
        held = counts * self.kept[chunk]
        freed = held.cumsum() - held
        forward, backward, attention = np.where(counts > 0, self.made[:, chunk] - freed, NEVER).max(axis=1)
        made = np.where(self.forward, forward, backward)
        made = np.maximum(np.maximum(made, self.loss), self.slices + attention)
        return np.asarray(self.in_flight[:, chunk] * held.sum() + np.where(self.own == chunk, made, 0.0))


def unmixed(moments: Moments, free: Bools) -> Ints:
    """Layers of each kind, int64 (C, K), with which the walk begins: `none` in chunks that are `free`, (C,),
    to have a mix, and UNCHOSEN in others."""
    counts = np.zeros_like(moments.kept, dtype=np.int64)
    counts[free, 0] = moments.layers[free]
    counts[~free, UNCHOSEN] = moments.layers[~free]
    return counts


def mixed(moments: Moments, counts: Ints, seconds: Floats, slack: Floats, room: float) -> Ints:
    """Layers of each kind, int64 (C, K), with which the run takes at most `room` bytes; the last that were
    tried if nothing does.

    Args:
        counts: as of `unmixed`; changed in place.
        seconds: (C, K), that a layer of each kind repeats.
        slack: (C,), seconds for which nothing waits when the chunk's backward pass takes them longer.
    """
    free = counts[:, UNCHOSEN] == 0
    start, end = MOVES.T
    gained = moments.kept[:, start] - moments.kept[:, end]
    gained[~free] = 0
    repeated = seconds[:, end] - seconds[:, start]
    slack, bytes_ = slack.copy(), moments.bytes_of(counts)

    def moved(chunk: int, move: int, layers: int) -> tuple[Ints, Floats]:
        """The chunk's layers of each kind, and the bytes of all passes, after a move."""
        changed = counts[chunk].copy()
        changed[MOVES[move]] += [-layers, layers]
        difference = moments.of_chunk(chunk, changed) - moments.of_chunk(chunk, counts[chunk])
        return changed, bytes_ + difference

    while (over := (bytes_[fullest := int(bytes_.argmax())]) - room) > 0:
        possible = (gained > 0) & (counts[:, start] > 0) & (moments.in_flight[fullest, :, None] > 0)
        waited = np.maximum(repeated - slack[:, None], 0) + HIDDEN * repeated
        price = np.where(possible, waited / np.where(possible, gained, 1), np.inf)
        while not np.isinf(price.flat[cheapest := int(price.argmin())]):
            c, m = divmod(cheapest, len(MOVES))
            own, layers = c == moments.own[fullest], int(counts[c, start[m]])
            if not own:
                layers = min(layers, int(np.ceil(over / gained[c, m])))
            if min(slack[c], repeated[c, m]) > 0:
                layers = min(layers, max(1, int(slack[c] / repeated[c, m])))
            changed, of_changed = moved(c, m, layers)
            # In its own backward pass the first layer that repeats more may need more than it frees.
            if not own or of_changed[fullest] < bytes_[fullest]:
                counts[c], bytes_ = changed, of_changed
                slack[c] = max(slack[c] - layers * repeated[c, m], 0)
                break
            price.flat[cheapest] = np.inf
        else:
            return counts
    price = repeated / np.where(gained > 0, gained, np.nan)
    dearest = np.argsort(-price, axis=None)[: np.count_nonzero(gained > 0)]
    for c, m in zip(*(places.tolist() for places in np.divmod(dearest, len(MOVES))), strict=True):
        if counts[c, end[m]]:
            room_left = room - bytes_[moments.in_flight[:, c] > 0].max()
            layers = min(int(counts[c, end[m]]), int(room_left // gained[c, m]))
            if layers > 0:
                changed, of_changed = moved(c, m, -layers)
                if of_changed.max() <= room:
                    counts[c], bytes_ = changed, of_changed
    return counts


def shares(mixes: Iterable[Ints]) -> dict[str, float]:
    """The share of layers of each kind, in arrays (..., kinds)."""
    counts = np.sum([mix.reshape(-1, len(KINDS)).sum(axis=0) for mix in mixes], axis=0)
    return {kind.name: float(count / counts.sum()) for kind, count in zip(KINDS, counts, strict=True)}


def kinds_of_layers(mix: Ints) -> tuple[str, ...]:
    """The kind of each layer of the model, in order, from `MicroBatch.mix`."""
    names = [kind.name for kind in reversed(KINDS)]
    return tuple(name for stage in mix for name in np.repeat(names, stage[::-1]).tolist())
