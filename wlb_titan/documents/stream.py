"""The endless stream of documents that all packing policies read.

A `Mixture` fixes the order of the documents, and a document's id is its place in that order, from 0. The
stream looks lengths up a block of documents at a time and keeps a few blocks, so it takes the same memory for
10^3 and for 10^10 documents. Its state is a document, how many of its tokens were read, and the pieces that
were given back (`give_back`), which come before the rest of it.

Example: three documents of 5, 2 and 4 tokens, not shuffled, window 4. `arrive(4)` gives [(0, 0, 4)], the
first piece of document 0; the next `arrive(4)` gives [(0, 4, 1), (1, 0, 2), (2, 0, 4)]: the pieces that
begin within the next 4 tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.documents.mixture import Mixture
from wlb_titan.errors import PlanError
from wlb_titan.plan import ID, LENGTH, START

Pieces = Ints  # int64 (n, 3), columns ID, START, LENGTH: runs of tokens of documents, in stream order

BLOCK = 1 << 16  # most documents of a block
SMALLEST_BLOCK = 1 << 8
CACHED_BLOCKS = 4


class DocumentStream:
    """The documents of a mixture, without end, in pieces of at most `window` tokens; skips empty ones."""

    def __init__(self, mixture: Mixture, window: int) -> None:
        if window < 2:
            raise PlanError(
                f"The context window is {window} tokens; it must be at least 2.", setting="training.seq_len"
            )
        self.mixture = mixture
        self.window = window
        self._block_size = min(max(mixture.documents, SMALLEST_BLOCK), BLOCK)
        self._block = lru_cache(CACHED_BLOCKS)(self._read_block)
        self._document = 0  # id of the document that is being read
        self._offset = 0  # tokens of it that were read
        self._returned: Pieces = np.empty((0, 3), dtype=np.int64)  # given back, to come before it

    def from_start(self) -> DocumentStream:
        """A stream of these documents at its start, for another reader."""
        return DocumentStream(self.mixture, self.window)

    @property
    def next_document(self) -> int:
        """Id of the first document of which nothing was read."""
        return self._document + (self._offset > 0)

    def left(self, end: int) -> int:
        """Tokens that are still to come of the documents with ids below `end`."""
        blocks = (np.arange(first, min(first + BLOCK, end)) for first in range(self._document, end, BLOCK))
        returned = self._returned[self._returned[:, ID] < end, LENGTH]
        coming = sum(int(self.lengths_of(ids).sum()) for ids in blocks) + int(returned.sum())
        return coming - (self._offset if self._document < end else 0)

    def lengths_of(self, ids: Ints) -> Ints:
        """int64 (n,), tokens of whole documents by id."""
        return self.mixture.read(ids)[1]

    def has_label(self, pieces: Ints) -> Bools:
        """bool (n,), whether a piece has a token to predict: all do but the last token of a document by
        itself. Only the columns ID, START, LENGTH are read."""
        result = pieces[:, LENGTH] > 1
        if not result.all():  # single tokens are rare, and only for them must the document be looked up
            single = pieces[~result]
            result[~result] = single[:, START] + 1 < self.lengths_of(single[:, ID])
        return result

    def give_back(self, pieces: Pieces) -> None:
        """Takes pieces back that were read before and are still to be trained: they come next, in order."""
        pieces = np.concatenate([pieces, self._returned])
        self._returned = pieces[np.lexsort((pieces[:, START], pieces[:, ID]))]

    def _take_returned(self, tokens: int) -> Pieces:
        """Those of the pieces given back that start within the next `tokens` tokens."""
        starts = np.cumsum(self._returned[:, LENGTH]) - self._returned[:, LENGTH]
        count = int(np.searchsorted(starts, tokens, side="left"))
        pieces, self._returned = self._returned[:count], self._returned[count:]
        return pieces

    def fill(self, tokens: int) -> Pieces:
        """Exactly the next `tokens` tokens; the next call continues a document that was cut at the end."""
        pieces = self._take_returned(tokens).copy()
        tokens -= int(pieces[:, LENGTH].sum())
        if tokens < 0:
            rest = pieces[-1:].copy()
            pieces[-1, LENGTH] += tokens
            rest[0, START] += pieces[-1, LENGTH]
            rest[0, LENGTH] = -tokens
            self.give_back(rest)
        parts = [pieces]
        while tokens > 0:
            pieces = self._coming(tokens)
            pieces[-1, LENGTH] -= max(int(pieces[:, LENGTH].sum()) - tokens, 0)
            tokens -= self._read(pieces)
            parts.append(pieces)
        return np.concatenate(parts)

    def skip_unlabelled(self) -> int:
        """Moves on to the next token that has a label; returns the tokens skipped."""
        skipped = 0
        while True:  # each time as much again
            start, pieces = self.state_dict(), self.fill(skipped + self.window)
            labelled = self.has_label(pieces)
            if labelled.any():
                before = int(pieces[: labelled.argmax(), LENGTH].sum())
                self.load_state_dict(start)
                self.fill(before)
                return skipped + before
            skipped += skipped + self.window

    def arrive(self, tokens: int, enough: Callable[[Pieces], bool] = lambda pieces: True) -> Pieces:
        """Whole pieces that begin within the next `tokens` tokens, and more until they are `enough`; more
        pieces are never less so.

        The last one may reach past `tokens`; the caller subtracts the excess from its next budget.
        """
        start, pieces = self.state_dict(), self._arrive(tokens)
        if enough(pieces):
            return pieces
        least = len(pieces)
        while not enough(pieces):  # each time as much again
            pieces = np.concatenate([pieces, self._arrive(max(int(pieces[:, LENGTH].sum()), 1))])
        before = bisect_left(range(least, len(pieces)), True, key=lambda last: enough(pieces[: last + 1]))
        self.load_state_dict(start)
        return self._arrive(int(pieces[: least + before, LENGTH].sum()) + 1)

    def _arrive(self, tokens: int) -> Pieces:
        parts = [self._take_returned(tokens)]
        tokens -= int(parts[0][:, LENGTH].sum())
        while tokens > 0:
            pieces = self._coming(tokens)
            counts = -(-pieces[:, LENGTH] // self.window)
            before = self.window * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
            pieces = np.repeat(pieces, counts, axis=0)
            pieces[:, START] += before
            pieces[:, LENGTH] = np.minimum(pieces[:, LENGTH] - before, self.window)
            begins = np.cumsum(pieces[:, LENGTH]) - pieces[:, LENGTH]
            pieces = pieces[: int(np.searchsorted(begins, tokens, side="left"))]
            tokens -= self._read(pieces)
            parts.append(pieces)
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        return {"document": self._document, "offset": self._offset, "first": self._returned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._document, self._offset = int(state["document"]), int(state["offset"])
        self._returned = np.array(state["first"], dtype=np.int64).reshape(-1, 3)

    def _read(self, pieces: Pieces) -> int:
        """Moves on to the token after these pieces; returns their tokens."""
        self._document, self._offset = int(pieces[-1, ID]), int(pieces[-1, START] + pieces[-1, LENGTH])
        return int(pieces[:, LENGTH].sum())

    def _coming(self, tokens: int) -> Pieces:
        """What is still to come of the documents that begin within the next `tokens` tokens, as far as their
        block goes."""
        while True:
            number, first = divmod(self._document, self._block_size)
            begins = self._block(number)
            if (begin := int(begins[first]) + self._offset) < begins[-1]:
                break
            self._document, self._offset = (number + 1) * self._block_size, 0  # only empty documents are left
        last = int(np.searchsorted(begins[1:], begin + tokens, side="left"))  # of the last token
        lengths = np.diff(begins[first + 1 : last + 2], prepend=begin)
        pieces = np.zeros((len(lengths), 3), dtype=np.int64)
        pieces[:, ID] = np.arange(self._document, self._document + len(lengths))
        pieces[0, START] = self._offset
        pieces[:, LENGTH] = lengths
        return pieces[lengths > 0]

    def _read_block(self, number: int) -> Ints:
        """int64 (documents + 1,), tokens of a block before each of its documents, and all of them."""
        ids = np.arange(number * self._block_size, (number + 1) * self._block_size)
        return np.concatenate([[0], np.cumsum(self.lengths_of(ids))])
