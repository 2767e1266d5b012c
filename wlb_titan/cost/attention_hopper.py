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

That is `OWN`, by which wlb_titan's kernels are predicted until they are measured; they merge short segments
into shared tiles. FlashAttention-2 and -3 do not, and in their varlen mode a segment costs something besides:
their coefficients are fitted to MagiAttention's benchmark of 1 x 64 (8 key heads), dense and varlen, whose
packs of S tokens have documents of at most S / 4 (71 % up to 1,024 tokens, 0.44 % above 32K):

    TFLOP/s           S =   1K   2K   4K   8K  16K  32K          S = 1K   2K   4K   8K  16K  32K
    FA2 dense  forward     187  274  329  352  364  367  backward   140  209  268  303  323  331
        varlen              46  147  227  305  331  344              47   95  150  207  242  263
    FA3 dense  forward     283  584  661  655  670  678  backward   208  353  462  517  559  584
        varlen              60  219  357  483  544  584              53  114  206  319  375  425

The packs themselves are not published; drawn from a distribution with these quantiles, the fits meet the
forward points within 18 % (8 % root mean square) and the backward points within 9 % (3 %).

Head dim: FlashAttention-3 (Shah et al. 2024, H100, 16K tokens, not causal) reaches 497 forward and 474
backward at head dim 64, and 648 and 561 at 128; FlashAttention-2 there 324 and 291, and 370 and 322. So a
block at 64 takes 0.652 and 0.592 (0.571 and 0.553) of its time at 128; between and beyond, time is linear in
the head dim.

These are no measurements of wlb_titan's own kernels. `wlb-titan profile` makes those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, Tiling

MULTIPROCESSORS = 132
LONGEST = 32768  # keys of the longest published point
MERGE_KEYS = 1024  # as wlb_titan.kernels merges segments; the planner does not import it
MASKING = 0.2
MICROSECOND = 1e-6


class Coefficients(NamedTuple):
    """Of one pass, in microseconds but for `at_64`: a block's time at head dim 64 over that at 128."""

    launch: float
    segment: float
    tile: float
    block: float
    at_64: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A published kernel: its passes, what it is for reports, and the keys up to which it merges segments."""

    forward: Coefficients
    backward: Coefficients
    source: str
    merge_keys: int = 0


OWN = "wlb_titan"
KERNELS = {
    OWN: Kernel(
        Coefficients(24.8, 0.0, 1.70, 1.52, 0.652),
        Coefficients(0.0, 0.0, 33.9, 4.16, 0.592),
        "published figures for H100",
        merge_keys=MERGE_KEYS,
    ),
    "flash_attention_2": Kernel(
        Coefficients(45.6, 4.93, 0.0, 2.905, 0.571),
        Coefficients(106.7, 0.0, 14.99, 8.367, 0.553),
        "published FlashAttention-2 on H100",
    ),
    "flash_attention_3": Kernel(
        Coefficients(25.9, 9.15, 0.0, 1.562, 0.652),
        Coefficients(71.1, 21.44, 11.63, 4.711, 0.592),
        "published FlashAttention-3 on H100",
    ),
}


def hopper(
    head_dim: float, heads: int, *, kernel: str = OWN, merge_keys: int | None = None
) -> AttentionLatency:
    """The latency model of an H100 or H200 in bfloat16 or float16.

    Args:
        head_dim: of queries, keys and values; the mean of the two, if values have another.
        heads: query heads on the device.
        kernel: one of KERNELS.
        merge_keys: see `Tiling`; 0 is a kernel in which every segment has its own tiles, as in the paper.
            None: the kernel's own.
    """
    published = KERNELS[kernel]
    merge = published.merge_keys if merge_keys is None else merge_keys
    tiling = Tiling(query_tile=128, key_block=128, merge_keys=merge)
    return AttentionLatency(
        forward=_cost(tiling, published.forward, head_dim),
        backward=_cost(tiling, published.backward, head_dim),
        units=MULTIPROCESSORS,
        heads=heads,
        source=published.source,
        measured_to=LONGEST,
    )


def _cost(tiling: Tiling, fitted: Coefficients, head_dim: float) -> KernelCost:
    """Tiles and blocks take their time by the head dim; a block is masked once in every causal tile."""
    masked = min(MASKING * fitted.block, fitted.tile)
    unit = MICROSECOND * (1 + (1 - fitted.at_64) * (head_dim - 128) / 64)
    return KernelCost(
        tiling,
        launch=fitted.launch * MICROSECOND,
        key=0.0,
        segment=fitted.segment * MICROSECOND,
        tile=(fitted.tile - masked) * unit,
        block=fitted.block * unit,
        masked=masked * unit,
    )
