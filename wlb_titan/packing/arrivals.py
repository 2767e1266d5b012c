"""Global batches as they arrive, how arrival becomes delay, and the least that a micro-batch holds.

Every micro-batch needs a token for each of the ranks that share it, and one to predict: it holds at least
max(ranks, 2) tokens, those of documents of a single token not counted, as they have none to predict. A
document that has as many tokens by itself can lead a micro-batch. The first N of them are packed before all
others into N empty micro-batches, so none of these has too little, whatever else is packed. Only where there
are fewer than N, because all documents are very short, may some be moved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.documents.stream import DocumentStream, Pieces
from wlb_titan.packing.policy import Pack
from wlb_titan.plan import DELAY, LENGTH

if TYPE_CHECKING:
    from wlb_titan.job import Job


Waiting = Ints
"""int64 (n, 4), columns ID, START, LENGTH and, in the place of DELAY, the iteration of arrival."""

ARRIVAL = DELAY

NOTHING: Waiting = np.empty((0, 4), dtype=np.int64)


class Least:
    """The least that each of N micro-batches holds, which `ranks` share."""

    def __init__(self, micro_batches: int, ranks: int) -> None:
        self._micro_batches = micro_batches
        self.tokens = max(ranks, 2)

    def filled(self, lengths: Ints) -> int:
        """How many micro-batches documents of these lengths can fill, however they are packed: as many as can
        lead one, and as many as the shorter ones fill twice. More may be possible."""
        tokens = _counted(lengths)
        leads = tokens >= self.tokens
        return int(leads.sum()) + int(tokens[~leads].sum()) // (2 * self.tokens)

    def leading_first(self, lengths: Ints) -> Ints:
        """int64 (n,), numbers of documents, the first N that can lead a micro-batch before all others."""
        leading = lengths >= self.tokens
        leading &= np.cumsum(leading) <= self._micro_batches
        return np.argsort(~leading, kind="stable")

    def topped_up(self, assigned: Ints, lengths: Ints) -> Ints:
        """The micro-batch of each document, once short ones have been moved to where there is too little.

        Example: of micro-batches of [4, 2, 3] and [1] tokens, least 2, the second gets the document of 2.
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

    A window of nothing but documents of one token would have no label. Its last place is then kept for the
    first token of a longer document; the single tokens met before one comes are left out. They have no label
    and no other token sees them, so nothing learns less for it.
    """
    pieces = stream.fill(stream.window)
    left_out = 0
    while not stream.has_label(pieces).any():
        left_out += int(pieces[-1, LENGTH])
        pieces = np.concatenate([pieces[:-1], stream.fill(1)])
    return pieces, left_out


class Arrivals:
    """Cuts the stream into global batches of micro_batches x window tokens.

    A document belongs to the batch in which its first token lies, whole: batches differ by less than one
    window, and keep to their size on average. With the documents that wait there is always enough for N
    micro-batches. That is nearly always so by itself, as documents are at most a window long.
    """

    def __init__(self, stream: DocumentStream, job: Job) -> None:
        self._stream = stream
        self._micro_batches = job.micro_batches
        self._least = Least(job.micro_batches, job.degrees.context)
        self._surplus = 0  # tokens by which the last batch went past its end
        self.iteration = 0

    def next(self, waiting: Waiting = NOTHING, left: int = 0) -> Waiting:
        """The pieces of the next global batch, in stream order.

        Args:
            waiting: pieces that have arrived before and may be packed with these.
            left: tokens that did not fit into the last step. What exceeds a global batch makes the next one
                smaller, or else packs that are hardly longer than the window would leave ever more.
        """
        size = self._micro_batches * self._stream.window
        budget = max(size - self._surplus - max(left - size, 0), 0)

        def enough(pieces: Ints) -> bool:
            lengths = np.concatenate([waiting[:, LENGTH], pieces[:, LENGTH]])
            return self._least.filled(lengths) >= self._micro_batches

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
    """Pieces with the iteration at which they arrived."""
    return np.insert(pieces, ARRIVAL, iteration, axis=1)


def delayed(packed: Waiting, iteration: int) -> Pack:
    """What is packed at `iteration`: arrivals become delays."""
    documents = packed.copy()
    documents[:, DELAY] = iteration - packed[:, ARRIVAL]
    return documents


def split(documents: Pack, assigned: Ints, packs: int) -> list[Pack]:
    """The documents of each pack, in the order in which they stand in `documents`; `assigned` has the pack of
    each document, 0 to packs - 1."""
    order = np.argsort(assigned, kind="stable")
    ends = np.cumsum(np.bincount(assigned, minlength=packs))
    return np.split(documents[order], ends[:-1])
