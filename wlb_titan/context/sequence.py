"""Per-sequence sharding: the packed sequence is cut without regard to its documents (paper section 5.1)."""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.context.layout import Sharding, from_runs


def per_sequence(lengths: Ints, total: int, ranks: int) -> Sharding:
    """Cuts the whole sequence into 2 x ranks chunks; rank i takes chunks i and 2 ranks - 1 - i.

    Example: documents of 6 and 2 tokens on 2 ranks: the chunks are 0-1, 2-3, 4-5 and 6-7, so rank 0 holds
    [(0, 0, 2), (1, 0, 2)] and rank 1 [(0, 2, 4)].

    Args:
        lengths: int64 (n,), tokens of the documents in sequence order.
        total: tokens of the sequence with its padding; a multiple of 2 x ranks.

    Returns:
        Per rank an int64 (m, 3), columns DOCUMENT, OFFSET, COUNT.
    """
    chunk = total // (2 * ranks)
    assert chunk * 2 * ranks == total, f"{total} tokens do not divide into {2 * ranks} chunks"
    index = np.arange(2 * ranks)
    owner = np.minimum(index, 2 * ranks - 1 - index)
    return from_runs(owner, index * chunk, (index + 1) * chunk, lengths, ranks)
