"""Documents that are held out of training, to validate on them.

Which ones follows from a document's row alone (SplitMix64 of it, as a number from 0 to 1, is below the
share), so every rank and every run knows them without a list, whatever seed, policy or degrees it has. In the
lengths that a stream reads, a document that is not for it has no tokens; such are passed over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.documents.mixture import Lengths


def is_held_out(rows: Ints, share: float) -> Bools:
    """bool (n,), whether documents are held out, by their rows, int64 (n,), and the share that is."""
    with np.errstate(over="ignore"):
        bits = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    chosen: Bools = bits / 2.0**64 < share
    return chosen


class Divided:
    """The lengths of documents that are, or are not, held out, as far as they are in `rows`; 0 for the
    others. See `Lengths`."""

    def __init__(self, lengths: Lengths, share: float, *, held_out: bool, rows: range | None = None) -> None:
        self._lengths = lengths
        self._share = share
        self._held_out = held_out
        self._rows = range(len(lengths)) if rows is None else rows

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, rows: Any, /) -> Any:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        rows = np.asarray(rows, dtype=np.int64)
        kept = is_held_out(rows, self._share) == self._held_out
        kept &= (rows >= self._rows.start) & (rows < self._rows.stop)
        return np.where(kept, np.asarray(self._lengths[rows], dtype=np.int64), 0)
