"""In which order a pipeline runs micro-batches of different sizes.

The dependency graph of the schedule (`pipeline_graph`, which has an example) gives the time of a step from
the times of its micro-batches' passes, and so orders can be compared before anything runs. `best` looks for
the shortest step: it tries every order where there are few, and otherwise improves the best of the simple
orders at random. Its effort is counted in passes evaluated and not in measured time, so that every rank finds
the same order. Communication is taken to cost nothing, and the stages to take equal times.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from wlb_titan.errors import PlanError
from wlb_titan.pipeline.graph import PipelineGraph
from wlb_titan.pipeline.schedule import SCHEDULES, PipelineShape

__all__ = ["ORDERS", "SCHEDULES", "PipelineGraph", "PipelineShape", "hill", "order_micro_batches"]

ORDERS = ("as_packed", "longest_first", "shortest_first", "best")

EXHAUSTIVE = 6
"""All orders are tried of at most this many micro-batches (720 orders)."""

BATCH = 64
"""Orders evaluated together in the search."""

PASS_SECONDS = 5e-6
"""What evaluating one pass for BATCH orders takes; turns milliseconds into a number of evaluations."""

Order = NDArray[np.int64]
Times = NDArray[np.float64]


def order_micro_batches(
    order: str, forward: Times, backward: Times, shape: PipelineShape, *, budget_ms: float = 2.0
) -> Order:
    """The order in which a rank runs its micro-batches.

    Args:
        order: one of ORDERS.
        forward: float64 (n,), time of each micro-batch's forward pass through one rank, in any unit.
        backward: float64 (n,), of its backward pass, in the same unit.
        shape: the pipeline.
        budget_ms: about how long `best` may search, in milliseconds of an ordinary core.

    Returns:
        int64 (n,): a permutation; its i-th entry is the micro-batch that runs as the i-th.

    Raises:
        PlanError: no such order, or `best` with a schedule that is not one of SCHEDULES.
    """
    if order not in ORDERS:
        raise PlanError(f"No order of micro-batches is called {order!r}; there are {', '.join(ORDERS)}.")
    work = forward + backward
    longest_first = np.argsort(-work, kind="stable")
    if order == "longest_first":
        return longest_first
    if order == "shortest_first":
        return np.argsort(work, kind="stable")
    as_packed = np.arange(len(work))
    if order == "as_packed" or shape.ranks == 1 or len(work) < 2:
        return as_packed
    graph = PipelineGraph(shape, len(work))
    if len(work) <= EXHAUSTIVE:
        orders = np.array(list(itertools.permutations(range(len(work)))))
        return np.asarray(orders[graph.step_times(forward, backward, orders).argmin()])
    starts = np.stack([as_packed, longest_first, longest_first[::-1], hill(longest_first)])
    return _search(graph, forward, backward, starts, budget_ms)


def hill(longest_first: Order) -> Order:
    """The longest in the middle and ever shorter ones towards both ends: 3 2 1 0 -> 2 0 1 3 by rank."""
    return np.concatenate([longest_first[::2][::-1], longest_first[1::2]])


def _search(graph: PipelineGraph, forward: Times, backward: Times, starts: Order, budget_ms: float) -> Order:
    """The best of `starts`, improved by random exchanges and moves as long as the budget lasts."""
    times = graph.step_times(forward, backward, starts)
    best: Order = starts[times.argmin()]
    shortest = times.min()
    random = np.random.default_rng(0)
    for _ in range(math.floor(budget_ms / 1e3 / (len(graph.actions) * PASS_SECONDS))):
        orders = best[_variations(len(best), random)]
        times = graph.step_times(forward, backward, orders)
        if times.min() < shortest:
            best, shortest = orders[times.argmin()], times.min()
    return best


def _variations(n: int, random: np.random.Generator) -> Order:
    """int64 (BATCH, n): permutations that exchange two entries, or move one to before or behind another."""
    rows = np.arange(BATCH)
    one, other = random.integers(n, size=(2, BATCH))
    keys = np.tile(np.arange(n, dtype=np.float64), (BATCH, 1))
    keys[rows, one] = other
    exchanged = random.integers(2, size=BATCH).astype(bool)
    keys[rows[exchanged], other[exchanged]] = one[exchanged]
    keys[rows[~exchanged], one[~exchanged]] += random.choice([-0.5, 0.5], size=int((~exchanged).sum()))
    return np.argsort(keys, axis=1, kind="stable")
