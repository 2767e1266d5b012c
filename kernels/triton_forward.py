"""Forward: one program per query tile and head; online softmax over blocks of keys (FlashAttention-2).

Two loops: first the blocks that all rows of the tile see whole, without a mask, then the rest with each row's
bounds. The heaviest documents' tiles come first, so the last programs to start are short. Keys are read where
they lie.

As in the paper, m is a row's maximum so far (in base 2, scaled), l the sum of its exponentials, and alpha the
factor by which a new maximum makes earlier sums fade.
"""

import triton
import triton.language as tl

from .triton_common import (
    add_product,
    key_range,
    load_rows,
    masked_block,
    no_rows,
    scaled,
    store_rows,
    tile_and_head,
    times_transposed,
)


@triton.jit
def attend_block(
    queries, k, v, start, kv_head, first, last, m, l_sum, acc, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: keys start ... start + BLOCK_N."""
    keys = load_rows(k, start, kv_head, BLOCK_N, D, BLOCK_D, REST_D, TMA)
    scores = times_transposed(queries, keys)
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    base = m_new
    if MASKED:
        # A row that has seen nothing yet: exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN.
        base = tl.where(m_new == float("-inf"), 0.0, base)
    p = tl.exp2(scores * scale_log2 - base[:, None])
    alpha = tl.exp2(m - base)
    l_sum = l_sum * alpha + tl.sum(p, 1)
    acc = scaled(acc, alpha[:, None])
    values = load_rows(v, start, kv_head, BLOCK_N, DV, BLOCK_DV, REST_DV, TMA)
    acc = add_product(acc, p.to(values[0].dtype), values)
    return m_new, l_sum, acc


@triton.jit(do_not_specialize=["tiles", "section", "q_tokens", "kv_tokens"])
def forward_kernel(
    q, q_rest, q_stride_t, q_stride_h, k, k_rest, k_stride_t, k_stride_h, v, v_rest, v_stride_t, v_stride_h,
    out, out_stride_t, out_stride_h, lse, tile_list, bounds, tiles, section, q_tokens, kv_tokens, q_heads,
    scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """out (Tq, Nq, DV) and lse (Nq, Tq) float32, natural logarithm, +inf for padding."""
    tile, head = tile_and_head(q_heads, tiles, section)
    q_begin = tl.load(tile_list + tile * 6)
    q_end = tl.load(tile_list + tile * 6 + 1)
    kv_begin, full_begin, full_end, masked_keys = key_range(tile_list + tile * 6, BLOCK_N)
    kv_head = head // GROUP

    token = q_begin + tl.arange(0, BLOCK_M)
    first = tl.load(bounds + token, mask=token < q_end, other=0)
    last = tl.load(bounds + q_tokens + token, mask=token < q_end, other=0)
    queries = load_rows(
        (q, q_rest, q_stride_t, q_stride_h, q_tokens), q_begin, head, BLOCK_M, D, BLOCK_D, REST_D, TMA
    )
    keys = (k, k_rest, k_stride_t, k_stride_h, kv_tokens)
    values = (v, v_rest, v_stride_t, v_stride_h, kv_tokens)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = no_rows(BLOCK_M, BLOCK_DV, REST_DV)
    for start in tl.range(full_begin, full_end, BLOCK_N):
        m, l_sum, acc = attend_block(
            queries, keys, values, start, kv_head, first, last, m, l_sum, acc, scale_log2, D, BLOCK_D, REST_D,
            DV, BLOCK_DV, REST_DV, BLOCK_N, MASKED=False, TMA=TMA,
        )  # fmt: skip
    for offset in tl.range(0, masked_keys, BLOCK_N):
        start = masked_block(offset, kv_begin, full_begin, full_end)
        m, l_sum, acc = attend_block(
            queries, keys, values, start, kv_head, first, last, m, l_sum, acc, scale_log2, D, BLOCK_D, REST_D,
            DV, BLOCK_DV, REST_DV, BLOCK_N, MASKED=True, TMA=TMA,
        )  # fmt: skip

    empty = l_sum == 0.0
    l_sum = tl.where(empty, 1.0, l_sum)
    acc = scaled(acc, 1.0 / l_sum[:, None])
    store_rows(out, acc, q_begin, head, out_stride_t, out_stride_h, q_end, DV, BLOCK_DV, REST_DV)
    natural = tl.where(empty, float("inf"), (m + tl.log2(l_sum)) * 0.6931471805599453)
    at = head.to(tl.int64) * q_tokens + token
    tl.store(lse + at, natural, mask=token < q_end)
