"""`wlb`: variable-length packing with outlier queues, the paper's Algorithm 1; comments have its lines.
docs/packing.md has the rules for cases that it leaves open.

`thresholds = "auto"` takes, of several sets of multiples of an eighth of the window, the one with the least
delay + ((imbalance - 1) / tolerance)^2, averaged over the steps of a trial. The trial simplifies Algorithm 1:
long documents go to the least loaded micro-batch with room (`Bins.place`), short ones are poured on top as a
liquid, and what fits nowhere is left out, so the delay comes out too low where L_max is near the window. Its
sample is drawn with a fixed seed: all ranks find the same thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval, MinLen

from wlb_titan.arrays import Ints
from wlb_titan.bins import REMAINS, Bins, pack_by_work, split
from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError, warn
from wlb_titan.packing.arrivals import ARRIVAL, NOTHING, Arrivals, Waiting, delayed
from wlb_titan.packing.plain import imbalances
from wlb_titan.packing.policy import Ask, Packing, VariableLengthPolicy, drafts
from wlb_titan.plan import ID, LENGTH, START

PATIENCE = 16
"""Steps after which a document that fits nowhere comes first. With half as many the balance suffers."""


class Wlb(VariableLengthPolicy):
    """Micro-batches of different lengths and equal work, outliers wait in queues (Algorithm 1).

    Imbalance 1.01 to 1.03, delay 0.36 to 0.40, cut 0 %, with two queues.
    """

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

    def __init__(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        self._arrivals = Arrivals(stream, ask)
        self._micro_batches = ask.micro_batches
        self._ask = ask
        self._max_length = self.bound(ask, stream.window)
        sample = stream.mixture.sample()
        if config.thresholds == "auto":
            self.thresholds = tune(config, sample, stream.window, self._max_length, ask)
            self._warn_if_queues_lose(config, stream, ask)
        else:
            self.thresholds = config.thresholds
            check(self.thresholds, sample, stream.window)
        self._queues = Queues(self.thresholds, ask.micro_batches)
        self._remained: Waiting = NOTHING

    def next(self) -> Packing:
        n, iteration = self._micro_batches, self._arrivals.iteration
        batch = self._arrivals.next(self.waiting, left=int(self._remained[:, LENGTH].sum()))  # line 2
        doc_set = np.concatenate([self._remained, self._queues.add(batch), self._queues.pop()])  # 3 to 17
        while (missing := n - self._arrivals.least.filled(doc_set[:, LENGTH])) > 0:
            doc_set = np.concatenate([doc_set, self._queues.pop_oldest(missing)])
        doc_set = self._sorted(doc_set, iteration)  # 19
        lengths = doc_set[:, LENGTH]
        works = workload(self._ask.cost_model, lengths)
        assigned = pack_by_work(lengths, works, n, self._max_length)  # 21 to 35
        packed = assigned != REMAINS
        self._remained = doc_set[~packed]  # 32
        assigned = self._arrivals.least.topped_up(assigned[packed], lengths[packed])
        return Packing(drafts(split(delayed(doc_set[packed], iteration), assigned, n)))  # 36

    def _sorted(self, documents: Waiting, iteration: int) -> Waiting:
        """Longest first, after those that have remained for too long."""
        overdue = np.arange(len(documents)) < len(self._remained)
        overdue &= iteration - documents[:, ARRIVAL] >= PATIENCE
        documents = documents[np.lexsort((-documents[:, LENGTH], ~overdue))]
        return documents[self._arrivals.least.leading_first(documents[:, LENGTH])]

    def _warn_if_queues_lose(self, config: Config, stream: DocumentStream, ask: Ask) -> None:
        queues, plain = imbalances(replace(config, thresholds=self.thresholds), stream, ask)
        if queues > plain:
            warn(
                "Queues lose on these documents: with the best thresholds found, "
                f"{', '.join(map(str, self.thresholds))}, `wlb` has an imbalance of {queues:.3f} in a trial, "
                f"and `plain` has {plain:.3f}. Use `wlb_lazy`, or `plain`."
            )

    @property
    def waiting(self) -> Waiting:
        return np.concatenate([self._remained, *self._queues.waiting])

    def state_dict(self) -> dict[str, Any]:
        return {"arrivals": self._arrivals.state_dict(), "remained": len(self._remained)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state["arrivals"])
        # Thresholds may have changed, so the waiting outliers are queued again, in stream order.
        remained, queued = np.split(state["waiting"], [state["remained"]])
        self._queues = Queues(self.thresholds, self._micro_batches)
        freed = self._queues.add(queued[np.lexsort((queued[:, START], queued[:, ID]))])
        self._remained = np.concatenate([remained, freed])


class Queues:
    """Q of Algorithm 1: for each threshold a queue of the outliers of that length."""

    def __init__(self, thresholds: list[int], micro_batches: int) -> None:
        self._thresholds, self._micro_batches = thresholds, micro_batches
        self.waiting: list[Waiting] = [NOTHING for _ in thresholds]

    def add(self, batch: Waiting) -> Waiting:
        """Lines 4 to 11: outliers join their queues, and the other documents are returned."""
        level = np.searchsorted(self._thresholds, batch[:, LENGTH], side="right")  # 0: no outlier
        for i, queue in enumerate(self.waiting):
            self.waiting[i] = np.concatenate([queue, batch[level == i + 1]])
        others: Waiting = batch[level == 0]
        return others

    def pop(self) -> Waiting:
        """Lines 12 to 17: N documents of every queue that has as many."""
        n = self._micro_batches
        popped = [queue[:n] if len(queue) >= n else NOTHING for queue in self.waiting]
        self.waiting = [queue[len(out) :] for queue, out in zip(self.waiting, popped, strict=True)]
        return np.concatenate(popped)

    def pop_oldest(self, count: int) -> Waiting:
        level = np.repeat(np.arange(len(self.waiting)), [len(queue) for queue in self.waiting])
        waiting = np.concatenate(self.waiting)
        oldest = np.lexsort((level, waiting[:, ARRIVAL]))[:count]
        kept = np.delete(np.arange(len(waiting)), oldest)
        self.waiting = [waiting[kept[level[kept] == i]] for i in range(len(self.waiting))]
        return waiting[oldest]


def check(thresholds: list[int], lengths: Ints, window: int) -> None:
    """Refuses thresholds that are out of order or out of reach; warns of a queue that will grow for ever."""
    named = ", ".join(map(str, thresholds))
    if any(low >= high for low, high in pairwise(thresholds)):
        raise PlanError(
            f"The thresholds {named} are out of order; each must be above the one before.",
            setting="packing.thresholds",
        )
    if thresholds[-1] > window:
        raise PlanError(
            f"The threshold {thresholds[-1]} is above the context window of {window} tokens, and no document "
            "is longer than that, so its queue would stay empty for ever.",
            setting="packing.thresholds",
        )
    if not drains(lengths, thresholds, window):
        warn(
            f"With the thresholds {named} more documents join a queue in a step than can leave it, so it "
            'will grow for ever. Raise the thresholds, or use "auto".'
        )


def drains(lengths: Ints, thresholds: Sequence[int], window: int) -> bool:
    """Whether every queue gets fewer documents than the N in each step that can leave it.

    A step brings N window / (mean length) documents.
    """
    pieces = np.minimum(lengths, window)
    counts = np.histogram(pieces, bins=[*thresholds, window + 1])[0] + 0.0
    counts[-1] += float((-(-lengths // window) - 1).sum())
    return bool((counts / lengths.sum() * window).max() < 1)


GRID = 8  # automatic thresholds are multiples of window / GRID


def tune(config: Wlb.Config, lengths: Ints, window: int, max_length: int, ask: Ask) -> list[int]:
    """The thresholds L_1 < ... < L_n that suit documents of these lengths, int64 (documents,)."""
    if window < 2 * GRID:
        raise PlanError(
            f"Thresholds cannot be found for a window of {window} tokens; it needs at least {2 * GRID}. "
            "Otherwise set `thresholds` yourself.",
            setting="packing.thresholds",
        )
    grid = [window * step // GRID for step in range(1, GRID + 1)]
    tried = [list(limits) for limits in combinations(grid, config.queues) if drains(lengths, limits, window)]
    if not tried:
        raise PlanError(
            f"With queues = {config.queues}, outliers would arrive faster than any thresholds let them "
            "leave: too many documents of this corpus are long for its context window. Use a longer window "
            "or another packing policy.",
            setting="packing.queues",
        )
    return min(tried, key=ThresholdTrial(lengths, window, max_length, config.tolerance, ask).cost)


class ThresholdTrial:
    """Global batches of documents drawn at random, on which thresholds are compared."""

    STEPS = 48
    WARM_UP = 8  # steps until queues are usually filled
    MOST_MICRO_BATCHES = 32
    LONG = 32  # documents of window / LONG tokens are packed one by one

    def __init__(self, lengths: Ints, window: int, max_length: int, tolerance: float, ask: Ask) -> None:
        self._micro_batches = min(ask.micro_batches, self.MOST_MICRO_BATCHES)
        self._tokens = self._micro_batches * window  # of a step
        self._max_length, self._tolerance = max_length, tolerance
        self._ask = ask
        rng = np.random.default_rng(0)
        self._batches = []  # (long documents, work of the short ones, their tokens)
        for _ in range(self.STEPS):
            pieces = self._drawn(lengths, window, rng)
            long = pieces >= window // self.LONG
            documents = np.zeros((int(long.sum()), 4), dtype=np.int64)
            documents[:, LENGTH] = pieces[long]
            short = pieces[~long]
            work = float(workload(self._ask.cost_model, short).sum())
            self._batches.append((documents, work, int(short.sum())))

    def _drawn(self, lengths: Ints, window: int, rng: np.random.Generator) -> Ints:
        """Lengths of the pieces of a global batch."""
        expected = int(self._tokens / lengths.mean()) + 1
        drawn = np.empty(0, dtype=np.int64)
        while drawn.sum() < self._tokens:
            drawn = np.concatenate([drawn, rng.choice(lengths, expected)])
        drawn = drawn[: int(np.searchsorted(np.cumsum(drawn), self._tokens)) + 1]
        whole, rest = drawn // window, drawn % window
        return np.concatenate([np.full(int(whole.sum()), window), rest[rest > 0]])

    def cost(self, thresholds: list[int]) -> float:
        """delay + ((imbalance - 1) / tolerance)^2, summed over steps."""
        queues = Queues(thresholds, self._micro_batches)
        cost = 0.0
        for step, (long, work, tokens) in enumerate(self._batches):
            doc_set = np.concatenate([queues.add(long), queues.pop()])
            if step < self.WARM_UP:
                continue
            documents = -np.sort(-doc_set[:, LENGTH])
            bins = Bins(self._micro_batches, self._max_length)
            bins.place(documents, workload(self._ask.cost_model, documents))
            imbalance = bins.portions(work, tokens)[1][-1]
            held = sum(int(queue[:, LENGTH].sum()) for queue in queues.waiting)
            cost += held / self._tokens + ((imbalance - 1) / self._tolerance) ** 2
        return cost
