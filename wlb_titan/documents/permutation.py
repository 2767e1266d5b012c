"""A shuffled order that is computed, not stored: the number at any place, on its own.

Numbers of b bits are split into a left and a right part, and each round changes one part by a hash of the
other and a key: a Feistel network, which is one-to-one for any hash. To shuffle n numbers, n > 2^(b - 1), and
results of n or more pass again until they are below; on average a number takes fewer than two passes. Nothing
is kept, so any number of processes agree on the order of 10^10 documents for free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints

Words = NDArray[np.uint32]

ROUNDS = 6
LEAST_BITS = 4


def permuted(places: Ints, count: int, seed: int, epochs: Ints) -> Ints:
    """int64 (n,), the numbers at `places` in a shuffled 0 .. count - 1; each place has its own epoch, and the
    seed and the epoch fix the order. `places` and `epochs` are int64 (n,); none are negative."""
    if not len(places):
        return places
    bits = max(int(count - 1).bit_length(), LEAST_BITS)
    keys = _keys(seed, epochs)
    result = _network(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= np.uint64(count))
    while len(outside):
        again = _network(result[outside], bits, [key if len(key) == 1 else key[outside] for key in keys])
        result[outside] = again
        outside = outside[again >= np.uint64(count)]
    return result.astype(np.int64)


def _keys(seed: int, epochs: Ints) -> list[Words]:
    """A key per round: uint32 (n,), or (1,) if all places are of one epoch."""
    if (epochs == epochs[0]).all():
        epochs = epochs[:1]
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    base = _mixed(epochs.astype(np.uint32) + np.uint32(0x9E3779B9))
    base = _mixed(base ^ (epochs >> 32).astype(np.uint32) ^ np.uint32(low))
    base = _mixed(base + np.uint32(high))
    return [_mixed(base + np.uint32(0x85EBCA77 * (number + 1) & 0xFFFFFFFF)) for number in range(ROUNDS)]


def _network(values: NDArray[np.uint64], bits: int, keys: list[Words]) -> NDArray[np.uint64]:
    width = bits // 2  # of the right part, at most 32 bits
    masks = (np.uint32((1 << (bits - width)) - 1), np.uint32((1 << width) - 1))
    left = (values >> np.uint64(width)).astype(np.uint32)
    right = (values & np.uint64(masks[1])).astype(np.uint32)
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (_mixed(left + key) & masks[1])
        else:
            left = left ^ (_mixed(right + key) & masks[0])
    return (left.astype(np.uint64) << np.uint64(width)) | right


def _mixed(words: Words) -> Words:
    """Every bit of the result depends on every bit (the last step of MurmurHash3)."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x85EBCA6B)
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
