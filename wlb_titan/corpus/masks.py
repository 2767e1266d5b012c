"""Label masks: which tokens of a document a model learns to predict, and which it only reads.

- Spans, from `wlb-titan prepare --chat`: for each document, the first token of every learned stretch and the
  first one after it, [3, 9, 14, 20]. From them the labels of a piece are counted without its tokens.
- A value for each token, from other tools: a mask of 0 and 1, or labels, which repeat a learned token and are
  IGNORED elsewhere.

A document's first token is never a label, whatever its mask says: nothing comes before it.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.corpus.shards import BLOCK, ArrowShard, Shard, Tokens
from wlb_titan.errors import CorpusError

IGNORED = -100  # the label of a token that is not learned


class SpanMask:
    def __init__(self, spans: ArrowShard) -> None:
        self._spans = spans

    def read(self, row: int, start: int, length: int) -> Bools:
        """bool (length,), which of these tokens of a document are learned."""
        bounds, _ = self._lists(np.array([row]))
        places = np.arange(start, start + length)
        learned: Bools = np.searchsorted(bounds, places, side="right") % 2 == 1
        return learned

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        """int64 (n,), learned tokens among start .. stop - 1 of each document."""
        bounds, counts = self._lists(rows)
        documents = np.repeat(np.arange(len(rows)), counts)
        inside = np.clip(bounds, starts[documents], stops[documents])
        signs = 1 - 2 * ((np.arange(len(bounds)) - np.repeat(np.cumsum(counts) - counts, counts)) % 2)
        return np.bincount(documents, -signs * inside, len(rows)).astype(np.int64)

    def _lists(self, rows: Ints) -> tuple[Tokens, Ints]:
        """The documents' lists, joined, and their lengths, int64 (n,)."""
        begins, ends = self._spans.bounds(rows)
        counts = ends - begins
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._spans.values[np.repeat(begins, counts) + within], counts


class TokenMask:
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
        values = self._values.read(row, start, length)
        if self._labels:
            learned: Bools = values != IGNORED
            wrong = learned & (values != self._tokens.read(row, start, length))
        else:
            learned = values == 1
            wrong = ~learned & (values != 0)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise CorpusError(self._complaint(row, start + place, int(values[place])))
        return learned

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        pieces = zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
        counts = [int(self.read(row, start, max(stop - start, 0)).sum()) for row, start, stop in pieces]
        return np.array(counts, dtype=np.int64)

    def _complaint(self, row: int, place: int, value: int) -> str:
        where = f"Token {place} of {self._tokens.source(row)}"
        if not self._labels:
            return f"{where} has the value {value} in the mask {self._name}; a mask has 1 and 0 only."
        token = int(self._tokens.read(row, place, 1)[0])
        return (
            f"{where} is {token}, and its label in {self._name} is {value}; a label is the token at its own "
            f"place, or {IGNORED}. Labels that are shifted by one already must be shifted back."
        )


Mask = SpanMask | TokenMask
