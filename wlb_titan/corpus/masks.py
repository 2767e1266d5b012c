"""Label masks: which tokens of a document a model learns to predict, and which it only reads.

There is a value for each token: in a mask 1 or 0, in labels a learned token once more and IGNORED elsewhere.
A document's first token is never a label, whatever its mask says: nothing comes before it.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.corpus.shards import BLOCK, Shard, Tokens
from wlb_titan.errors import CorpusError

IGNORED = -100  # the label of a token that is not learned


class LabelMask:
    """A value for each token: 0 or 1, or with `labels` a label. Messages say `name`, the column or file."""

    def __init__(self, values: Shard, tokens: Shard, *, labels: bool, name: str) -> None:
        if values.documents != tokens.documents:
            raise CorpusError(
                f"The mask {name} has {values.documents:,} documents, {tokens.path} has "
                f"{tokens.documents:,}; write both from the same documents."
            )
        for start in range(0, tokens.documents, BLOCK):
            rows = np.arange(start, min(start + BLOCK, tokens.documents))
            there, wanted = values.lengths(rows), tokens.lengths(rows)
            if (different := np.flatnonzero(there != wanted)).size:
                place = int(different[0])
                raise CorpusError(
                    f"The mask {name} has {there[place]:,} values for {tokens.source(start + place)}, which "
                    f"has {wanted[place]:,} tokens; it must have one for each token."
                )
        self._values, self._tokens, self._labels, self._name = values, tokens, labels, name

    def read(self, row: int, start: int, length: int) -> Bools:
        """bool (length,), which of these tokens of a document are learned; other values are refused."""
        values = self._values.read(row, start, length)
        wrong = self._wrong(values, self._tokens.read(row, start, length))
        if wrong.any():
            place = int(np.argmax(wrong))
            raise CorpusError(self._complaint(row, start + place, int(values[place])))
        return self._learned(values)

    def fits(self, rows: Ints, most: int) -> bool:
        """Whether `read` takes the first `most` values of each of these documents."""
        return not self._wrong(self._values.gathered(rows, most), self._tokens.gathered(rows, most)).any()

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        """int64 (n,), learned tokens among start .. stop - 1 of each document."""
        begins, _ = self._values.bounds(rows)
        values, places = self._values.values, zip(begins + starts, begins + stops, strict=True)
        return np.array([self._learned(values[a:b]).sum() for a, b in places], dtype=np.int64)

    def _wrong(self, values: Tokens, tokens: Tokens) -> Bools:
        learned = self._learned(values)
        wrong: Bools = learned & (values != tokens) if self._labels else ~learned & (values != 0)
        return wrong

    def _learned(self, values: Tokens) -> Bools:
        learned: Bools = values != IGNORED if self._labels else values == 1
        return learned

    def _complaint(self, row: int, place: int, value: int) -> str:
        where = f"Token {place} of {self._tokens.source(row)}"
        if not self._labels:
            return f"{where} has the value {value} in the mask {self._name}; a mask has 1 and 0 only."
        token = int(self._tokens.read(row, place, 1)[0])
        return (
            f"{where} is {token}, and its label in {self._name} is {value}; a label is the token at its own "
            f"place, or {IGNORED}. Labels that are shifted by one already must be shifted back."
        )
