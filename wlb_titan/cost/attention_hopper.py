"""Attention on H100 and H200 without a profile of the device at hand: our kernels as measured on one H100,
and FlashAttention-2 and -3 as they were published.

The two devices have the same multiprocessors and differ in memory, which attention hardly waits for.

`OWN`, wlb_titan's Gluon kernels (head dim 128, bfloat16): fitted by benchmarks/attention_latency.py to the
grid in benchmarks/results/nvidia_h100, of 32 query and 4 key heads; it says how well it predicts. Those were
the kernels before tiles were ordered by chains and heads packed; a replay of their tile lists says what of
the backward was waiting for turns, which is left out here, as it is gone. Backward times of the kernels as
they are now, measured afterwards, are met within 5 % in 20 of 24 cases. Forward: a tile of 128 rows, a
block of 128 keys, and what its mask adds. Backward: a step of 128 keys with 64 rows (block), a program
with 128 keys of one key head, and the element-wise kernels around it by query token and head, two of which
have become one since. These two were timed by themselves and not fitted. `tail` is what a replay of the
tree's kernels takes beyond work spread evenly: 0.08 of the longest program on those packs, 0.12 over packs,
ranks and head counts drawn at random. Measured anew, `python benchmarks/attention_latency.py --rows FOLDER
--kernels tree` fits and prints tile, block, masked, step and tail again.

FlashAttention-2 and -3 do not merge short segments, and in their varlen mode a segment costs something
besides: their coefficients are fitted to MagiAttention's benchmark of 64 heads (8 key heads, head dim 128,
bfloat16, causal, TFLOP/s of the causal half, backward 2.5 times the forward's work), dense and varlen, whose
packs of S tokens have documents of at most S / 4 (71 % up to 1,024 tokens, 0.44 % above 32K). Read off its
charts to about 2 %:

    TFLOP/s           S =   1K   2K   4K   8K  16K  32K          S = 1K   2K   4K   8K  16K  32K
    FA2 dense  forward     187  274  329  352  364  367  backward   140  209  268  303  323  331
        varlen              46  147  227  305  331  344              47   95  150  207  242  263
    FA3 dense  forward     283  584  661  655  670  678  backward   208  353  462  517  559  584
        varlen              60  219  357  483  544  584              53  114  206  319  375  425

The packs themselves are not published; drawn from a distribution with these quantiles, the fits meet the
forward points within 18 % (8 % root mean square) and the backward points within 9 % (3 %). Each causal tile
has one masked block, so that these times cannot tell tile from masked block: masking is taken as 20 % of a
block.

Head dim: FlashAttention-3 (Shah et al. 2024, H100, 16K tokens, not causal) reaches 497 forward and 474
backward at head dim 64, and 648 and 561 at 128; FlashAttention-2 there 324 and 291, and 370 and 322. So a
block at 64 takes 0.652 and 0.592 (0.571 and 0.553) of its time at 128, and of ours too until it is measured;
between and beyond, time is linear in the head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from wlb_titan.cost.attention_fit import BLOCK_ROWS, tilings
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, KeyTiling, Tiling

MULTIPROCESSORS = 132
MASKING = 0.2
MICROSECOND = 1e-6
PROGRAM_KEYS = 128


class Coefficients(NamedTuple):
    """Times of one pass, in microseconds but for `at_64`: a block's time at head dim 64 over that at 128.

    masked: what a block's mask adds; None for MASKING of a block, which is taken off the tile. program: of
    each PROGRAM_KEYS keys of a key head. query: of each query token and head.
    """

    launch: float
    segment: float
    tile: float
    block: float
    at_64: float
    masked: float | None = None
    program: float = 0.0
    query: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """What was measured or published: both passes, what it is for reports, and
    the keys of the longest segment; tail as in `KernelCost`."""

    forward: Coefficients
    backward: Coefficients
    source: str
    longest: int = 32768
    tail: float = 0.0


OWN = "wlb_titan"
KERNELS = {
    OWN: Kernel(
        Coefficients(0.0, 0.0, 3.66, 1.68, 0.652, masked=0.28),
        Coefficients(0.0, 0.0, 0.0, 2.485, 0.592, masked=0.0, program=6.0, query=0.0774),
        "our kernels on an H100",
        longest=131072,
        tail=0.12,
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


def hopper(head_dim: float, heads: int, *, group: int = 1, kernel: str = OWN) -> AttentionLatency:
    """The latency model of an H100 or H200 in bfloat16 or float16.

    Args:
        head_dim: head dim of queries, keys and values; the mean of the two, if values have another.
        group: query heads that share a key head.
    """
    known = KERNELS[kernel]
    cut = tilings("gluon", group) if kernel == OWN else (Tiling(128, 128), Tiling(128, 128))
    forward, backward = (
        _cost(tiling, fitted, head_dim, group, known.tail)
        for tiling, fitted in zip(cut, (known.forward, known.backward), strict=True)
    )
    return AttentionLatency(
        forward,
        backward,
        MULTIPROCESSORS,
        heads,
        known.source,
        measured_to=known.longest,
        group=group,
    )


def _cost(tiling: Tiling, fitted: Coefficients, head_dim: float, group: int, tail: float) -> KernelCost:
    """Tiles and blocks take their time by the head dim. A tile of keys is walked over for each head of its
    group; heads that are packed into one tile or block of queries share its time.
    """
    packed = tiling.heads_per_tile
    if isinstance(tiling, KeyTiling):
        packed = BLOCK_ROWS // tiling.query_tile
        tiling = replace(tiling, heads_per_tile=group)
    masked, tile = fitted.masked, fitted.tile
    if masked is None:
        masked = min(MASKING * fitted.block, tile)
        tile -= masked
    unit = MICROSECOND / packed * (1 + (1 - fitted.at_64) * (head_dim - 128) / 64)
    return KernelCost(
        tiling,
        launch=fitted.launch * MICROSECOND,
        key=fitted.program / PROGRAM_KEYS / group * MICROSECOND,
        query=fitted.query * head_dim / 128 * MICROSECOND,
        segment=fitted.segment * MICROSECOND,
        tile=tile * unit,
        block=fitted.block * unit,
        masked=masked * unit,
        tail=tail,
    )
