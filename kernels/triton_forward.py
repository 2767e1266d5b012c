"""Forward: one program per query tile and head group; online softmax over blocks of keys (FlashAttention-2).

Two loops: first the blocks that all rows of the tile see whole, with no mask at all, then the rest with each
row's bounds. The tile list is heaviest first, so the last programs to start are the shortest. Nothing is
copied or re-packed: a segment's keys are read where they lie.
"""

import triton
import triton.language as tl

from .triton_common import key_range, load_rows, masked_block, store_rows, tile_and_group


@triton.jit
def attend_block(
    q, k, v, start, group, first, last, best, total, acc, scale_log2, kv_tokens, k_stride_t, k_stride_h,
    v_stride_t, v_stride_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: keys start ... start + BLOCK_N of key head `group`."""
    keys = load_rows(k, start, group, k_stride_t, k_stride_h, kv_tokens, BLOCK_N, 1, D, BLOCK_D, TMA)
    scores = tl.dot(q, keys.T)
    if MASKED:
        at = start + tl.arange(0, BLOCK_N)
        seen = (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    base = new_best
    if MASKED:
        # A row that has seen nothing yet: exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN.
        base = tl.where(new_best == float("-inf"), 0.0, base)
    p = tl.exp2(scores * scale_log2 - base[:, None])
    fade = tl.exp2(best - base)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    values = load_rows(v, start, group, v_stride_t, v_stride_h, kv_tokens, BLOCK_N, 1, DV, BLOCK_DV, TMA)
    acc = tl.dot(p.to(values.dtype), values, acc)
    return new_best, total, acc


@triton.jit(do_not_specialize=["tiles", "section", "q_tokens", "kv_tokens"])
def forward_kernel(
    q, k, v, out, lse, tile_list, bounds, tiles, section, q_tokens, kv_tokens, q_heads, scale_log2,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, out_stride_t, out_stride_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out (Tq, Nq, DV) and lse (Nq, Tq) float32, natural logarithm, +inf for padding."""
    tile, pack_group = tile_and_group(q_heads // PACK, tiles, section)
    q_begin = tl.load(tile_list + tile * 6)
    q_end = tl.load(tile_list + tile * 6 + 1)
    kv_begin, full_begin, full_end, masked_keys = key_range(tile_list + tile * 6, BLOCK_N)
    head = pack_group * PACK
    group = head // GROUP

    row = tl.arange(0, BLOCK_M)
    token = q_begin + row // PACK
    first = tl.load(bounds + token, mask=token < q_end, other=0)
    last = tl.load(bounds + q_tokens + token, mask=token < q_end, other=0)
    queries = load_rows(q, q_begin, head, q_stride_t, q_stride_h, q_tokens, BLOCK_M, PACK, D, BLOCK_D, TMA)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in tl.range(full_begin, full_end, BLOCK_N):
        best, total, acc = attend_block(
            queries, k, v, start, group, first, last, best, total, acc, scale_log2, kv_tokens, k_stride_t,
            k_stride_h, v_stride_t, v_stride_h, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, TMA,
        )  # fmt: skip
    for offset in tl.range(0, masked_keys, BLOCK_N):
        start = masked_block(offset, kv_begin, full_begin, full_end)
        best, total, acc = attend_block(
            queries, k, v, start, group, first, last, best, total, acc, scale_log2, kv_tokens, k_stride_t,
            k_stride_h, v_stride_t, v_stride_h, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, TMA,
        )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    store_rows(out, acc, q_begin, head, out_stride_t, out_stride_h, q_end, BLOCK_M, PACK, DV, BLOCK_DV)
    logsum = tl.where(empty, float("inf"), (best + tl.log2(total)) * 0.6931471805599453)
    at = (head + row % PACK).to(tl.int64) * q_tokens + token
    tl.store(lse + at, logsum, mask=token < q_end)
