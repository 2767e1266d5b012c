"""Per-document sharding: every document is cut into 2 x ranks chunks (paper section 5.1).

A document's length is rarely a multiple of 2 x ranks. The paper cuts the multiple and deals the remaining
tokens out one by one, and each of these is a query tile of its own that reads the whole document. Here all
chunks have floor(length / 2 ranks) or one token more, so that there is nothing left to deal. The longer
chunks come to the ranks in turn, 0, 1, 2 ..., over the documents: first to a rank's early chunk, in the next
round to its late one. So no rank is ever more than one token ahead, and what padding there is makes them
equal.

Attention work differs by that one token too. For one document of chunks of c tokens the ranks' query-key
pairs are within 1 / c of each other; over several documents that averages out.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.context.layout import Sharding, from_runs
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET


def per_document(lengths: Ints, total: int, ranks: int) -> Sharding:
    """Cuts each document into 2 x ranks chunks; rank i takes chunks i and 2 ranks - 1 - i of each.

    Example: documents of 9 and 7 tokens on 2 ranks have chunks of 3, 2, 2, 2 and 1, 2, 2, 2 tokens: rank 0
    holds [(0, 0, 3), (0, 7, 2), (1, 0, 1), (1, 5, 2)] and rank 1 [(0, 3, 4), (1, 1, 4)], 8 tokens each.

    Args:
        lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
        total: tokens of the sequence with its padding; a multiple of 2 x ranks.

    Returns:
        Per rank an int64 (m, 3), columns DOCUMENT, OFFSET, COUNT.
    """
    assert total % (2 * ranks) == 0, f"{total} tokens do not divide into {2 * ranks} chunks"
    _, begin, end = document_runs(np.zeros_like(lengths), lengths, ranks)
    begins, counts = begin.reshape(-1, 2), (end - begin).reshape(-1, 2)
    touch = begins[:, 0] + counts[:, 0] == begins[:, 1]  # the middle two chunks do
    counts[touch, 0] += counts[touch, 1]
    counts[touch, 1] = 0
    rows = np.empty((ranks, 2 * len(lengths), 3), dtype=np.int64)
    rows[:, :, DOCUMENT] = np.repeat(np.arange(len(lengths)), 2)
    rows[:, :, OFFSET] = begin.reshape(ranks, -1)
    rows[:, :, COUNT] = counts.reshape(ranks, -1)
    return tuple(of_rank[of_rank[:, COUNT] > 0] for of_rank in rows)


def document_runs(begins: Ints, lengths: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """The chunks of documents that lie at `begins` in the sequence, as runs for `from_runs`.

    Returns:
        Owner, begin and end, each int64 (ranks x documents x 2,), ordered by rank, document and place.
    """
    early = np.arange(ranks)
    chunks = np.stack([early, 2 * ranks - 1 - early], axis=1)
    turn = np.concatenate([early, 2 * ranks - 1 - early])  # of each chunk to be the longer one
    floor, longer = np.divmod(lengths, 2 * ranks)
    first_turn = (np.cumsum(longer) - longer) % (2 * ranks)
    wait = turn - first_turn[:, None]
    wait += (wait < 0) * (2 * ranks)
    ends = np.cumsum(floor[:, None] + (wait < longer[:, None]), axis=1)
    ends = np.concatenate([begins[:, None], begins[:, None] + ends], axis=1)
    by_rank = ends.T
    return (
        np.repeat(early, 2 * len(lengths)),
        by_rank[chunks].transpose(0, 2, 1).ravel(),
        by_rank[chunks + 1].transpose(0, 2, 1).ravel(),
    )


def per_document_round_robin(lengths: Ints, total: int, ranks: int) -> Sharding:
    """The paper's per-document sharding: equal chunks of a document, its last tokens dealt out singly.

    Arguments and result are those of `per_document`. The tokens go to ranks 0, 1, 2 ... in turn, over the
    documents, so that here too no rank is more than one ahead.
    """
    assert total % (2 * ranks) == 0, f"{total} tokens do not divide into {2 * ranks} chunks"
    begins = np.cumsum(lengths) - lengths
    rest = lengths % (2 * ranks)
    owner, begin, end = document_runs(begins, lengths - rest, ranks)
    dealt = np.arange(rest.sum())
    token = np.repeat(begins + lengths - np.cumsum(rest), rest) + dealt
    return from_runs(
        np.concatenate([owner, dealt % ranks]),
        np.concatenate([begin, token]),
        np.concatenate([end, token + 1]),
        lengths,
        ranks,
    )
