"""In which order a pipeline runs micro-batches of different sizes.

The passes of a schedule wait for each other: on a rank one runs after the other, a forward pass waits for the
previous stage's and a backward pass for the next stage's. With the time of each micro-batch's passes this
graph gives the time of the step, and so orders can be compared before anything runs. Two ranks, 1F1B, forward
passes of 1, 1 and 4 units and backward passes of twice that:

    order 1 1 4: 30 units        order 4 1 1: 30 units        order 1 4 1: 27 units

(GPipe takes 30 in any order.) `best` looks for the shortest step: it tries every order where there are few,
and otherwise improves the best of the simple orders at random. Its effort is counted in passes evaluated and
not in measured time, so that every rank finds the same order. Communication is taken to cost nothing, and the
stages to take equal times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb_titan.planner.errors import PlanError

ORDERS = ("as_packed", "longest_first", "shortest_first", "best")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
"""Those whose graph is known here; `best` needs it."""

EXHAUSTIVE = 6
"""All orders are tried of at most this many micro-batches (720 orders)."""

BATCH = 64
"""Orders evaluated together in the search."""

PASS_SECONDS = 5e-6
"""What evaluating one pass for BATCH orders takes; turns milliseconds into a number of evaluations."""

Order = NDArray[np.int64]
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline's schedule and size.

    Attributes:
        schedule: one of SCHEDULES, or any other name where `best` is not wanted.
        ranks: pipeline-parallel degree.
        chunks: stages of each rank; 1 but for Interleaved1F1B.
    """

    schedule: str
    ranks: int
    chunks: int = 1


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


class PipelineGraph:
    """The passes of one step and what each of them waits for.

    Args:
        shape: the pipeline.
        micro_batches: n, at least 1.

    Raises:
        PlanError: the graph of the schedule is not known.
    """

    def __init__(self, shape: PipelineShape, micro_batches: int) -> None:
        self._chunks = shape.chunks
        self._micro_batches = micro_batches
        self._passes: list[tuple[bool, int, int, int]] = []
        """Backward or not, place in the order, numbers of the two passes waited for (from 1; 0 is none)."""
        self._build(shape)

    @property
    def passes(self) -> int:
        """Passes of all ranks: 2 x stages x micro-batches."""
        return len(self._passes)

    def step_times(self, forward: Times, backward: Times, orders: Order) -> Times:
        """How long the step takes in each of several orders.

        Args:
            forward: float64 (n,), time of each micro-batch's forward pass through all stages of one rank.
            backward: float64 (n,), of its backward pass.
            orders: int64 (k, n), permutations of the micro-batches.

        Returns:
            float64 (k,), in the unit of the times.
        """
        times = (forward[orders].T / self._chunks, backward[orders].T / self._chunks)
        ends = np.zeros((len(self._passes) + 1, len(orders)))
        for number, (is_backward, place, before, needed) in enumerate(self._passes, start=1):
            np.maximum(ends[before], ends[needed], out=ends[number])
            ends[number] += times[is_backward][place]
        return np.asarray(ends.max(axis=0))

    def _build(self, shape: PipelineShape) -> None:
        stages = shape.ranks * shape.chunks
        waiting = [rank_passes(shape, self._micro_batches, rank) for rank in range(shape.ranks)]
        heads = [next(passes) for passes in waiting]
        numbers: dict[tuple[bool, int, int], int] = {}
        last = [0] * shape.ranks
        while any(head is not None for head in heads):
            before = len(self._passes)
            for rank, passes in enumerate(waiting):
                while (head := heads[rank]) is not None:
                    is_backward, stage, place = head
                    if not is_backward:
                        needs = (False, stage - 1, place) if stage > 0 else None
                    else:
                        needs = (True, stage + 1, place) if stage < stages - 1 else (False, stage, place)
                    if needs is not None and needs not in numbers:
                        break
                    needed = numbers[needs] if needs is not None else 0
                    self._passes.append((is_backward, place, last[rank], needed))
                    last[rank] = numbers[head] = len(self._passes)
                    heads[rank] = next(passes, None)
            assert len(self._passes) > before, f"{shape} waits for itself"


def rank_passes(
    shape: PipelineShape, micro_batches: int, rank: int
) -> Iterator[tuple[bool, int, int] | None]:
    """What a rank runs, in order: (backward or not, stage, place of the micro-batch in the order).

    All schedules here are a number of forward passes, then a forward and a backward pass in turn, then the
    backward passes that are left; with several stages a rank, passes go through them in rounds.

    Raises:
        PlanError: the graph of the schedule is not known.
    """
    n, ranks, chunks = micro_batches, shape.ranks, shape.chunks
    ahead, in_round = ranks - 1 - rank, n
    if shape.schedule == "GPipe":
        ahead = n
    elif shape.schedule == "Interleaved1F1B":
        in_round = n // max(1, n // ranks)
        ahead = (chunks - 1) * in_round + 2 * ahead
    elif shape.schedule != "1F1B":
        raise PlanError(
            f"The order 'best' knows the schedules {', '.join(SCHEDULES)}, and the pipeline's is "
            f"{shape.schedule!r}. Choose one of them or another order."
        )
    total = n * chunks
    ahead = min(ahead, total)

    def place(k: int) -> int:
        return k // (in_round * chunks) * in_round + k % in_round

    def forward(k: int) -> tuple[bool, int, int]:
        return False, k // in_round % chunks * ranks + rank, place(k)

    def backward(k: int) -> tuple[bool, int, int]:
        return True, (chunks - 1 - k // in_round % chunks) * ranks + rank, place(k)

    for k in range(ahead):
        yield forward(k)
    for k in range(ahead, total):
        yield forward(k)
        yield backward(k - ahead)
    for k in range(total - ahead, total):
        yield backward(k)


def _search(graph: PipelineGraph, forward: Times, backward: Times, starts: Order, budget_ms: float) -> Order:
    """The best of `starts`, improved by random exchanges and moves as long as the budget lasts."""
    times = graph.step_times(forward, backward, starts)
    best: Order = starts[times.argmin()]
    shortest = times.min()
    random = np.random.default_rng(0)
    for _ in range(math.floor(budget_ms / 1e3 / (graph.passes * PASS_SECONDS))):
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
