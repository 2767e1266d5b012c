"""Segments as cumulative lengths, in which FlashAttention's varlen interface takes sequences.

Sequences lie one after the other, and each has a range of queries and a range of keys. Segments whose keys lie
in the order of their queries, as those of whole documents do, become sequences as they are: queries in no
segment are a sequence without keys, keys in no segment one without queries. Other segments, as those of a
context-parallel rank's chunks, see keys that earlier ones have seen, so their keys are gathered:

    >>> import numpy as np
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
    k: Tensor  # int32 (n + 1,): the same of the keys, among those of `rows`
    most_q: int  # queries of a sequence
    most_k: int
    padding: Tensor  # int64: the queries that see no key
    rows: Tensor | None  # int32: the keys to gather; None where they are read as they lie
    layers: tuple[tuple[Tensor, Tensor], ...]
    """Places among `rows` and their keys, no key twice in a layer: added up layer by layer, the gradients of
    keys repeat bit for bit."""

    def gathered(self, x: Tensor) -> Tensor:
        """The rows of x (keys, heads, dim) in the order of the sequences."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def summed(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient of `like` from that of gathered(like); sums are in float32 at least."""
        if self.rows is None:
            return gradient
        wide = torch.promote_types(like.dtype, torch.float32)
        total = gradient.new_zeros(like.shape, dtype=wide)
        for places, keys in self.layers:
            total.index_add_(0, keys, gradient.index_select(0, places).to(wide))
        return total.to(like.dtype)


def lengths(
    segments: np.ndarray, q_tokens: int, kv_tokens: int, reach: int, device: torch.device | str
) -> Lengths:
    """For segments, int32 (S, 4), whose queries see at most `reach` keys."""
    q0, q1, k0, k1, _ = cover_of(segments, q_tokens)
    k0 = np.maximum(k0, k1 - (q1 - q0) - reach + 1)
    seen = k1 > k0
    begin, end = k0[seen], k1[seen]
    pairs = np.stack([q1 - q0, k1 - k0], axis=1)  # queries and keys of each sequence
    rows, layers = None, []
    if (begin[1:] >= end[:-1]).all():
        unseen = np.zeros((len(pairs) + 1, 2), dtype=np.int64)  # before each sequence, and after the last
        unseen[np.append(seen, True), 1] = np.append(begin, kv_tokens) - np.append(0, end)
        pairs = np.stack([unseen, np.pad(pairs, ((0, 1), (0, 0)))], axis=1).reshape(-1, 2)
    else:
        rows = _ranges(begin, end)
        first = np.cumsum(end - begin) - (end - begin)
        of = _layers(begin, end)
        for layer in range(of.max() + 1):
            places = _ranges(first[of == layer], (first + end - begin)[of == layer])
            layers.append((send(places, device), send(rows[places], device)))
    pairs = pairs[pairs.any(axis=1)]
    q, k = send(np.pad(pairs, ((1, 0), (0, 0))).cumsum(axis=0).T.astype(np.int32), device)
    padding = send(_ranges(q0[~seen], q1[~seen]).astype(np.int64), device)
    rows = None if rows is None else send(rows, device)
    return Lengths(q, k, *pairs.max(axis=0).tolist(), padding, rows, tuple(layers))


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """int32: the numbers begin ... end of each range, the end excluded, one range after the other."""
    size = end - begin
    return (np.arange(size.sum()) + np.repeat(begin - (np.cumsum(size) - size), size)).astype(np.int32)


def _layers(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """int64 (n,): the first layer of each range in which it meets no other."""
    layer, ends = np.zeros(len(begin), dtype=np.int64), []
    for number in np.argsort(begin, kind="stable").tolist():
        free = (at for at, last in enumerate(ends) if last <= begin[number])
        layer[number] = at = next(free, len(ends))
        ends[at : at + 1] = [end[number]]
    return layer
