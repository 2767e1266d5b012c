"""Keys and values that slices of a document leave to later slices, from pass to pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from wlb_titan.arrays import Floats, Ints


class CachedSlice(NamedTuple):
    """A slice of a document whose keys and values are cached, in tokens."""

    prefix: int  # of the document, before the slice
    length: int
    total: int  # of the whole document


class PackSlices(NamedTuple):
    """The slices of n micro-batches, in tokens; int64 (n,) but for `prefixes`."""

    begun: Ints  # of whole documents whose first slice is here
    firsts: Ints  # how many these are
    prefixes: list[list[int]]  # of each document whose last slice is here
    made: Ints  # their sum: the backward pass makes gradients of these layer by layer
    beside: Ints
    """That a backward pass has beside those cached: gradients of prefixes, and a copy of the keys if it has
    other documents too."""

    @classmethod
    def of(cls, slices: Sequence[Sequence[CachedSlice]], tokens: Sequence[int]) -> Self:
        beside = []
        for own, length in zip(slices, tokens, strict=True):
            alone = len(own) == 1 and length <= own[0].length
            beside.append(sum(s.prefix + (not alone) * (s.prefix + s.length) for s in own))
        firsts = [[s.total for s in own if s.prefix == 0] for own in slices]
        prefixes = [[s.prefix for s in own if s.prefix + s.length == s.total] for own in slices]
        sums = np.array([sum(own) for own in firsts]), np.array([len(own) for own in firsts])
        return cls(*sums, prefixes, np.array([sum(own) for own in prefixes]), np.array(beside))

    def cached(self, forward: Ints, backward: Ints, passes: Ints) -> tuple[Floats, Floats]:
        """Tokens in the cache of a stage during each of a rank's passes, and tokens of gradients there, as
        `runtime.attention.kv_cache` keeps them: documents go backward first in, first out.

        Args:
            forward: the stage's forward passes, their numbers among the rank's.
            backward: its backward passes.
            passes: the micro-batch of each of the rank's passes.
        """
        keys, gradients = np.zeros((2, len(passes) + 1))
        keys[forward] += self.begun[passes[forward]]
        keys[backward + 1] -= self.begun[passes[backward]]
        made = [prefix for place in passes[backward].tolist() for prefix in self.prefixes[place]]
        freed = int(self.firsts[passes[backward]].sum())
        ends = [number for number in backward.tolist() for _ in self.prefixes[passes[number]]]
        begins = np.repeat(backward, self.firsts[passes[backward]])
        np.add.at(gradients, np.array(ends, dtype=np.int64) + 1, made)
        np.subtract.at(gradients, begins + 1, made[:freed])
        return keys.cumsum()[:-1], gradients.cumsum()[:-1]
