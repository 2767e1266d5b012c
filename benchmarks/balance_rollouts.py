"""`wlb_titan.balance` beside what trainers do today, on made-up rollouts of reinforcement learning.

    python benchmarks/balance_rollouts.py

A batch has 128 prompts with 8 answers each, on 8 ranks that hold 32,768 tokens a micro-batch. Prompts are
log-normal with a median of 300 tokens and sigma 0.7; answers with a median of 1,500 and sigma 1.0, cut at
16,384 (`short`), or with a median of 6,000, cut at 30,000 (`long`, as of reasoning models). Compared:

- `first-fit`: micro-batches filled first-fit-decreasing by tokens, dealt to the ranks one after the other;
- `KK on L^2`: Karmarkar and Karp's differencing over the ranks, and within each over its micro-batches, of
  the squares of the tokens, as verl balances; every rank has as many micro-batches as the one that needs
  most;
- `balance`, with `causal(4096)`.

The judge is the predicted time of the sequences' passes on an H100 (Llama-2 7B, cost model `simulated`).
`each` is the time of the step over what it were if nobody waited, where ranks meet at every micro-batch, as
under FSDP; `end`, where they meet at the end of the step only.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
from common import machine, save, show
from numpy.typing import NDArray

from wlb_titan.balancing import balance, causal
from wlb_titan.cost.workload import workload
from wlb_titan.job import Job

RANKS, LIMIT, BATCHES = 8, 32768, 20
ANSWERS = {"short": (1500, 1.0, 16384), "long": (6000, 0.8, 30000)}
Batches = list[list[list[int]]]
Way = Callable[[NDArray[np.int64]], Batches]
Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def rollouts(kind: str, seed: int) -> NDArray[np.int64]:
    """int64 (1024,), tokens of prompt and answer."""
    rng = np.random.default_rng(seed)
    median, sigma, longest = ANSWERS[kind]
    prompts = np.repeat(rng.lognormal(np.log(300), 0.7, 128), 8)
    answers = np.minimum(rng.lognormal(np.log(median), sigma, 1024), longest)
    return np.clip(prompts + answers, 16, LIMIT).astype(np.int64)


def karmarkar_karp(work: NDArray[np.float64], parts: int) -> list[list[int]]:
    """The largest differencing method for several parts: the two partial solutions that differ most are
    joined, the heaviest part of one with the lightest of the other."""
    heap = []
    for number, own in enumerate(work.tolist()):
        sums = [(0.0, [])] * (parts - 1) + [(own, [number])]
        heap.append((-own, number, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted(((a + b, x + y) for (a, x), (b, y) in pairs), key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], number, joined))
    return [members for _, members in heap[0][2]]


def by_squares(lengths: NDArray[np.int64]) -> Batches:
    squares = np.square(lengths, dtype=np.float64)
    ranks = karmarkar_karp(squares, RANKS)
    count = max(-(-int(lengths[own].sum()) // LIMIT) for own in ranks)
    while True:
        batches = []
        for own in ranks:
            parts = karmarkar_karp(squares[own], count)
            batches.append([[own[place] for place in part] for part in parts])
        if all(int(lengths[batch].sum()) <= LIMIT for own in batches for batch in own):
            return batches
        count += 1


def first_fit(lengths: NDArray[np.int64]) -> Batches:
    bins: list[list[int]] = []
    room: list[int] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = next((k for k, left in enumerate(room) if left >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(LIMIT)
        bins[place].append(number)
        room[place] -= length
    bins += [[]] * (-len(bins) % RANKS)
    return [bins[rank::RANKS] for rank in range(RANKS)]


def figures_of(way: Way, judge: Cost, kind: str) -> dict[str, float]:
    """Means of the batches."""
    found = []
    for seed in range(BATCHES):
        lengths = rollouts(kind, seed)
        begin = time.process_time()
        batches = way(lengths)
        milliseconds = 1e3 * (time.process_time() - begin)
        assert sorted(i for own in batches for batch in own for i in batch) == list(range(1024))
        work = judge(lengths)
        loads = np.array([[work[batch].sum() for batch in own] for own in batches])
        loads = -np.sort(-loads, axis=1)  # all begin with their heaviest
        ideal = loads.mean(axis=0).sum()
        each, end = loads.max(axis=0).sum() / ideal, loads.sum(axis=1).max() / ideal
        found.append((each, end, loads.shape[1], milliseconds))
    names = ("each", "end", "micro_batches", "plan_ms")
    return dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))


COLUMNS = {
    "answers": "{answers}",
    "way": "{way}",
    "each": "{each:.3f}",
    "end": "{end:.3f}",
    "micro-batches": "{micro_batches:.1f}",
    "plan, ms": "{plan_ms:.1f}",
}


def main() -> None:
    judge = partial(workload, Job(window=LIMIT, micro_batches=RANKS).cost_model)

    def balanced(lengths: NDArray[np.int64]) -> Batches:
        return balance(lengths, ranks=RANKS, tokens_per_rank=LIMIT, cost=causal(4096)).micro_batches

    ways = {"first-fit": first_fit, "KK on L^2": by_squares, "balance": balanced}
    rows = (
        {"answers": kind, "way": name, **figures_of(way, judge, kind)}
        for kind, (name, way) in product(ANSWERS, ways.items())
    )
    save("balance_rollouts", machine() | {"rows": show(COLUMNS, rows)})


if __name__ == "__main__":
    main()
