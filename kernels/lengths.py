"""Segments as cumulative lengths, as FlashAttention's varlen interface takes them.

Keys that lie in the order of their queries, as those of whole documents do, are read where they are: queries
in no segment are a sequence without keys, keys in none one without queries. Others are gathered, as for two
chunks of a document:

    >>> chunks = np.array([[0, 2, 0, 2], [2, 2, 0, 8]], dtype=np.int32)
    >>> found = lengths(chunks, 4, 8, 1000, "cpu")
    >>> found.q.tolist(), found.k.tolist(), found.rows.tolist()
    ([0, 2, 4], [0, 2, 10], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7])
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .tiles import cover_of, send


class Lengths(NamedTuple):
    q: Tensor  # int32 (n + 1,): where the queries of each sequence begin, and their number
    k: Tensor  # int32 (n + 1,): the same of the keys
    most_q: int  # queries of a sequence
    most_k: int
    rows: Tensor | None  # int64: the keys in the order of the sequences; None where they are all, as they lie


def lengths(
    segments: np.ndarray, q_tokens: int, kv_tokens: int, reach: int, device: torch.device | str
) -> Lengths:
    """For segments, int32 (S, 4), whose queries see at most `reach` keys."""
    q0, q1, k0, k1, _ = cover_of(segments, q_tokens)
    k0 = np.maximum(k0, k1 - (q1 - q0) - reach + 1)
    seen = k1 > k0
    begin, end = k0[seen], k1[seen]
    pairs = np.stack([q1 - q0, k1 - k0], axis=1)  # queries and keys of each sequence
    in_order = bool((begin[1:] >= end[:-1]).all())
    if in_order:
        unseen = np.zeros((len(pairs) + 1, 2), dtype=np.int64)  # before each sequence, and after the last
        unseen[np.append(seen, True), 1] = np.append(begin, kv_tokens) - np.append(0, end)
        pairs = np.stack([unseen, np.pad(pairs, ((0, 1), (0, 0)))], axis=1).reshape(-1, 2)
    pairs = pairs[pairs.any(axis=1)]
    q, k = send(np.pad(pairs, ((1, 0), (0, 0))).cumsum(axis=0).T.astype(np.int32), device)
    size = end - begin
    rows = np.arange(size.sum()) + np.repeat(begin - (np.cumsum(size) - size), size)
    return Lengths(q, k, *pairs.max(axis=0).tolist(), None if in_order else send(rows, device))
