"""Global batches as they arrive, how arrival becomes delay, and the least that a micro-batch holds.

That is a token for each context-parallel rank, and at least 2, not counting documents of a single token, as
they have none to predict. The first N documents with that many can lead a micro-batch each and are packed
before all others. Only if there are fewer, because all documents are very short, are some moved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.documents.stream import DocumentStream, Pieces
from wlb_titan.packing.policy import Ask, Pack
from wlb_titan.plan import DELAY, LENGTH

Waiting = Ints
"""int64 (n, 4), columns ID, START, LENGTH and, in the place of DELAY, the iteration of arrival."""

ARRIVAL = DELAY

NOTHING: Waiting = np.empty((0, 4), dtype=np.int64)


class Least:
    """The fewest tokens of each of N micro-batches, which `ranks` context-parallel ranks divide."""

    def __init__(self, micro_batches: int, ranks: int) -> None:
        self._micro_batches = micro_batches
        self.tokens = max(ranks, 2)

    def filled(self, lengths: Ints) -> int:
        """How many micro-batches documents of these lengths fill at least, however they are packed: one for
        each that can lead one, and as many as the shorter ones would fill twice."""
        return self.filled_by(self.counts(lengths))

    def counts(self, lengths: Ints) -> Ints:
        """int64 (2,), how many documents can lead one, and tokens of the shorter ones; they add up."""
        tokens = _counted(lengths)
        leads = tokens >= self.tokens
        return np.array([leads.sum(), tokens[~leads].sum()])

    def filled_by(self, counts: Ints) -> int:
        leads, shorter = counts.tolist()
        return int(leads + shorter // (2 * self.tokens))

    def leading_first(self, lengths: Ints) -> Ints:
        """int64 (n,), an order of the documents: the first N that can lead a micro-batch, then all others."""
        leading = lengths >= self.tokens
        leading &= np.cumsum(leading) <= self._micro_batches
        return np.argsort(~leading, kind="stable")

    def topped_up(self, assigned: Ints, lengths: Ints) -> Ints:
        """`assigned`, the micro-batch of each document, with short ones moved to where there is too little.

        Example: of micro-batches with documents of [4, 2, 3] and [1] tokens the second gets the one of 2.
        """
        tokens = _counted(lengths)
        filled = np.bincount(assigned, tokens, self._micro_batches)
        if filled.min() >= self.tokens:
            return assigned
        assigned = assigned.copy()
        while filled[short := int(filled.argmin())] < self.tokens:
            spare = (tokens > 0) & (tokens <= self.tokens) & (filled[assigned] - tokens >= self.tokens)
            if not spare.any():
                break
            moved = int(np.where(spare, tokens, 0).argmax())
            filled[assigned[moved]] -= tokens[moved]
            filled[short] += tokens[moved]
            assigned[moved] = short
        return assigned


def _counted(lengths: Ints) -> Ints:
    return np.where(lengths > 1, lengths, 0)


def next_window(stream: DocumentStream) -> tuple[Pieces, int]:
    """One full window of the stream, and the tokens left out to give it a token to predict.

    A window of nothing but documents of one token would have no label. Its last token is then replaced by
    the first token of the next longer document. Nothing is lost: single tokens have no label, and no other
    token sees them.
    """
    pieces = stream.fill(stream.window)
    if stream.has_label(pieces).any():
        return pieces, 0
    left_out = int(pieces[-1, LENGTH]) + stream.skip_unlabelled()
    return np.concatenate([pieces[:-1], stream.fill(1)]), left_out


class Arrivals:
    """Cuts the stream into global batches of micro_batches x window tokens.

    A document belongs, whole, to the batch in which its first token lies: batches differ by less than one
    window, and have the right size on average. Together with the documents that wait each is enough for N
    micro-batches.
    """

    def __init__(self, stream: DocumentStream, ask: Ask) -> None:
        self._stream = stream
        self._micro_batches = ask.micro_batches
        self.least = Least(ask.micro_batches, ask.context)
        self._surplus = 0  # tokens by which the last batch went past its end
        self.iteration = 0

    def next(self, waiting: Waiting = NOTHING, left: int = 0) -> Waiting:
        """The pieces of the next global batch, in stream order.

        Args:
            waiting: pieces that arrived earlier and may be packed with these.
            left: tokens that did not fit into the last step.
        """
        size = self._micro_batches * self._stream.window
        # If more than a global batch is left the next one is smaller, else ever more would be left.
        budget = max(size - self._surplus - max(left - size, 0), 0)

        def enough(pieces: Ints) -> bool:
            lengths = np.concatenate([waiting[:, LENGTH], pieces[:, LENGTH]])
            return self.least.filled(lengths) >= self._micro_batches

        pieces = self._stream.arrive(budget, enough)
        self._surplus = int(pieces[:, LENGTH].sum()) - budget
        batch = arrived(pieces, self.iteration)
        self.iteration += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "surplus": self._surplus}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iteration, self._surplus = int(state["iteration"]), int(state["surplus"])


def arrived(pieces: Pieces, iteration: int) -> Waiting:
    return np.insert(pieces, ARRIVAL, iteration, axis=1)


def delayed(packed: Waiting, iteration: int) -> Pack:
    """Documents that are packed at `iteration`: the column ARRIVAL becomes DELAY."""
    documents = packed.copy()
    documents[:, DELAY] = iteration - packed[:, ARRIVAL]
    return documents
