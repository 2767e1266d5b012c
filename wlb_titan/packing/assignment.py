"""The assignment of packs to data-parallel ranks, and their order."""

from __future__ import annotations

import heapq

import numpy as np

from wlb_titan.arrays import Floats


def in_order(packs: int, ranks: int) -> list[list[int]]:
    """Consecutive packs go to one rank, in stream order: what a plain data loader does."""
    count = packs // ranks
    return [list(range(rank * count, (rank + 1) * count)) for rank in range(ranks)]


def balanced(workloads: Floats, ranks: int) -> list[list[int]]:
    """Equal counts and nearly equal sums: the heaviest pack left goes to the least loaded rank with room.

    Each rank runs its packs heaviest first. Under FSDP ranks meet in a collective at every layer of every
    micro-batch, so what counts is not only their sums but that their k-th packs are alike, and sorted
    sequences are. The order of equal packs is that of their numbers, so the result is one on all ranks.

    Example: workloads 5, 1, 4, 2 on 2 ranks give [[0, 1], [2, 3]], sums 6 and 6.

    Args:
        workloads: float64 (packs,), of which `ranks` is a divisor.

    Returns:
        Per rank the numbers of its packs, in the order in which it runs them.
    """
    count = len(workloads) // ranks
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for pack in np.argsort(-workloads, kind="stable").tolist():
        load, rank = heapq.heappop(least)
        assigned[rank].append(pack)
        if len(assigned[rank]) < count:
            heapq.heappush(least, (load + float(workloads[pack]), rank))
    return assigned
