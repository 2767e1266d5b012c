"""Attention on H100 and H200 without a profile: coefficients derived from published measurements.

The two devices have the same multiprocessors and differ in memory, which attention hardly waits for.

Points: FlashAttention-3, causal, bfloat16, head dim 128, in TFLOP/s of the causal half (forward 2 S^2 D a
head, backward 2.5 times that), 132 multiprocessors.

    sequences x heads             S = 1K   2K   4K   8K  16K  32K    source
    1 x 64 (8 key heads) forward     283  584  661  655  670  678    MagiAttention's kernel benchmark on H100,
                         backward    208  353  462  517  559  584    read off its charts to about 2 %
    4 x 48               forward     364  560  667  685              facebookexperimental/triton, pull request
                         backward    182  316  444  539              3582, beside TLX

Least squares of relative errors in launch, tile and block, with tiles of 128 queries and blocks of 128 keys,
gives forward 24.8, 1.70 and 1.52 microseconds and backward 0, 33.9 and 4.16; the points are met within 18 %,
8 % root mean square. In causal attention each tile has exactly one masked block, so that these times cannot
tell tile from masked block: masking is taken as 20 % of a block. The backward's tile time is large also
because the passes before and after the main kernel read and write each query token; it is charged by the tile
all the same.

Head dim: FlashAttention-3 (Shah et al. 2024, H100, 16K tokens, not causal) reaches 497 forward and 474
backward at head dim 64, and 648 and 561 at 128. So a block at 64 takes 0.652 and 0.592 of its time at 128;
between and beyond, time is linear in the head dim.

These are no measurements of wlb_titan's own kernels. `wlb-titan profile` makes those.
"""

from __future__ import annotations

from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, Tiling

MULTIPROCESSORS = 132
LONGEST = 32768  # keys of the longest published point
MERGE_KEYS = 1024  # as wlb_titan.kernels merges segments; the planner does not import it
MASKING = 0.2
MICROSECOND = 1e-6


def hopper(head_dim: int, heads: int, *, merge_keys: int = MERGE_KEYS) -> AttentionLatency:
    """The latency model of an H100 or H200 in bfloat16 or float16.

    Args:
        head_dim: of queries and keys.
        heads: query heads on the device.
        merge_keys: see `Tiling`; 0 is a kernel in which every segment has its own tiles, as in the paper.
    """
    tiling = Tiling(query_tile=128, key_block=128, merge_keys=merge_keys)
    return AttentionLatency(
        forward=_cost(tiling, launch=24.8, tile=1.70, block=1.52, size=_linear(head_dim, at_64=0.652)),
        backward=_cost(tiling, launch=0.0, tile=33.9, block=4.16, size=_linear(head_dim, at_64=0.592)),
        units=MULTIPROCESSORS,
        heads=heads,
        source="published figures for H100",
        measured_to=LONGEST,
    )


def _cost(tiling: Tiling, *, launch: float, tile: float, block: float, size: float) -> KernelCost:
    masked = MASKING * block
    return KernelCost(
        tiling,
        launch=launch * MICROSECOND,
        key=0.0,
        segment=0.0,
        tile=(tile - masked) * size * MICROSECOND,
        block=block * size * MICROSECOND,
        masked=masked * size * MICROSECOND,
    )


def _linear(head_dim: int, *, at_64: float) -> float:
    """The line through `at_64` at head dim 64 and 1 at 128."""
    return 1 + (1 - at_64) * (head_dim - 128) / 64
