"""The attention kernels' coefficients: fitted to measured times, and those of ours on H100 and H200.

How a kernel cuts its work is known (`Tiling`), so the predicted time is linear in the coefficients once it
is known which of a launch's two bounds is larger: work spread over the units or the longest tile. `fit`
alternates between that choice and the coefficients, by non-negative least squares of relative errors.

`hopper` stands in for a profile of the device: the Gluon kernels at head dim 128 in bfloat16 on an H100,
whose multiprocessors are those of an H200. Its coefficients were fitted by benchmarks/attention_latency.py
(docs/context_parallel.md says how good they are), from kernels that did not yet order tiles by chains or pack
heads. Time that their backward spent waiting for turns is left out, as it is gone.

Head dim: FlashAttention-3 (Shah et al. 2024, H100, 16K tokens, not causal) reaches 497 TFLOP/s forward and
474 backward at head dim 64, and 648 and 561 at 128. So a block at 64 takes 0.652 and 0.592 of its time at
128. Ours is assumed to scale alike until it is measured, linearly between and beyond.

`taken` has the kernels that are predicted: those that `auto` takes, by the same rules (kernels/fastest.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, KeyTiling, Tiling
from wlb_titan.kernels.fastest import BLACKWELL_FAMILY, HOPPER, HOPPER_FAMILY

ROUNDS = 10
COEFFICIENTS = ("launch", "key", "query", "segment", "tile", "block", "masked")
BLOCK_ROWS = 64  # of queries times packed heads, in Gluon's backward
MERGE_KEYS = 1024  # as wlb_titan.kernels merges segments

OTHERS = {"triton": (1.45, 1.53), "torch": (1.0, 1.0)}
SLOWER = {
    HOPPER_FAMILY: {"gluon": (1.0, 1.0), "fa4": (0.97, 1.02), "triton": (1.45, 1.53), "torch": (1.75, 1.6)},
    BLACKWELL_FAMILY: OTHERS | {"fa4": (0.26, 0.28)},
}
"""By the major number of a GPU's compute capability, forward and backward over what `hopper` predicts of
Gluon's; elsewhere over torch's, whose rates of attention clusters of other GPUs have. FlashAttention-4's are
the medians of the table in docs/kernels.md, and those published for a B200 (clusters/b200.toml). Triton's are
near the medians of the 22 cases at head dim 128 in benchmarks/results/nvidia_h100, attention_h100.jsonl and
attention_turns_h100.jsonl, in 16 of them 1.49 to 1.62 backward, less on short documents, more on short shares
of a mix. torch's are those of FlashAttention-2 over FlashAttention-3 as published (Shah et al. 2024): 648
over 370 TFLOP/s forward, 1.5 to 1.75 times as long backward."""


class Point(NamedTuple):
    """One measurement: `segments` equal segments of `q_len` queries that each see `kv_len` keys."""

    q_len: int
    kv_len: int
    segments: int
    heads: int  # query heads
    seconds: float  # of one pass over all of it


def gluon_tilings(group: int) -> tuple[Tiling, Tiling]:
    """How Gluon cuts its forward and its backward, as in kernels/gluon_launch.py; a test compares both.

    Of the `group` query heads that share a key head up to 8 are packed into a forward tile, and 4 or 8 into a
    backward block.
    """
    pack = min(8, group & -group)
    queries = BLOCK_ROWS // pack if pack >= 4 else BLOCK_ROWS
    return Tiling(128 // pack, 128, MERGE_KEYS, pack), KeyTiling(queries, 128, MERGE_KEYS)


def hopper(head_dim: float, heads: int, *, group: int = 1) -> AttentionLatency:
    """Our Gluon kernels on an H100 or H200, in bfloat16 or float16.

    Forward: a tile of 128 rows, a block of 128 keys, and what its mask adds. Backward: a step of 128 keys
    with 64 rows (block), a program with 128 keys of one key head (key), and the element-wise kernels around
    it (query). Key and query were timed by themselves, not fitted. Heads packed into a tile or block share
    its time. `tail` is from a replay of the kernels: 0.08 of the longest program on the benchmark's packs,
    0.12 over packs, ranks and head counts drawn at random.

    `head_dim` is the mean where values have another; `group` query heads share a key head.
    """
    cut, backward_cut = gluon_tilings(group)
    larger = (head_dim - 128) / 64
    tile = 1e-6 / cut.heads_per_tile * (1 + (1 - 0.652) * larger)
    step = 1e-6 / (BLOCK_ROWS // backward_cut.query_tile) * (1 + (1 - 0.592) * larger)
    forward = KernelCost(
        cut, launch=0.0, key=0.0, segment=0.0, tile=3.66 * tile, block=1.68 * tile, masked=0.28 * tile
    )
    backward = KernelCost(
        replace(backward_cut, heads_per_tile=group),  # all walk over a tile of keys
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


def taken(implementation: str, dims: tuple[int, int], family: int = HOPPER_FAMILY) -> tuple[str, str]:
    """What computes forward and backward, on an NVIDIA GPU of this family, with these head dims (D, Dv) where
    [wlb.attention] has this implementation: "auto"'s where no factor of it was measured, and where fa4, which
    "auto" takes if it is installed, is not."""
    known = SLOWER.get(family, OTHERS)
    if implementation == "torch" or (family != HOPPER_FAMILY and implementation not in known):
        implementation = "torch" if dims[0] == dims[1] else "triton"
    if implementation in known:
        return implementation, implementation
    passes: tuple[str, str] = HOPPER.get(dims, ("triton", "triton"))
    return passes


def fit(points: Sequence[Point], units: int, tiling: Tiling) -> KernelCost:
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
    return np.asarray(np.maximum(spread @ x, longest @ x))


def _features(points: Sequence[Point], units: int, tiling: Tiling) -> tuple[Floats, Floats]:
    """Two float64 (points, coefficients): factors of the coefficients in each bound of a launch."""
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
    """The x >= 0 that brings features @ x closest to the target, by trying every subset of columns."""
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
    return np.asarray(best / scale)
