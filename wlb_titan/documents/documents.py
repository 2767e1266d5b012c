"""The documents that a job trains on, as far as planning is concerned: their lengths; and which of them are
held out, to validate on them.

Which ones are held out follows from a document's row alone (SplitMix64 of it, as a number from 0 to 1, is
below the share), so every rank and every run knows them without a list, whatever seed, policy or degrees it
has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.documents.mixture import Lengths, Mixture, Source, count_longer


def all_learned(rows: Ints, starts: Ints, stops: Ints) -> Ints:
    """`Documents.learned` where there is no label mask."""
    return stops - starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A corpus, or several mixed.

    Attributes:
        lengths: tokens of every corpus row: an int64 array (documents,), or what looks them up.
        name: where they come from, for reports.
        sources: what the rows belong to, and their shares; none is one source of all.
        seed: seed of the epochs' orders; None reads the corpus in its own order.
        learned: learned tokens of pieces, int64 (n,), by their corpus rows, first tokens and the tokens after
            their last ones, int64 (n,) each.
        fingerprint: names the content; a planner's state goes on only with the one it was saved with.
    """

    lengths: Lengths
    name: str = ""
    sources: tuple[Source, ...] = ()
    seed: int | None = 0
    learned: Callable[[Ints, Ints, Ints], Ints] = all_learned
    fingerprint: str = ""

    def mixture(self) -> Mixture:
        """The order in which they are read."""
        return Mixture(self.lengths, self.sources, seed=self.seed)

    def sample(self) -> Ints:
        """int64 (n,), lengths as they come in the stream; of all if they are few."""
        return self.mixture().sample()

    def describe(self, window: int, tokens: int) -> list[str]:
        """A sentence on the corpus, and of a mixture one on each source."""
        mixture = self.mixture()
        long = count_longer(self.lengths, window)
        cut = f", {long:,} of them longer than the window and cut" if long else ""
        head = f"{self.name}: {mixture.filled:,} documents, {mixture.tokens:,} tokens{cut}."
        return [head, *mixture.describe(tokens)]


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
    """The `Lengths` of documents that are held out, or of those that are not, as far as they are in `rows`; 0
    for all others, which a stream passes over."""

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
