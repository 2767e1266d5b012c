"""Slices: runs of consecutive tokens of one document, each in a pack of its own (SlimPack, section 4).

A slice's queries see all tokens of the document up to themselves: the prefix, whose keys earlier slices
computed, and the slice. Its work is the difference that it makes:

    W(slice) = W(prefix + length) - W(prefix)

so the slices of a document add up to the document's work. Forward passes of slices run from the document's
start to its end, and backward passes from its end to its start, because the gradients of keys are complete
only when every later slice has added its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError
from wlb_titan.plan import ID, LENGTH, PREFIX, START, TOTAL, MicroBatch

WorkOf = Callable[[NDArray[Any]], Floats]


class Slice(NamedTuple):
    """A run of tokens of one document."""

    document: int  # row among the documents that are packed together
    start: int  # within the document: the tokens of the prefix
    stop: int


MicroPack = list[Slice]
"""The slices of one forward and backward pass; whole documents are slices without a prefix."""


def kind(micro_batch: MicroBatch) -> str:
    """The formation state of a MicroPack (section 4): `slim` has slices of documents that continue in other
    packs, `pack` whole documents, `mix` both."""
    assert micro_batch.slices is not None
    sliced = micro_batch.slices[:, TOTAL] > micro_batch.lengths
    return "slim" if sliced.all() else "mix" if sliced.any() else "pack"


def slice_work(work_of: WorkOf, documents: Ints, slices: Ints | None) -> Floats:
    """float64 (n,), work of slices, or (2, n) of two passes; `work_of` gives that of whole documents by their
    lengths."""
    lengths = documents[:, LENGTH]
    if slices is None or not slices[:, PREFIX].any():
        return work_of(lengths)
    prefix = slices[:, PREFIX]
    result = work_of(prefix + lengths)
    behind = prefix > 0
    result[..., behind] -= work_of(prefix[behind])
    return result


def piece_numbers(packs: Sequence[MicroBatch]) -> list[Ints]:
    """For each pack int64 (n,), numbers of its documents: slices of one document have the same.

    Two pieces of one document, cut at a context window, are two documents here.
    """
    documents = np.concatenate([pack.documents for pack in packs])
    prefixes = np.concatenate([pack.slices[:, PREFIX] for pack in packs if pack.slices is not None])
    pieces = documents[:, ID], documents[:, START] - prefixes
    order = np.lexsort(pieces[::-1])
    differs = np.any([np.diff(column[order], prepend=-1) != 0 for column in pieces], axis=0)
    numbers = np.empty(len(documents), dtype=np.int64)
    numbers[order] = np.cumsum(differs) - 1
    return np.split(numbers, np.cumsum([len(pack.documents) for pack in packs])[:-1])


def cache_rows(packs: Sequence[MicroBatch]) -> list[Ints]:
    """For each pack of a data-parallel rank int64 (n, 4): the document's number, or -1 if it is not cut and
    need not be cached; PREFIX, LENGTH and TOTAL."""
    numbers, lengths = piece_numbers(packs), np.concatenate([pack.lengths for pack in packs])
    prefix, total = np.concatenate([pack.slices for pack in packs if pack.slices is not None]).T
    ids, ends = np.concatenate(numbers), np.cumsum([len(own) for own in numbers])
    cut = np.zeros(len(ids), dtype=np.bool_)
    cut[ids[total > lengths]] = True
    rows = np.stack([np.where(cut[ids], ids, -1), prefix, lengths, total], axis=1)
    return np.split(rows, ends[:-1])


def last_needed(packs: Sequence[MicroBatch]) -> Ints:
    """int64 (n,), the last forward pass that each backward one waits for: that of its documents' last tokens.

    Args:
        packs: those of one data-parallel rank; backward ones come after the forward ones.
    """
    pieces = np.concatenate(piece_numbers(packs))
    places = np.repeat(np.arange(len(packs)), [len(pack.documents) for pack in packs])
    forward, backward = (np.array([kind in pack.passes for pack in packs]) for kind in "FB")
    ends = [s[:, PREFIX] + pack.lengths == s[:, TOTAL] for pack in packs if (s := pack.slices) is not None]
    last = np.concatenate(ends) & forward[places]
    place_of = np.empty(int(pieces.max()) + 1, dtype=np.int64)
    place_of[pieces[last]] = places[last]
    needed = np.zeros(len(packs), dtype=np.int64)
    np.maximum.at(needed, places, place_of[pieces])
    return np.asarray(needed[backward])


class PrefixWork:
    """The work of a document's first tokens, and its inverse: how many tokens make up some work.

    Documents are cut at multiples of `grain` tokens.

    Args:
        work_of: work of whole documents by their lengths.
        longest: tokens of the longest document.
        least: fewest tokens of a slice, at most `grain`.
    """

    def __init__(self, work_of: WorkOf, longest: int, grain: int, least: int = 1) -> None:
        self.grain, self.least = grain, least
        self.work_of = work_of
        grid = np.arange(1, -(-longest // grain) + 1, dtype=np.int64) * grain
        # A fitted model may fall between two tiles.
        self._table = np.maximum.accumulate(np.concatenate([[0.0], work_of(grid)]))

    def most_slices(self, lengths: Ints) -> Ints:
        """int64 (n,), the most slices that documents can be cut into; 0 for those too short for one."""
        return np.maximum((lengths - self.least) // self.grain + 1, 0)

    def check(self, lengths: Ints, count: int) -> None:
        most = int(self.most_slices(lengths).sum()) or int(lengths.sum() >= self.least)
        if most < count:
            raise PlanError(
                f"{len(lengths)} documents of {int(lengths.sum())} tokens cannot be cut into {count} "
                "MicroPacks."
            )

    def places(self, lengths: Ints, works: Floats, wanted: Floats) -> Ints:
        """Where to cut a line of documents, with the works of each, so that about the work `wanted`, rising,
        lies before each cut.

        Returns:
            int64 (k,), in grains from the start of the line; no piece is empty.
        """
        units = self.most_slices(lengths)
        ends = np.cumsum(works)
        document = np.minimum(np.searchsorted(ends, wanted, side="right"), len(lengths) - 1)
        within = wanted - (ends - works)[document]
        above = np.clip(np.searchsorted(self._table, within), 1, np.maximum(units[document], 1))
        beyond = np.where(above >= units[document], works[document], self._table[above])
        places = above - (within - self._table[above - 1] < beyond - within)
        places += (np.cumsum(units) - units)[document]
        # Place i is at least i + 1, and leaves a grain for each piece after it.
        room = np.arange(len(places))
        places = np.maximum.accumulate(np.maximum(places, room + 1) - room) + room
        return np.minimum(places, int(units.sum()) - len(places) + room)

    def cuts(self, length: int, work: float, shares: Floats) -> list[int]:
        """Where to cut a document of this work into k slices of about the `shares`: k + 1 numbers from 0 on.

        The last slice gets the rest.
        """
        places = self.places(np.array([length]), np.array([work]), np.cumsum(shares[:-1]))
        return [0, *(places * self.grain).tolist(), length]
