"""From measured times to the coefficients of `KernelCost`.

For a given tiling the predicted time is linear in the coefficients, apart from the choice between the two
bounds of a launch, work spread over the units and the longest tile. So that choice and the coefficients are
found in turns: non-negative least squares of relative errors, with the bound that is larger for each point
under the last ones. The tiling itself is not asked of the kernel: all of `tilings` are fitted and the one
with the least error is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from wlb_titan.cost.attention_latency import Floats, KernelCost, Tiling

ROUNDS = 10
COEFFICIENTS = 6  # launch, key, segment, tile, block, masked


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


def fit(points: Sequence[Point], units: int, tilings: Iterable[Tiling]) -> Fit:
    """The tiling and coefficients that describe the points best.

    Args:
        points: measurements of one pass.
        units: programs that the device runs side by side.
        tilings: candidates.
    """
    return min(
        (_fit(points, units, tiling) for tiling in tilings), key=lambda fit: float(np.sum(fit.errors**2))
    )


def usual_tilings(group: int) -> Iterator[Tiling]:
    """What attention kernels do, from a plain loop over rows to packed heads and merged segments."""
    packs = {1, min(8, group & -group)}
    for query_tile, key_block, merge_keys, pack in product(
        (1, 16, 32, 64, 128, 256), (1, 64, 128), (0, 1024), sorted(packs)
    ):
        yield Tiling(query_tile, key_block, merge_keys, pack)


def predict(cost: KernelCost, points: Sequence[Point], units: int) -> Floats:
    """float64 (points,), seconds."""
    spread, longest = _features(points, units, cost.tiling)
    x = np.array([cost.launch, cost.key, cost.segment, cost.tile, cost.block, cost.masked])
    seconds: Floats = np.maximum(spread @ x, longest @ x)
    return seconds


def _fit(points: Sequence[Point], units: int, tiling: Tiling) -> Fit:
    seconds = np.array([point.seconds for point in points])
    spread, longest = _features(points, units, tiling)
    bound = spread
    for _ in range(ROUNDS):
        x = _non_negative(bound / seconds[:, None])
        larger = np.where((longest @ x > spread @ x)[:, None], longest, spread)
        if np.array_equal(larger, bound):
            break
        bound = larger
    launch, key, segment, tile, block, masked = x.tolist()
    cost = KernelCost(tiling, launch=launch, key=key, segment=segment, tile=tile, block=block, masked=masked)
    return Fit(cost, np.maximum(spread @ x, longest @ x) / seconds - 1)


def _features(points: Sequence[Point], units: int, tiling: Tiling) -> tuple[Floats, Floats]:
    """Two float64 (points, COEFFICIENTS): what multiplies the coefficients in each bound of a launch."""
    q_len, kv_len, segments, heads, _ = np.array(points).T
    share = heads * segments / units
    ones = np.ones(len(points))
    fixed = [ones, kv_len * share]
    counts = tiling.count(q_len, kv_len)
    spread = np.stack([*fixed, share, *(counts * share)], axis=1)
    longest = np.stack([*fixed, *(np.array([ones, *tiling.largest(kv_len)]) * tiling.heads_per_tile)], axis=1)
    return spread, longest


def _non_negative(features: Floats) -> Floats:
    """The x >= 0 that brings features @ x closest to 1: the best least squares on any of the columns."""
    scale = np.maximum(features.max(axis=0), np.finfo(np.float64).tiny)
    columns = features / scale
    best, least = np.zeros(COEFFICIENTS), np.inf
    for count in range(1, COEFFICIENTS + 1):
        for chosen in map(list, combinations(range(COEFFICIENTS), count)):
            x = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ x - 1) ** 2))
            if (x >= 0).all() and error < least:
                best, least = np.zeros(COEFFICIENTS), error
                best[chosen] = x
    result: Floats = best / scale
    return result
