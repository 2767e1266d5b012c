"""The packing loop of the paper's Algorithm 1, lines 18 to 35.

Documents come longest first, but for those that have waited too long. Each goes to the micro-batch of least
work; if it does not fit there, to the shortest micro-batch; if it does not fit there either, it remains. Ties
go to the lower index.

The paper's text and equation 2 bound a micro-batch by "at most L_max" where the pseudo-code has "<"; here it
is at most L_max, else a document of a full window would never fit where L_max is the window.

The micro-batches are kept in two heaps, by work and by length. An entry is stale once its micro-batch has
grown, and is thrown away when it comes up. With n documents and N micro-batches this takes O(n log N).
"""

from __future__ import annotations

import heapq

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.packing.bins import REMAINS


def pack(lengths: Ints, works: Floats, micro_batches: int, max_length: int) -> Ints:
    """Assigns documents to micro-batches.

    Example: lengths 6, 4, 3, 3 with work equal to length, 2 micro-batches of at most 8 tokens give
    [0, 1, 1, REMAINS]: the last finds 6 and 7 tokens, and 3 more fit nowhere.

    Args:
        lengths: int64 (n,), tokens in the order of packing, each at most `max_length`.
        works: float64 (n,), W_a + W_l of each document, positive.
        micro_batches: N.
        max_length: L_max in tokens.

    Returns:
        int64 (n,), micro-batch of each document, or REMAINS.
    """
    length = [0] * micro_batches
    load = [0.0] * micro_batches
    by_load = [(0.0, index) for index in range(micro_batches)]
    by_length: list[tuple[int, int]] | None = None  # most steps never need it
    assigned = []
    for tokens, work in zip(lengths.tolist(), works.tolist(), strict=True):
        while by_load[0][0] != load[by_load[0][1]]:
            heapq.heappop(by_load)
        index = by_load[0][1]
        if length[index] + tokens <= max_length:
            length[index] += tokens
            load[index] += work
            heapq.heapreplace(by_load, (load[index], index))
            if by_length is not None:
                heapq.heappush(by_length, (length[index], index))
            assigned.append(index)
            continue
        if by_length is None:
            by_length = [(length[index], index) for index in range(micro_batches)]
            heapq.heapify(by_length)
        while by_length[0][0] != length[by_length[0][1]]:
            heapq.heappop(by_length)
        index = by_length[0][1]
        if length[index] + tokens <= max_length:
            length[index] += tokens
            load[index] += work
            heapq.heapreplace(by_length, (length[index], index))
            heapq.heappush(by_load, (load[index], index))
            assigned.append(index)
        else:
            assigned.append(REMAINS)
    return np.array(assigned, dtype=np.int64)
