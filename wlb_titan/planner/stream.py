"""The endless stream of documents that all packing policies read.

The stream visits a corpus epoch by epoch, each epoch in an order of its own that follows from (seed, epoch)
alone. Ids count documents in stream order from 0, so document `id` is number `id % documents` of epoch
`id // documents`. All that has to be saved is where the next token lies: a document's id and an offset in it.

Example: three documents of 5, 2 and 4 tokens, not shuffled, window 4. `arrive(4)` gives [(0, 0, 4)], the
first piece of document 0; the next `arrive(4)` gives [(0, 4, 1), (1, 0, 2), (2, 0, 4)]: the pieces that
begin within the next 4 tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.plan import ID, LENGTH, START

Pieces = NDArray[np.int64]
"""int64 (n, 3), columns ID, START, LENGTH: runs of tokens of documents, in stream order."""

CACHED_DOCUMENTS = 1_000_000  # orders of past epochs are kept up to this many documents, and two at least


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch's order, laid out as one long line of tokens.

    Attributes:
        rows: int32 or int64 (documents,), the corpus row of each document in stream order.
        ends: int64 (documents,), tokens of the epoch up to and including each document.
    """

    rows: NDArray[np.integer[Any]]
    ends: NDArray[np.int64]

    def begin(self, position: int) -> int:
        """Tokens of the epoch before the document at `position`."""
        return int(self.ends[position - 1]) if position else 0


