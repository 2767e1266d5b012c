"""Thresholds of the queues of Algorithm 1: checked, or found for a corpus (`thresholds = "auto"`).

They are found much as the paper does it: several thresholds are tried on a sample of the corpus, and those
with the best balance at a low delay are taken. The candidates are multiples of an eighth of the window; what
is least is delay + ((imbalance - 1) / tolerance)^2, averaged over steps, the price that `wlb_lazy` minimises.

The trial is a likeness of Algorithm 1. Its queues are the same. But long documents go to the least loaded
micro-batch with room (`Bins.place`), and short ones, which are never outliers and serve to fill, are poured
on top as a liquid; and what fits nowhere is left out, where the algorithm would pack it in the next step. So
where L_max is near the window the delay comes out too low. The sample is drawn with a fixed seed: all ranks
find the same thresholds.
"""

from __future__ import annotations

import warnings
from itertools import combinations, pairwise

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.errors import PlanError
from wlb_titan.packing.bins import Bins

GRID = 8  # thresholds are multiples of window / GRID
STEPS = 48
WARM_UP = 8  # steps until queues are usually filled
MOST_MICRO_BATCHES = 32  # of the trial runs
LONG = 32  # documents of window / LONG tokens are packed one by one


def tune(
    lengths: Ints,
    *,
    queues: int,
    window: int,
    micro_batches: int,
    max_length: int,
    cost_model: CostModel,
    tolerance: float,
) -> list[int]:
    """The thresholds L_1 < ... < L_n that suit these lengths.

    Args:
        lengths: int64 (documents,), tokens of the corpus' documents.
        window: context window in tokens, at least 16.
        micro_batches: N; trial runs use at most 32.
        max_length: L_max in tokens.
        cost_model: W_a + W_l.
        tolerance: imbalance above 1 that weighs as much as a delay of one iteration.
    """
    if not 1 <= queues <= GRID or window < 2 * GRID:
        raise PlanError(
            f"Thresholds for {queues} queues cannot be found for a window of {window} tokens; there can be 1 "
            f"to {GRID} queues, and the window must have {2 * GRID} tokens. Else give `thresholds` yourself.",
            setting="packing.queues",
        )
    micro_batches = min(micro_batches, MOST_MICRO_BATCHES)
    batches = [_Batch(batch, window, cost_model) for batch in _sample(lengths, window, micro_batches)]
    grid = [window * step // GRID for step in range(1, GRID + 1)]
    best: tuple[float, list[int]] | None = None
    for thresholds in map(list, combinations(grid, queues)):
        if not drains(lengths, thresholds, window):
            continue
        score = _score(batches, thresholds, window, micro_batches, max_length, cost_model, tolerance)
        if best is None or score < best[0]:
            best = score, thresholds
    if best is None:
        raise PlanError(
            f"No thresholds for {queues} queues let outliers leave as fast as they come: too many documents "
            "of this corpus are long for its context window. Use a longer window or another packing policy.",
            setting="packing.queues",
        )
    return best[1]


def drains(lengths: Ints, thresholds: list[int], window: int) -> bool:
    """Whether no queue gets more documents than the N a step that it can give away.

    A step brings N window / (mean length) documents; those of a queue must be fewer than N.
    """
    pieces = np.minimum(lengths, window)  # what is cut off a longer document adds no more than itself again
    counts = np.histogram(pieces, bins=[*thresholds, window + 1])[0] + 0.0
    counts[-1] += float((-(-lengths // window) - 1).sum())
    return bool((counts / lengths.sum() * window).max() < 1)


def check(thresholds: list[int], lengths: Ints, window: int) -> None:
    """Raises PlanError where thresholds are not ascending, or no document could reach one, or all would.

    Warns where a queue will grow for ever.
    """
    named, setting = ", ".join(map(str, thresholds)), "packing.thresholds"
    if not thresholds:
        raise PlanError(
            'There are no thresholds; give one length in tokens for each queue, or "auto".', setting=setting
        )
    if any(low >= high for low, high in pairwise(thresholds)):
        raise PlanError(
            f"The thresholds {named} are out of order; each must be above the one before.", setting=setting
        )
    if thresholds[-1] > window:
        raise PlanError(
            f"The threshold {thresholds[-1]} is above the context window of {window} tokens, and no document "
            "is longer than that, so its queue would stay empty for ever.",
            setting=setting,
        )
    if thresholds[0] < 2:
        raise PlanError(
            f"The threshold {thresholds[0]} is below 2 tokens, so every document would wait.", setting=setting
        )
    if not drains(lengths, thresholds, window):
        warnings.warn(
            f"With the thresholds {named} more documents join a queue in a step than can leave it, so it "
            'will grow for ever. Raise the thresholds, or use "auto".',
            stacklevel=2,
        )


class _Batch:
    """One global batch: its long documents, and its short ones as a liquid."""

    def __init__(self, lengths: Ints, window: int, cost_model: CostModel) -> None:
        long = lengths >= window // LONG
        self.long = lengths[long]
        self.tokens = int(lengths[~long].sum())
        self.work = float(workload(cost_model, lengths[~long]).sum())


def _sample(lengths: Ints, window: int, micro_batches: int) -> list[Ints]:
    """Global batches of documents drawn at random, as pieces of at most the window."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        expected = int(micro_batches * window / lengths.mean()) + 1
        drawn = np.empty(0, dtype=np.int64)
        while drawn.sum() < micro_batches * window:
            drawn = np.concatenate([drawn, rng.choice(lengths, expected)])
        drawn = drawn[: int(np.searchsorted(np.cumsum(drawn), micro_batches * window)) + 1]
        whole, rest = drawn // window, drawn % window
        batches.append(np.concatenate([np.full(int(whole.sum()), window), rest[rest > 0]]))
    return batches


def _score(
    batches: list[_Batch],
    thresholds: list[int],
    window: int,
    micro_batches: int,
    max_length: int,
    cost_model: CostModel,
    tolerance: float,
) -> float:
    queues: list[Ints] = [np.empty(0, dtype=np.int64) for _ in thresholds]
    score = 0.0
    for step, batch in enumerate(batches):
        queue = np.searchsorted(thresholds, batch.long, side="right")
        pending = [batch.long[queue == 0]]
        for i in range(len(queues)):
            queues[i] = np.concatenate([queues[i], batch.long[queue == i + 1]])
            if len(queues[i]) >= micro_batches:
                pending.append(queues[i][:micro_batches])
                queues[i] = queues[i][micro_batches:]
        if step < WARM_UP:
            continue
        documents = -np.sort(-np.concatenate(pending))
        bins = Bins(micro_batches, max_length)
        bins.place(documents, workload(cost_model, documents))
        imbalance = bins.portions(batch.work, batch.tokens)[1][-1]
        held = sum(int(waiting.sum()) for waiting in queues)
        score += held / (micro_batches * window) + ((imbalance - 1) / tolerance) ** 2
    return score
