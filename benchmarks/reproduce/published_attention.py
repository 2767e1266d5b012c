"""Times of FlashAttention-2 and -3 on H100, as they were published.

They do not merge short segments, and in their varlen mode a segment costs something besides: the
coefficients are fitted to MagiAttention's benchmark of 64 heads (8 key heads, head dim 128, bfloat16, causal,
TFLOP/s of the causal half, backward 2.5 times the forward's work), dense and varlen, whose packs of S tokens
have documents of at most S / 4 (71 % up to 1,024 tokens, 0.44 % above 32K). Read off its charts to about 2 %:

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
backward at head dim 64, and 648 and 561 at 128; FlashAttention-2 there 324 and 291, and 370 and 322. Between
and beyond, time is linear in the head dim.
"""

from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, Tiling

# Of each pass launch, segment, tile and block in microseconds, and a block's time at head dim 64 over 128's.
PUBLISHED = {
    "flash_attention_2": ((45.6, 4.93, 0.0, 2.905, 0.571), (106.7, 0.0, 14.99, 8.367, 0.553)),
    "flash_attention_3": ((25.9, 9.15, 0.0, 1.562, 0.652), (71.1, 21.44, 11.63, 4.711, 0.592)),
}
MASKING = 0.2  # of a block


def published(kernel: str, head_dim: int, heads: int) -> AttentionLatency:
    """The attention of one layer on an H100."""
    forward, backward = (_cost(*passed, head_dim) for passed in PUBLISHED[kernel])
    return AttentionLatency(forward, backward, 132, heads, f"{kernel} as published", measured_to=32768)


def _cost(
    launch: float, segment: float, tile: float, block: float, at_64: float, head_dim: int
) -> KernelCost:
    masked = min(MASKING * block, tile)
    larger = 1 + (1 - at_64) * (head_dim - 128) / 64
    return KernelCost(
        Tiling(128, 128),
        launch=launch * 1e-6,
        key=0.0,
        segment=segment * 1e-6,
        tile=(tile - masked) * 1e-6 * larger,
        block=block * 1e-6 * larger,
        masked=masked * 1e-6 * larger,
    )
