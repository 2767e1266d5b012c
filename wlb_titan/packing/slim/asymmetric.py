"""The asymmetric partition: backward passes have MicroPacks of their own (SlimPack, section 4.1.2).

Attention costs the backward pass more than the forward pass, and linear layers another factor, so that packs
of equal work in one pass are of unequal work in the other. Where layers are recomputed anyway nothing ties a
backward pass to the tokens of one forward pass, and each can be balanced by itself. No solver is needed: a
rank's documents lie end to end in one line, heaviest first, which is cut into M pieces of equal work.

    forward     documents in order, each from its begin to its end, by the work of forward passes
    backward    documents in the same order, each from its end to its begin, by that of backward passes,
                what they compute again included

so that forward passes are first in first out, and backward passes first in first out between documents and
last in first out within one. A piece may hold the end of one document, whole documents and the begin of
another, so a backward pass waits until all documents of its piece have gone forward.

Example: documents of 6 and 4 tokens, work by their squares, M = 2, tokens 0, 1, ... of the line above and
what they cost, 52 in all:

    forward     6: 1 3 5 7 9 | 11, 4: 1 3 5 7         25 and 27
    backward    6: 11 9 7 | 5 3 1, 4: 7 5 3 1         27 and 25
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.packing.slim.slices import (
    MicroPack,
    Parts,
    Slice,
    WorkOf,
    check_count,
    most_slices,
    none_empty,
    piece_numbers,
    work_table,
)
from wlb_titan.plan import LENGTH, PREFIX, TOTAL


class Line:
    """Documents end to end, to be cut where the work is equal.

    Args:
        work_of: work of whole documents by their lengths. The work of a slice is that of its end less that of
            its begin, so that the first tokens of a document cost least.
        longest: tokens of the longest document.
        grain: tokens; within a document cuts are at multiples of it.
        least: tokens of a piece, at most `grain`.
    """

    def __init__(self, work_of: WorkOf, longest: int, grain: int, least: int = 1) -> None:
        self._work_of, self._grain, self._least = work_of, grain, least
        self._table = work_table(work_of, longest, grain)

    def cut(self, lengths: Ints, count: int) -> list[MicroPack]:
        """Cuts the line into pieces of equal work, as near as the grain allows and none of them too short.

        A document that is too short by itself goes with what lies before it.

        Args:
            lengths: int64 (n,), tokens of the documents, in the order of the line.
            count: M, pieces.

        Returns:
            The slices of each piece, in the order of the line.
        """
        units = most_slices(lengths, self._grain, self._least)
        check_count(lengths, units, self._least, count)
        works = self._work_of(lengths)
        ends = np.cumsum(works)
        wanted = ends[-1] * np.arange(1, count) / count
        document = np.minimum(np.searchsorted(ends, wanted, side="right"), len(lengths) - 1)
        within = wanted - (ends - works)[document]
        above = np.clip(np.searchsorted(self._table, within), 1, np.maximum(units[document], 1))
        beyond = np.where(above >= units[document], works[document], self._table[above])
        places = above - (within - self._table[above - 1] < beyond - within)
        places += (np.cumsum(units) - units)[document]
        end = int(units.sum())
        return self._pieces(lengths, units, [0, *none_empty(places, end).tolist(), end])

    def _pieces(self, lengths: Ints, units: Ints, places: Sequence[int]) -> list[MicroPack]:
        """The slices between places, which count grains from the begin of the line."""
        grain = self._grain
        pieces: list[MicroPack] = [[] for _ in places[1:]]
        begin, number = 0, 0
        for document, (length, own) in enumerate(zip(lengths.tolist(), units.tolist(), strict=True)):
            first = 0
            while first < own:
                last = min(own, places[number + 1] - begin)
                pieces[number].append(Slice(document, first * grain, length if last == own else last * grain))
                first = last
                number += begin + last == places[number + 1]
            if not own:
                pieces[min(number, len(pieces) - 1)].append(Slice(document, 0, length))
            begin += own
        return pieces


def asymmetric(
    lengths: Ints, works: Floats, lines: tuple[Line, Line], count: int
) -> tuple[list[MicroPack], list[MicroPack]]:
    """The MicroPacks of one rank, of forward and of backward passes, each in the order of running.

    Args:
        lengths: int64 (n,), tokens of the documents.
        works: float64 (n,), by which the line is sorted, heaviest first.
        lines: how a line is cut for forward and for backward passes.
        count: M, of each kind.
    """
    order = np.argsort(-works, kind="stable")
    forward, backward = lines
    ahead = forward.cut(lengths[order], count)
    back = backward.cut(lengths[order[::-1]], count)
    return (
        [_renumbered(piece, order) for piece in ahead],
        [_renumbered(piece[::-1], order[::-1]) for piece in reversed(back)],
    )


def _renumbered(piece: MicroPack, order: Ints) -> MicroPack:
    return [Slice(int(order[document]), start, stop) for document, start, stop in piece]


def last_needed(forward: Sequence[Parts], backward: Sequence[Parts]) -> list[int]:
    """The last forward pass that each backward pack waits for: that of its documents' last tokens.

    Args:
        forward, backward: packs of one data-parallel rank, in the order of running.
    """
    numbers = piece_numbers([*forward, *backward])
    ends: dict[int, int] = {}
    for pack, ((documents, slices), own) in enumerate(zip(forward, numbers, strict=False)):
        last = slices[:, PREFIX] + documents[:, LENGTH] == slices[:, TOTAL]
        ends |= dict.fromkeys(own[last].tolist(), pack)
    return [max(ends[piece] for piece in own.tolist()) for own in numbers[len(forward) :]]