class DocumentStream:
    """Documents of a corpus, shuffled anew every epoch, without end.

    Args:
        lengths: int64 (documents,), tokens of every corpus row.
        window: context window in tokens, at least 2; `arrive` cuts longer documents into such pieces.
        seed: of the epochs' orders; None keeps the corpus' own order in every epoch.

    Raises:
        PlanError: the corpus is empty, or a length is not positive, or no document has two tokens (then
            there is no token to predict), or the window is below 2.
    """

    def __init__(self, lengths: NDArray[np.int64], *, window: int, seed: int | None) -> None:
        self._lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        if self._lengths.ndim != 1 or not self._lengths.size:
            raise PlanError("The corpus has no documents, so there is nothing to plan.")
        if window < 2:
            raise PlanError(f"The context window is {window} tokens; it must be at least 2.")
        if (shortest := int(self._lengths.min())) < 1:
            row = int(self._lengths.argmin())
            raise PlanError(f"Document {row} of the corpus has length {shortest}; lengths must be positive.")
        if int(self._lengths.max()) < 2:
            raise PlanError("All documents have one token, so there is no next token to learn to predict.")
        self.window = window
        self.seed = seed
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._next = 0  # id of the document that holds the next token
        self._offset = 0  # the next token's place in it

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (documents,), tokens of every corpus row."""
        return self._lengths

    @property
    def documents(self) -> int:
        """Documents of one epoch."""
        return self._lengths.size

    @property
    def long_documents(self) -> int:
        """Documents of one epoch that are longer than the window."""
        return int(np.count_nonzero(self._lengths > self.window))

    @property
    def epoch(self) -> int:
        """The epoch of the next token."""
        return self._next // self.documents

    def row_of(self, id_: int) -> int:
        """The corpus row of document `id_`, of any epoch."""
        epoch, position = divmod(id_, self.documents)
        return int(self._epoch(epoch).rows[position])

    def lengths_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 (n,), tokens of whole documents by id."""
        epochs, positions = np.divmod(ids, self.documents)
        result = np.empty(ids.shape, dtype=np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            result[mine] = self._lengths[self._epoch(int(epoch)).rows[positions[mine]]]
        return result

    def has_label(self, pieces: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool (n,), whether a piece has a token to predict.

        A token's label is the next token of its document, so only a document's very last token has none.
        Only the columns ID, START, LENGTH of `pieces` are read.
        """
        result = pieces[:, LENGTH] > 1
        if not result.all():  # single tokens are rare, and only for them must the document be looked up
            single = pieces[~result]
            result[~result] = single[:, START] + 1 < self.lengths_of(single[:, ID])
        return result

    def fill(self, tokens: int) -> Pieces:
        """Exactly the next `tokens` tokens; a document cut at the end goes on with the next call."""
        parts = []
        while tokens:
            epoch = self._epoch(self.epoch)
            first = self._next % self.documents
            begin = epoch.begin(first) + self._offset
            end = min(begin + tokens, int(epoch.ends[-1]))
            last = int(np.searchsorted(epoch.ends, end, side="left"))  # the document of the last token
            ends = np.minimum(epoch.ends[first : last + 1], end)
            pieces = np.zeros((last + 1 - first, 3), dtype=np.int64)
            pieces[:, ID] = np.arange(self._next, self._next + len(pieces))
            pieces[0, START] = self._offset
            pieces[:, LENGTH] = np.diff(ends, prepend=begin)
            parts.append(pieces)
            tokens -= end - begin
            self._move(int(pieces[-1, ID]), int(pieces[-1, START] + pieces[-1, LENGTH]))
        return np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int64)

    def skip_rest(self) -> int:
        """Passes over the rest of a piece that `fill` cut; returns how many tokens that were.

        Of a document longer than the window only the rest up to the next multiple of the window goes.
        """
        if not self._offset:
            return 0
        length = int(self._lengths[self.row_of(self._next)])
        stop = min(length, -(-self._offset // self.window) * self.window)
        skipped = stop - self._offset
        self._move(self._next, stop)
        return skipped

    def arrive(self, tokens: int, *, at_least: int = 0) -> Pieces:
        """The whole documents, in pieces of at most the window, that begin within the next `tokens` tokens.

        The last piece may reach past `tokens`; the stream goes on after it.

        Args:
            tokens: budget; the caller takes what was read too much off the next one.
            at_least: pieces with a label that must be among them, whatever the budget.
        """
        parts = [self._arrive(tokens)] if tokens > 0 else []
        labelled = sum(int(self.has_label(part).sum()) for part in parts)
        while labelled < at_least:
            parts.append(self._arrive(1))
            labelled += int(self.has_label(parts[-1]).sum())
        return np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int64)

    def _arrive(self, tokens: int) -> Pieces:
        parts = []
        while tokens > 0:
            epoch = self._epoch(self.epoch)
            first = self._next % self.documents
            begin = epoch.begin(first) + self._offset
            last = min(
                int(np.searchsorted(epoch.ends, begin + tokens, side="left")),
                self.documents - 1,
            )
            lengths = np.diff(epoch.ends[first : last + 1], prepend=begin)
            counts = -(-lengths // self.window)
            place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            pieces = np.empty((len(place), 3), dtype=np.int64)
            pieces[:, ID] = np.repeat(np.arange(self._next, self._next + len(lengths)), counts)
            pieces[:, START] = place * self.window
            pieces[:, LENGTH] = np.minimum(np.repeat(lengths, counts) - pieces[:, START], self.window)
            pieces[: counts[0], START] += self._offset
            begins = np.cumsum(pieces[:, LENGTH]) - pieces[:, LENGTH]
            pieces = pieces[: int(np.searchsorted(begins, tokens, side="left"))]
            parts.append(pieces)
            tokens -= int(pieces[:, LENGTH].sum())
            self._move(int(pieces[-1, ID]), int(pieces[-1, START] + pieces[-1, LENGTH]))
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        return {"document": self._next, "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next, self._offset = int(state["document"]), int(state["offset"])

    def _move(self, id_: int, offset: int) -> None:
        """Sets the next token to `offset` in document `id_`, or to the next document if that is its end."""
        if offset == int(self._lengths[self.row_of(id_)]):
            id_, offset = id_ + 1, 0
        self._next, self._offset = id_, offset

    def _epoch(self, number: int) -> _Epoch:
        if (epoch := self._epochs.get(number)) is None:
            wide = self.documents >= 2**31
            rows: NDArray[np.integer[Any]] = np.arange(self.documents, dtype=np.int64 if wide else np.int32)
            if self.seed is not None:
                np.random.default_rng((self.seed, number)).shuffle(rows)
            epoch = self._epochs[number] = _Epoch(rows, np.cumsum(self._lengths[rows]))
            while len(self._epochs) > max(2, CACHED_DOCUMENTS // self.documents):
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(number)
        return epoch
