"""From measured times to the coefficients of `KernelCost`.

How a kernel cuts its work is known (`tilings`), and the predicted time is linear in the coefficients, apart
from the choice between the two bounds of a launch, work spread over the units and the longest tile. So that
choice and the coefficients are found in turns: non-negative least squares of relative errors, with the bound
that is larger for each point under the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.attention_latency import KernelCost, KeyTiling, Tiling

ROUNDS = 10
COEFFICIENTS = ("launch", "key", "query", "segment", "tile", "block", "masked")
BLOCK_ROWS = 64  # of queries and the heads that are packed, in Gluon's backward
MERGE_KEYS = 1024  # as wlb_titan.kernels merges segments; the planner does not import it


class Point(NamedTuple):
    """One measurement: `segments` equal segments of `q_len` queries that each see `kv_len` keys.

    `heads` are query heads, `seconds` the time of one pass over all of it.
    """

    q_len: int
    kv_len: int
    segments: int
    heads: int
    seconds: float


class Fit(NamedTuple):
    """Coefficients, and how well they describe the points.

    Attributes:
        cost: the coefficients.
        errors: float64 (points,), predicted over measured time minus 1.
    """

    cost: KernelCost
    errors: Floats


def tilings(implementation: str, group: int) -> tuple[Tiling, Tiling]:
    """How an implementation cuts its forward and its backward.

    Triton's tiles are those for long segments, and the second of its backward's two kernels is counted with
    the first. The reference takes time by the query.

    Args:
        implementation: "gluon", "triton" or "reference".
        group: query heads that share a key head, of which Gluon packs up to 8 into a tile of the forward,
            and 4 or 8 into a block of the backward.
    """
    if implementation == "gluon":
        pack = min(8, group & -group)
        queries = BLOCK_ROWS // pack if pack >= 4 else BLOCK_ROWS
        return Tiling(128 // pack, 128, MERGE_KEYS, pack), KeyTiling(queries, 128, MERGE_KEYS)
    if implementation == "triton":
        return Tiling(128, 128, MERGE_KEYS), Tiling(128, 64, MERGE_KEYS)
    return Tiling(1, 64, MERGE_KEYS), Tiling(1, 64, MERGE_KEYS)


def fit(points: Sequence[Point], units: int, tiling: Tiling) -> Fit:
    """The coefficients that describe the points best."""
    seconds = np.array([point.seconds for point in points])
    spread, longest = _features(points, units, tiling)
    bound = spread
    for _ in range(ROUNDS):
        x = non_negative(bound / seconds[:, None], np.ones(len(seconds)))
        larger = np.where((longest @ x > spread @ x)[:, None], longest, spread)
        if np.array_equal(larger, bound):
            break
        bound = larger
    cost = KernelCost(tiling, **dict(zip(COEFFICIENTS, x.tolist(), strict=True)))
    return Fit(cost, np.maximum(spread @ x, longest @ x) / seconds - 1)


def predict(cost: KernelCost, points: Sequence[Point], units: int) -> Floats:
    """float64 (points,), seconds."""
    spread, longest = _features(points, units, cost.tiling)
    x = np.array([getattr(cost, name) for name in COEFFICIENTS])
    seconds: Floats = np.maximum(spread @ x, longest @ x)
    return seconds


def _features(points: Sequence[Point], units: int, tiling: Tiling) -> tuple[Floats, Floats]:
    """Two float64 (points, coefficients): what multiplies the coefficients in each bound of a launch."""
    q_len, kv_len, segments, heads, _ = np.array(points).T
    share = heads * segments / units
    ones = np.ones(len(points))
    fixed = [ones, kv_len * share]
    each = [q_len, ones, *tiling.count(q_len, kv_len)]
    spread = np.stack([*fixed, *(np.array(each) * share)], axis=1)
    one = [0 * ones, ones, *tiling.largest(q_len, kv_len)]
    longest = np.stack([*fixed, *(np.array(one) * tiling.heads_per_tile)], axis=1)
    return spread, longest


def non_negative(features: Floats, target: Floats) -> Floats:
    """The x >= 0 that brings features @ x closest to the target: the best least squares on any columns."""
    scale = np.maximum(features.max(axis=0), np.finfo(np.float64).tiny)
    columns = features / scale
    best, least = np.zeros(len(scale)), np.inf
    for count in range(1, len(scale) + 1):
        for chosen in map(list, combinations(range(len(scale)), count)):
            x = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ x - target) ** 2))
            if (x >= 0).all() and error < least:
                best, least = np.zeros(len(scale)), error
                best[chosen] = x
    result: Floats = best / scale
    return result
