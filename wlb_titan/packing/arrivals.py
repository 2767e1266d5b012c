"""Global batches as they arrive, and how arrival becomes delay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.least import fills
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
