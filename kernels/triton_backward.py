"""Backward in three deterministic passes: row statistics, dK and dV over key tiles, dQ over query tiles.

With P the probabilities, dP = dO V^T and delta = rowsum(O * dO) per row (FlashAttention-2, Dao 2023):

    dV = P^T dO        dS = P * (dP - delta)        dK = scale dS^T Q        dQ = scale dS K

Both passes recompute P from Q, K and the log-sum-exp: seven matrix products instead of five, but no atomics,
so that results repeat bit for bit. One key tile sums over all query segments that see it and over all query
heads of its key head. A gradient of the log-sum-exp is subtracted from delta.
"""

import triton
import triton.language as tl

from .triton_common import (
    add_product,
    key_range,
    load_piece,
    load_rows,
    masked_block,
    no_rows,
    scaled,
    store_rows,
    tile_and_head,
    times_transposed,
)


@triton.jit(do_not_specialize=["q_tokens", "row_length"])
def statistics_kernel(
    out, out_stride_t, out_stride_h, dout, dout_stride_t, dout_stride_h, lse, dlse, lse_log2, delta, q_tokens,
    row_length,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, PACK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta, less dlse if there is one, and the log-sum-exp in base 2, both (Nq / PACK, row_length) with the
    rows in the order of key tiles' Q: the statistics of a query tile are one run, which one TMA load fetches.
    """
    token = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    outputs = (out, None, out_stride_t, out_stride_h, q_tokens)
    gradients = (dout, None, dout_stride_t, dout_stride_h, q_tokens)
    o = load_piece(outputs, out, token, head, BLOCK_M, DV, 0, BLOCK_DV, TMA=False)
    do = load_piece(gradients, dout, token, head, BLOCK_M, DV, 0, BLOCK_DV, TMA=False)
    row = (token + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask = row < q_tokens
    at = (head // PACK).to(tl.int64) * row_length + row * PACK + head % PACK
    natural = tl.load(lse + head.to(tl.int64) * q_tokens + row, mask=mask, other=0.0)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        given = tl.load(dlse + head.to(tl.int64) * q_tokens + row, mask=mask, other=0.0)
        row_delta -= tl.where(natural == float("inf"), 0.0, given)  # padding's may be NaN
    tl.store(delta + at, row_delta, mask=mask)
    tl.store(lse_log2 + at, natural * 1.4426950408889634, mask=mask)


@triton.jit
def load_statistic(x, row, group, rows, row_length, ROWS: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        values = x.load([group, row]).reshape(ROWS)
    else:
        at = row + tl.arange(0, ROWS)
        values = tl.load(x + group * row_length.to(tl.int64) + at, mask=at < rows, other=0.0)
    return values


@triton.jit
def key_tile_step(
    q, dout, statistics, bounds, keys, values, kv_begin, token, begin, end, head, dk, dv, scale_log2,
    q_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add to a key tile's dk and dv from BLOCK_M query rows from `token`, only tokens begin ... end."""
    lse_log2, delta, row_length = statistics
    queries = load_rows(q, token, head, BLOCK_M, D, BLOCK_D, REST_D, TMA)
    lse = load_statistic(lse_log2, token, head, q_tokens, row_length, BLOCK_M, TMA)
    at = token + tl.arange(0, BLOCK_M)
    inside = (at >= begin) & (at < end)
    first = tl.load(bounds + at, mask=inside, other=0)
    last = tl.load(bounds + q_tokens + at, mask=inside, other=0)
    key = kv_begin + tl.arange(0, BLOCK_N)
    p = tl.exp2(times_transposed(queries, keys) * scale_log2 - lse[:, None])
    p = tl.where((key[None, :] >= first[:, None]) & (key[None, :] < last[:, None]), p, 0.0)
    do = load_rows(dout, token, head, BLOCK_M, DV, BLOCK_DV, REST_DV, TMA)
    dv = add_product(dv, p.T.to(do[0].dtype), do)
    row_delta = load_statistic(delta, token, head, q_tokens, row_length, BLOCK_M, TMA)
    ds = (p * (times_transposed(do, values) - row_delta[:, None])).to(queries[0].dtype)
    return add_product(dk, ds.T, queries), dv


@triton.jit(do_not_specialize=["tiles", "section", "q_tokens", "kv_tokens", "row_length"])
def key_tile_kernel(
    q, q_rest, q_stride_t, q_stride_h, k, k_rest, k_stride_t, k_stride_h, v, v_rest, v_stride_t, v_stride_h,
    dout, dout_rest, dout_stride_t, dout_stride_h, dk, dk_stride_t, dk_stride_h, dv, dv_stride_t, dv_stride_h,
    lse_log2, delta, row_length, tile_list, items, bounds, tiles, section, q_tokens, kv_tokens, kv_heads,
    scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dk (Tk, Nkv, D) and dv (Tk, Nkv, DV): one program per key tile and key head. All rows are masked, even
    those that see the whole tile: one loop needs fewer registers than two."""
    tile, kv_head = tile_and_head(kv_heads, tiles, section)
    kv_begin = tl.load(tile_list + tile * 4)
    kv_end = tl.load(tile_list + tile * 4 + 1)
    item_begin = tl.load(tile_list + tile * 4 + 2)
    item_end = tl.load(tile_list + tile * 4 + 3)
    keys = load_rows(
        (k, k_rest, k_stride_t, k_stride_h, kv_tokens), kv_begin, kv_head, BLOCK_N, D, BLOCK_D, REST_D, TMA
    )
    values = load_rows(
        (v, v_rest, v_stride_t, v_stride_h, kv_tokens), kv_begin, kv_head, BLOCK_N, DV, BLOCK_DV, REST_DV, TMA
    )
    queries = (q, q_rest, q_stride_t, q_stride_h, q_tokens)
    gradients = (dout, dout_rest, dout_stride_t, dout_stride_h, q_tokens)
    statistics = (lse_log2, delta, row_length)

    dk_acc = no_rows(BLOCK_N, BLOCK_D, REST_D)
    dv_acc = no_rows(BLOCK_N, BLOCK_DV, REST_DV)
    for item in range(item_begin, item_end):
        q_begin = tl.load(items + item * 6)
        q_end = tl.load(items + item * 6 + 3)
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            # TMA reads statistics from multiples of 16 bytes only; rows before q_begin are masked.
            for token in tl.range(q_begin // 4 * 4, q_end, BLOCK_M):
                dk_acc, dv_acc = key_tile_step(
                    queries, gradients, statistics, bounds, keys, values, kv_begin, token, q_begin, q_end,
                    head, dk_acc, dv_acc, scale_log2, q_tokens, D, BLOCK_D, REST_D, DV, BLOCK_DV, REST_DV,
                    BLOCK_M, BLOCK_N, TMA=TMA,
                )  # fmt: skip

    dk_acc = scaled(dk_acc, scale)
    store_rows(dk, dk_acc, kv_begin, kv_head, dk_stride_t, dk_stride_h, kv_end, D, BLOCK_D, REST_D)
    store_rows(dv, dv_acc, kv_begin, kv_head, dv_stride_t, dv_stride_h, kv_end, DV, BLOCK_DV, REST_DV)


@triton.jit
def query_tile_step(
    queries, do, k, v, start, kv_head, first, last, lse, row_delta, acc, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add to a query tile's dQ from the keys start ... start + BLOCK_N."""
    keys = load_rows(k, start, kv_head, BLOCK_N, D, BLOCK_D, REST_D, TMA)
    p = tl.exp2(times_transposed(queries, keys) * scale_log2 - lse[:, None])
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        p = tl.where((key[None, :] >= first[:, None]) & (key[None, :] < last[:, None]), p, 0.0)
    values = load_rows(v, start, kv_head, BLOCK_N, DV, BLOCK_DV, REST_DV, TMA)
    ds = p * (times_transposed(do, values) - row_delta[:, None])
    return add_product(acc, ds.to(keys[0].dtype), keys)


@triton.jit(do_not_specialize=["tiles", "section", "q_tokens", "kv_tokens", "row_length"])
def query_tile_kernel(
    q, q_rest, q_stride_t, q_stride_h, k, k_rest, k_stride_t, k_stride_h, v, v_rest, v_stride_t, v_stride_h,
    dout, dout_rest, dout_stride_t, dout_stride_h, dq, dq_stride_t, dq_stride_h, lse_log2, delta, row_length,
    tile_list, bounds, tiles, section, q_tokens, kv_tokens, q_heads, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq (Tq, Nq, D): one program per query tile and head, over the same tiles as the forward."""
    tile, head = tile_and_head(q_heads, tiles, section)
    q_begin = tl.load(tile_list + tile * 6)
    q_end = tl.load(tile_list + tile * 6 + 1)
    kv_begin, full_begin, full_end, masked_keys = key_range(tile_list + tile * 6, BLOCK_N)
    kv_head = head // GROUP

    token = q_begin + tl.arange(0, BLOCK_M)
    inside = token < q_end
    first = tl.load(bounds + token, mask=inside, other=0)
    last = tl.load(bounds + q_tokens + token, mask=inside, other=0)
    at = head.to(tl.int64) * row_length + token
    lse = tl.load(lse_log2 + at, mask=inside, other=float("inf"))
    row_delta = tl.load(delta + at, mask=inside, other=0.0)
    queries = load_rows(
        (q, q_rest, q_stride_t, q_stride_h, q_tokens), q_begin, head, BLOCK_M, D, BLOCK_D, REST_D, TMA
    )
    do = load_rows(
        (dout, dout_rest, dout_stride_t, dout_stride_h, q_tokens), q_begin, head, BLOCK_M, DV, BLOCK_DV,
        REST_DV, TMA,
    )  # fmt: skip
    keys = (k, k_rest, k_stride_t, k_stride_h, kv_tokens)
    values = (v, v_rest, v_stride_t, v_stride_h, kv_tokens)

    acc = no_rows(BLOCK_M, BLOCK_D, REST_D)
    for start in tl.range(full_begin, full_end, BLOCK_N):
        acc = query_tile_step(
            queries, do, keys, values, start, kv_head, first, last, lse, row_delta, acc, scale_log2, D,
            BLOCK_D, REST_D, DV, BLOCK_DV, REST_DV, BLOCK_N, MASKED=False, TMA=TMA,
        )  # fmt: skip
    for offset in tl.range(0, masked_keys, BLOCK_N):
        start = masked_block(offset, kv_begin, full_begin, full_end)
        acc = query_tile_step(
            queries, do, keys, values, start, kv_head, first, last, lse, row_delta, acc, scale_log2, D,
            BLOCK_D, REST_D, DV, BLOCK_DV, REST_DV, BLOCK_N, MASKED=True, TMA=TMA,
        )  # fmt: skip
    acc = scaled(acc, scale)
    store_rows(dq, acc, q_begin, head, dq_stride_t, dq_stride_h, q_end, D, BLOCK_D, REST_D)
