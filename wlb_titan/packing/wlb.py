"""`wlb`: variable-length packing with outlier queues, the paper's Algorithm 1.

Documents of at least L_1 tokens are outliers and wait, first in, first out, in the queue of their length. A
queue that holds N documents gives N of them to the step, one for each micro-batch; all other documents are
packed in the step in which they arrive, by least work (see `algorithm1`).

One rule is added, for a case of which the paper does not speak: where outliers leave a step with fewer than N
documents that have a token to predict, the outliers that have waited longest join it, so that no micro-batch
is ever empty. Every micro-batch has such a document, as the N longest go to N different ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing import algorithm1
from wlb_titan.packing.arrivals import ARRIVAL, NOTHING, Arrivals, Waiting, delayed, restore, split
from wlb_titan.packing.policy import Packing, PackingPolicy
from wlb_titan.plan import ID, LENGTH, START


class Wlb(PackingPolicy):
    """Algorithm 1.

    Args:
        stream: documents in pieces of at most the window.
        micro_batches: N.
        cost_model: W_a + W_l.
        thresholds: L_1 < ... < L_n in tokens, one for each queue, at most the window.
        max_length: L_max in tokens, at least the window.
    """

    fixed_length = False
    balances = True

    def __init__(
        self,
        stream: DocumentStream,
        *,
        micro_batches: int,
        cost_model: CostModel,
        thresholds: list[int],
        max_length: int,
    ) -> None:
        self._stream = stream
        self._arrivals = Arrivals(stream, micro_batches=micro_batches)
        self._micro_batches = micro_batches
        self._cost_model = cost_model
        self.thresholds = thresholds
        self.max_length = max_length
        self._queues: list[Waiting] = [NOTHING for _ in thresholds]
        self._remained: Waiting = NOTHING

    def next(self) -> Packing:
        iteration = self._arrivals.iteration
        labelled = self._stream.has_label(np.concatenate([self._remained, *self._queues]))
        batch = self._arrivals.next(labelled=int(labelled.sum()), left=int(self._remained[:, LENGTH].sum()))
        pending = [self._remained, self._enqueue(batch)]
        for i, waiting in enumerate(self._queues):
            if len(waiting) >= self._micro_batches:
                pending.append(waiting[: self._micro_batches])
                self._queues[i] = waiting[self._micro_batches :]
        documents = np.concatenate(pending)
        missing = self._micro_batches - int(self._stream.has_label(documents).sum())
        if missing > 0:
            documents = np.concatenate([documents, self._release_oldest(missing)])
        documents = documents[np.argsort(-documents[:, LENGTH], kind="stable")]
        assigned = algorithm1.pack(
            documents[:, LENGTH],
            workload(self._cost_model, documents[:, LENGTH]),
            self._micro_batches,
            self.max_length,
        )
        packed = assigned != algorithm1.REMAINS
        self._remained = documents[~packed]
        return Packing(split(delayed(documents[packed], iteration), assigned[packed], self._micro_batches))

    def _enqueue(self, documents: Waiting) -> Waiting:
        """Puts outliers into their queues and returns the others."""
        queue = np.searchsorted(self.thresholds, documents[:, LENGTH], side="right")  # 0: no outlier
        for i, waiting in enumerate(self._queues):
            self._queues[i] = np.concatenate([waiting, documents[queue == i + 1]])
        others: Waiting = documents[queue == 0]
        return others

    def _release_oldest(self, count: int) -> Waiting:
        """Takes the `count` outliers out of their queues that have waited longest."""
        queue = np.repeat(np.arange(len(self._queues)), [len(waiting) for waiting in self._queues])
        waiting = np.concatenate(self._queues)
        oldest = np.lexsort((queue, waiting[:, ARRIVAL]))[:count]
        kept = np.delete(np.arange(len(waiting)), oldest)
        self._queues = [waiting[kept[queue[kept] == i]] for i in range(len(self._queues))]
        return waiting[oldest]

    @property
    def waiting(self) -> NDArray[np.int64]:
        return np.concatenate([self._remained, *self._queues])[:, LENGTH]

    def state_dict(self) -> dict[str, Any]:
        return {
            "arrivals": self._arrivals.state_dict(),
            "remained": self._remained.tolist(),
            "queued": np.concatenate(self._queues).tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state["arrivals"])
        # Thresholds may have changed, so the waiting outliers are queued anew, in stream order.
        queued = restore(state["queued"])
        self._queues = [NOTHING for _ in self.thresholds]
        freed = self._enqueue(queued[np.lexsort((queued[:, START], queued[:, ID]))])
        self._remained = np.concatenate([restore(state["remained"]), freed])
