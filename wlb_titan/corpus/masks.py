"""Label masks: which tokens of a document a model learns to predict, and which it only reads.

A mask lies beside the tokens, in one of two forms:

- spans, as `wlb-titan prepare --chat` writes them: of each document the first token of every learned stretch
  and the first one after it, [3, 9, 14, 20]. A few numbers a document, so that the labels of any piece are
  counted without its tokens.
- a value for each token, as other tools have it: a mask of 0 and 1, or labels, which are the token itself
  where it is learned and IGNORED where it is not.

A document's first token is never a label, whatever its mask says: nothing comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.corpus.arrow import ArrowShard
from wlb_titan.corpus.shards import BLOCK, Shard
from wlb_titan.errors import CorpusError

IGNORED = -100
"""Of labels: this token is not learned."""

COLUMNS = ("labels", "loss_mask", "assistant_masks")
"""Columns of datasets that say what is learned, by the names that other tools give them."""


class Mask(Protocol):
    """The mask of a shard's documents."""

    def read(self, row: int, start: int, length: int) -> Bools:
        """bool (length,), whether each of these tokens of a document is learned."""
        ...

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        """int64 (n,), learned tokens among the tokens start .. stop - 1 of each of these documents."""
        ...


class SpanMask:
    """Spans in a column of their own. See `Mask`.

    Args:
        spans: its lists hold the begin and end of each learned stretch, ascending.
    """

    def __init__(self, spans: ArrowShard) -> None:
        self._spans = spans

    def read(self, row: int, start: int, length: int) -> Bools:
        bounds, _ = self._spans.read_several(np.array([row]))
        places = np.arange(start, start + length)
        learned: Bools = np.searchsorted(bounds, places, side="right") % 2 == 1
        return learned

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        bounds, counts = self._spans.read_several(rows)
        documents = np.repeat(np.arange(len(rows)), counts)
        inside = np.clip(bounds, starts[documents], stops[documents])
        signs = 1 - 2 * ((np.arange(len(bounds)) - np.repeat(np.cumsum(counts) - counts, counts)) % 2)
        return np.bincount(documents, -signs * inside, len(rows)).astype(np.int64)

    def spans(self, row: int) -> Ints:
        """int64 (2 n,), begin and end of the document's learned stretches."""
        return self._spans.read_several(np.array([row]))[0].astype(np.int64)


class TokenMask:
    """A value for each token. See `Mask`.

    Args:
        values: values of the documents of `tokens`, one for each token.
        labels: the values are labels, not 0 and 1.
        name: name of the column or file, for messages.

    Raises:
        CorpusError: a document has another number of values than of tokens.
    """

    def __init__(self, values: Shard, tokens: Shard, *, labels: bool, name: str) -> None:
        if values.documents != tokens.documents:
            raise CorpusError(
                f"The mask {name} has {values.documents:,} documents, {tokens.path} has "
                f"{tokens.documents:,}; write both from the same documents."
            )
        for start in range(0, tokens.documents, BLOCK):
            rows = np.arange(start, min(start + BLOCK, tokens.documents))
            own, theirs = values.lengths(rows), tokens.lengths(rows)
            if (different := np.flatnonzero(own != theirs)).size:
                place = int(different[0])
                raise CorpusError(
                    f"The mask {name} has {own[place]:,} values for document {start + place} "
                    f"({tokens.source(start + place)}), which has {theirs[place]:,} tokens; it must have one "
                    "for each token."
                )
        self._values = values
        self._tokens = tokens
        self._labels = labels
        self._name = name

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
        where = f"Token {place} of document {row} ({self._tokens.source(row)})"
        if not self._labels:
            return f"{where} has the value {value} in the mask {self._name}; a mask has 1 and 0 only."
        token = int(self._tokens.read(row, place, 1)[0])
        return (
            f"{where} is {token}, and its label in {self._name} is {value}; a label is the token at its own "
            f"place, or {IGNORED}. Labels that are shifted by one already must be shifted back."
        )


def chosen_column(path: Path, columns: Sequence[str], wanted: str) -> str | None:
    """The column of a dataset that says what is learned.

    Args:
        wanted: a column; "auto" is the one that there is of COLUMNS; "none" is no mask.

    Raises:
        CorpusError: there is no such column, or several say it.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        if wanted not in columns:
            raise CorpusError(
                f"{path} has no column {wanted!r}; it has {', '.join(columns)}.", setting="corpus.mask"
            )
        return wanted
    there = [column for column in COLUMNS if column in columns]
    if len(there) > 1:
        raise CorpusError(
            f"{path} has the columns {', '.join(there)}, which all say what is to be learned. Name the one "
            "to go by with wlb.corpus.mask (of a mixture, `mask` of the source), or learn every token with "
            'mask = "none".',
            setting="corpus.mask",
        )
    return there[0] if there else None
