"""The attention kernels' coefficients: fitted to measured times, and those of ours on H100 and H200.

How a kernel cuts its work is known (`tilings`), and the predicted time is linear in the coefficients, apart
from the choice between the two bounds of a launch, work spread over the units and the longest tile. So `fit`
finds that choice and the coefficients in turns: non-negative least squares of relative errors, with the bound
that is larger for each point under the last coefficients.

`hopper` has the Gluon kernels (head dim 128, bfloat16) without a profile of the device at hand. H100 and H200
have the same multiprocessors and differ in memory, which attention hardly waits for. Its coefficients were
fitted by benchmarks/attention_latency.py to the grid in benchmarks/results/nvidia_h100, of 32 query and 4 key
heads; it says how well they predict. Those were the kernels before tiles were ordered by chains and heads
packed; a replay of their tile lists says what of the backward was waiting for turns, which is left out here,
as it is gone. Backward times of the kernels as they are now, measured afterwards, are met within 5 % in 20 of
24 cases. Measured again, `python benchmarks/attention_latency.py --rows FOLDER --kernels tree` fits and
prints tile, block, masked, step and tail.

Head dim: FlashAttention-3 (Shah et al. 2024, H100, 16K tokens, not causal) reaches 497 TFLOP/s forward and
474 backward at head dim 64, and 648 and 561 at 128. So a block at 64 takes 0.652 and 0.592 of its time at
128, and of ours too until it is measured; between and beyond, time is linear in the head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, KeyTiling, Tiling

ROUNDS = 10
COEFFICIENTS = ("launch", "key", "query", "segment", "tile", "block", "masked")
BLOCK_ROWS = 64  # of queries and the heads that are packed, in Gluon's backward
MERGE_KEYS = 1024  # as wlb_titan.kernels merges segments; the planner does not import it


class Point(NamedTuple):
    """One measurement: `segments` equal segments of `q_len` queries that each see `kv_len` keys."""

    q_len: int
    kv_len: int
    segments: int
    heads: int  # query heads
    seconds: float  # of one pass over all of it


def tilings(implementation: str, group: int) -> tuple[Tiling, Tiling]:
    """How an implementation ("gluon", "triton" or "reference") cuts its forward and its backward.

    Gluon packs up to 8 of the `group` query heads that share a key head into a tile of the forward, and 4 or
    8 into a block of the backward. Triton's tiles are those for long segments, and the second of its
    backward's two kernels is counted with the first. The reference takes time by the query.
    """
    if implementation == "gluon":
        pack = min(8, group & -group)
        queries = BLOCK_ROWS // pack if pack >= 4 else BLOCK_ROWS
        return Tiling(128 // pack, 128, MERGE_KEYS, pack), KeyTiling(queries, 128, MERGE_KEYS)
    if implementation == "triton":
        return Tiling(128, 128, MERGE_KEYS), Tiling(128, 64, MERGE_KEYS)
    return Tiling(1, 64, MERGE_KEYS), Tiling(1, 64, MERGE_KEYS)


def hopper(head_dim: float, heads: int, *, group: int = 1) -> AttentionLatency:
    """Our Gluon kernels on an H100 or H200, in bfloat16 or float16.

    Forward: a tile of 128 rows, a block of 128 keys, and what its mask adds. Backward: a step of 128 keys
    with 64 rows (block), a program with 128 keys of one key head (key), and the element-wise kernels around
    it by query token and head, two of which have become one since. These last two were timed by themselves
    and not fitted. Heads that are packed into a tile or block share its time. `tail` is what a replay of the
    kernels takes beyond work spread evenly: 0.08 of the longest program on the packs of the benchmark, 0.12
    over packs, ranks and head counts drawn at random.

    Args:
        head_dim: of queries, keys and values; the mean of the two, if values have another.
        group: query heads that share a key head.
    """
    cut, backward_cut = tilings("gluon", group)
    larger = (head_dim - 128) / 64
    tile = 1e-6 / cut.heads_per_tile * (1 + (1 - 0.652) * larger)
    step = 1e-6 / (BLOCK_ROWS // backward_cut.query_tile) * (1 + (1 - 0.592) * larger)
    forward = KernelCost(
        cut, launch=0.0, key=0.0, segment=0.0, tile=3.66 * tile, block=1.68 * tile, masked=0.28 * tile
    )
    backward = KernelCost(
        replace(backward_cut, heads_per_tile=group),  # which walk over a tile of keys
        launch=0.0,
        key=6.0e-6 / 128 / group,
        segment=0.0,
        tile=0.0,
        block=2.485 * step,
        masked=0.0,
        query=0.0774e-6 * head_dim / 128,
    )
    return AttentionLatency(
        replace(forward, tail=0.12),
        replace(backward, tail=0.12),
        units=132,
        heads=heads,
        source="our kernels on an H100",
        measured_to=131072,
        group=group,
    )


def fit(points: Sequence[Point], units: int, tiling: Tiling) -> KernelCost:
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
    return KernelCost(tiling, **dict(zip(COEFFICIENTS, x.tolist(), strict=True)))


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
