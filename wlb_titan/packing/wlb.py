"""`wlb`: variable-length packing with outlier queues, the paper's Algorithm 1.

Documents of at least L_1 tokens are outliers and wait, first in, first out, in the queue of their length. A
queue that holds N documents gives N of them to the step, one for each micro-batch; all other documents are
packed in the step in which they arrive, by least work (see `bins.pack_by_work`).

Two rules are added, for cases of which the paper does not speak:

- Where outliers leave a step with too little for N micro-batches (`least`), those that have waited longest
  join it. Every micro-batch has enough, as the N longest documents go to N different ones.
- A document that fitted nowhere is packed again in the next step, but as one of the shortest it would come
  last there too. After `PATIENCE` steps it comes first.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval, MinLen

from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing import thresholds
from wlb_titan.packing.arrivals import (
    ARRIVAL,
    NOTHING,
    Arrivals,
    Waiting,
    delayed,
    fills,
    leading_first,
    split,
    topped_up,
)
from wlb_titan.packing.bins import REMAINS, pack_by_work
from wlb_titan.packing.plain import MOST_MICRO_BATCHES, imbalance_of_plain, mean_imbalance
from wlb_titan.packing.policy import Packing, VariableLengthPolicy, drafts
from wlb_titan.plan import ID, LENGTH, START

if TYPE_CHECKING:
    from wlb_titan.job import Job

PATIENCE = 16
"""Steps after which a document that fits nowhere comes first. With half as many the balance suffers."""


class Wlb(VariableLengthPolicy):
    """Micro-batches of different lengths and equal work, outliers wait in queues (Algorithm 1)."""

    @dataclass(kw_only=True, slots=True)
    class Config(VariableLengthPolicy.Config):
        thresholds: Annotated[list[Annotated[int, Ge(2)]], MinLen(1)] | Literal["auto"] = "auto"
        """Smallest length of the documents of each queue, L_1 < ... < L_n, at most the window. `auto` tries
        several on a sample of the corpus and takes the best."""

        queues: Annotated[int, Interval(ge=1, le=8)] = 2
        """n, the number of queues with automatic thresholds."""

        tolerance: Annotated[float, Interval(ge=1e-6, le=1e6)] = 0.065
        """With automatic thresholds: the imbalance above 1 that weighs as much as a delay of one iteration
        for every token."""

    def __init__(self, config: Config, stream: DocumentStream, job: Job) -> None:
        self._stream = stream
        self._arrivals = Arrivals(stream, job)
        self._micro_batches, self._least = job.micro_batches, job.degrees.context
        self._cost_model = job.cost_model
        self._max_length = self.bound(job)
        self.thresholds = self._thresholds(config)
        self._queues: list[Waiting] = [NOTHING for _ in self.thresholds]
        self._remained: Waiting = NOTHING
        if config.thresholds == "auto":
            self._warn_if_queues_lose(config, job)

    def _thresholds(self, config: Config) -> list[int]:
        sample, window = self._stream.mixture.sample(), self._stream.window
        if config.thresholds != "auto":
            thresholds.check(config.thresholds, sample, window)
            return config.thresholds
        return thresholds.tune(
            sample,
            queues=config.queues,
            window=window,
            micro_batches=self._micro_batches,
            max_length=self._max_length,
            cost_model=self._cost_model,
            tolerance=config.tolerance,
        )

    def _warn_if_queues_lose(self, config: Config, job: Job) -> None:
        """Compares the best thresholds found to `plain`, in a trial of both."""
        few = replace(job, micro_batches=min(job.micro_batches, MOST_MICRO_BATCHES))
        trial = Wlb(replace(config, thresholds=self.thresholds), self._stream.anew(), few)
        queues = mean_imbalance(trial, job.cost_model)
        plain = imbalance_of_plain(self._stream, job)
        if queues > plain:
            warnings.warn(
                "Queues lose on these documents: with the best thresholds found, "
                f"{', '.join(map(str, self.thresholds))}, `wlb` has an imbalance of {queues:.3f} in a trial, "
                f"and `plain` has {plain:.3f}. Use `wlb_lazy`, or `plain`.",
                stacklevel=3,
            )

    def next(self) -> Packing:
        iteration = self._arrivals.iteration
        batch = self._arrivals.next(self.waiting, left=int(self._remained[:, LENGTH].sum()))
        pending = [self._remained, self._enqueue(batch)]
        for i, waiting in enumerate(self._queues):
            if len(waiting) >= self._micro_batches:
                pending.append(waiting[: self._micro_batches])
                self._queues[i] = waiting[self._micro_batches :]
        documents = np.concatenate(pending)
        tokens = self._stream.labelled(documents)
        while (missing := self._micro_batches - fills(tokens, self._least)) > 0:
            documents = np.concatenate([documents, self._release_oldest(missing)])
            tokens = self._stream.labelled(documents)
        overdue = np.arange(len(documents)) < len(self._remained)
        overdue &= iteration - documents[:, ARRIVAL] >= PATIENCE
        order = np.lexsort((-documents[:, LENGTH], ~overdue))
        order = leading_first(order, tokens >= self._least, self._micro_batches)
        documents, tokens = documents[order], tokens[order]
        assigned = pack_by_work(
            documents[:, LENGTH],
            workload(self._cost_model, documents[:, LENGTH]),
            self._micro_batches,
            self._max_length,
        )
        packed = assigned != REMAINS
        self._remained = documents[~packed]
        assigned = topped_up(assigned[packed], tokens[packed], self._micro_batches, self._least)
        return Packing(drafts(split(delayed(documents[packed], iteration), assigned, self._micro_batches)))

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
    def waiting(self) -> Waiting:
        return np.concatenate([self._remained, *self._queues])

    def state_dict(self) -> dict[str, Any]:
        return {"arrivals": self._arrivals.state_dict(), "remained": len(self._remained)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state["arrivals"])
        # Thresholds may be others, so the waiting outliers are queued again, in stream order.
        remained, queued = np.split(state["waiting"], [state["remained"]])
        self._queues = [NOTHING for _ in self.thresholds]
        freed = self._enqueue(queued[np.lexsort((queued[:, START], queued[:, ID]))])
        self._remained = np.concatenate([remained, freed])
