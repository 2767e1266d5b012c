"""A histogram of document lengths: counts per power of two."""

from typing import NamedTuple

import numpy as np


class Bucket(NamedTuple):
    """The documents with `low` to `2 * low - 1` tokens."""

    low: int
    documents: int
    tokens: int


def length_histogram(lengths: np.ndarray) -> list[Bucket]:
    """Buckets from the shortest document's to the longest's, empty ones in between included.

    >>> [tuple(bucket) for bucket in length_histogram(np.array([1, 4, 7, 5]))]
    [(1, 1, 1), (2, 0, 0), (4, 3, 16)]

    Args:
        lengths: tokens of each document, all positive.
    """
    exponents = np.frexp(lengths)[1] - 1  # floor(log2), exact below 2^53
    buckets = []
    for exponent in range(exponents.min(), exponents.max() + 1):
        inside = exponents == exponent
        buckets.append(Bucket(1 << exponent, int(inside.sum()), int(lengths[inside].sum())))
    return buckets
