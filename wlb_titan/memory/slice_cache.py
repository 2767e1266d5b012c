"""Keys and values that slices of a document leave to later slices, from pass to pass."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from wlb_titan.arrays import Ints


class CachedSlice(NamedTuple):
    """A slice of a document whose keys and values are cached, in tokens."""

    prefix: int  # of the document, before the slice
    length: int
    total: int  # of the whole document


class PackSlices(NamedTuple):
    """What a micro-batch's slices do to the cache, in tokens."""

    begun: int  # of whole documents whose first slice is here
    firsts: int  # how many these are
    prefixes: list[int]  # of documents whose last slice is here
    beside: (
        int  # in a backward pass: gradients of prefixes, and a copy of the keys if there are other documents
    )

    @classmethod
    def of(cls, slices: Sequence[CachedSlice], tokens: int) -> Self:
        firsts = [s.total for s in slices if s.prefix == 0]
        prefixes = [s.prefix for s in slices if s.prefix + s.length == s.total]
        alone = len(slices) == 1 and tokens <= slices[0].length
        beside = sum(s.prefix + (0 if alone else s.prefix + s.length) for s in slices)
        return cls(sum(firsts), len(firsts), prefixes, beside)


def cached(passes: Ints, packs: Sequence[PackSlices], layers: Sequence[int]) -> Ints:
    """int64 (P, 3), tokens x layers in the cache of a pipeline rank during each of its passes, as
    `runtime.attention.kv_cache` keeps them: keys; gradients of prefixes; those that the pass makes.

    Args:
        passes: (P, 3), whether it is a forward pass, the number of the stage, and the micro-batch.
        layers: of each stage.
    """
    keys = gradients = 0
    waiting: dict[int, deque[int]] = defaultdict(deque)  # by stage, of each document, first in first out
    rows = []
    for forward, stage, place in passes.tolist():
        begun, firsts, prefixes, _ = packs[place]
        count = layers[stage]
        keys += begun * count * forward
        made = 0 if forward else sum(prefixes) * count
        rows.append((keys, gradients, made))
        if not forward:
            waiting[stage].extend(prefixes)
            keys -= begun * count
            gradients += made - count * sum(waiting[stage].popleft() for _ in range(firsts))
    return np.array(rows)
