"""Global batches as they arrive, how arrival becomes delay, and the least that a micro-batch holds.

The least is a token for each of the ranks that share it, and one to predict. A document that has as many
tokens by itself can lead a micro-batch. The first N of them come before all
others into N empty micro-batches, so whatever else is packed, none of these has too little. Only where there
are fewer than N, as of documents that are all very short, may some be moved afterwards.

Documents without a token to predict, which have one token, do not count: their tokens are taken as 0 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.policy import Pack
from wlb_titan.plan import DELAY, LENGTH

if TYPE_CHECKING:
    from wlb_titan.job import Job


Waiting = Ints
"""int64 (n, 4), columns ID, START, LENGTH and, in the place of DELAY, the iteration of arrival."""

ARRIVAL = DELAY

NOTHING: Waiting = np.empty((0, 4), dtype=np.int64)


class Arrivals:
    """Cuts the stream into global batches of micro_batches x window tokens.

    A document belongs to the batch in which its first token lies, whole: batches differ by less than one
    window, and keep to their size on average. There is always enough for N micro-batches (`least`), those
    that wait counted, which is nearly always so by itself, as documents are at most a window long.
    """

    def __init__(self, stream: DocumentStream, job: Job) -> None:
        self._stream = stream
        self._micro_batches, self._least = job.micro_batches, job.degrees.context
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
        before = self._stream.labelled(waiting)

        def enough(pieces: Ints) -> bool:
            tokens = np.concatenate([before, self._stream.labelled(pieces)])
            return fills(tokens, self._least) >= self._micro_batches

        pieces = self._stream.arrive(budget, enough)
        self._surplus = int(pieces[:, LENGTH].sum()) - budget
        batch = arrived(pieces, self.iteration)
        self.iteration += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "surplus": self._surplus}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iteration, self._surplus = int(state["iteration"]), int(state["surplus"])


def arrived(pieces: Ints, iteration: int) -> Waiting:
    """Pieces with the iteration at which they arrived."""
    waiting = np.empty((len(pieces), 4), dtype=np.int64)
    waiting[:, :ARRIVAL] = pieces
    waiting[:, ARRIVAL] = iteration
    return waiting


def delayed(packed: Waiting, iteration: int) -> Pack:
    """What is packed at `iteration`: arrivals become delays."""
    documents = packed.copy()
    documents[:, DELAY] = iteration - packed[:, ARRIVAL]
    return documents


def split(documents: Pack, assigned: Ints, packs: int) -> list[Pack]:
    """One array of documents for each pack, in the order in which they stand in `documents`.

    Args:
        documents: int64 (n, 4).
        assigned: int64 (n,), number of each document's pack, 0 to packs - 1.
        packs: number of packs.
    """
    order = np.argsort(assigned, kind="stable")
    ends = np.cumsum(np.bincount(assigned, minlength=packs))
    return np.split(documents[order], ends[:-1])


def fills(tokens: Ints, least: int) -> int:
    """How many micro-batches of at least so many tokens documents can fill, however they are packed.

    Args:
        tokens: int64 (n,), of each document with a token to predict, 0 of others.
        least: tokens of a micro-batch, at least 1.

    Returns:
        Those that can lead one, and besides as many as the shorter ones make up twice. More may be possible.
    """
    leads = tokens >= least
    return int(leads.sum()) + int(tokens[~leads].sum()) // (2 * least)


def leading_first(order: Ints, leads: Bools, count: int) -> Ints:
    """An order with the first `count` documents that can lead a micro-batch before all others.

    Args:
        order: int64 (n,), numbers of documents.
        leads: bool (n,), by number.
    """
    leading = leads[order]
    leading &= np.cumsum(leading) <= count
    return np.concatenate([order[leading], order[~leading]])


def topped_up(assigned: Ints, tokens: Ints, bins: int, least: int) -> Ints:
    """Documents in bins, some short ones of which are moved to where there are fewer than `least` tokens.

    Example: of bins with documents of [4, 2, 1] and [1] tokens, least 2, the second gets that of 2 tokens.

    Args:
        assigned: int64 (n,), bin of each document; not written to.
        tokens: int64 (n,), as of `fills`, which gives at least `bins` of them.
    """
    filled = np.bincount(assigned, tokens, bins)
    if filled.min() >= least:
        return assigned
    assigned = assigned.copy()
    while filled[short := int(filled.argmin())] < least:
        spare = (tokens > 0) & (tokens <= least) & (filled[assigned] - tokens >= least)
        if not spare.any():
            break
        moved = int(np.where(spare, tokens, 0).argmax())
        filled[assigned[moved]] -= tokens[moved]
        filled[short] += tokens[moved]
        assigned[moved] = short
    return assigned
