"""Forward with automatic warp specialization: Triton splits one loop into a producer and two consumers.

It accepts exactly one specialized loop, so every block is masked; no tensor that was loaded through pointers,
so the rows' bounds are computed and a tile holds rows of one segment; and it splits the consumers' operands
only if their descriptor is made in the kernel, so Q's is. Four warps, 128 rows. What is specialized and what
silently is not was found by compiling: tests/kernels/test_compile.py checks that it is.
"""

import triton
import triton.language as tl

from .triton_common import store_rows, tile_and_group


@triton.jit(do_not_specialize=["tiles", "q_tokens"])
def specialized_forward_kernel(
    q, k, v, out, lse, tile_list, tiles, q_tokens, q_heads, scale_log2, q_stride_t, out_stride_t,
    out_stride_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    SECTION: tl.constexpr,
):  # fmt: skip
    """out (Tq, Nq, DV) and lse (Nq, Tq); q is a pointer, k and v are TMA descriptors."""
    tile, head = tile_and_group(q_heads, tiles, SECTION)
    q_begin = tl.load(tile_list + tile * 5)
    q_end = tl.load(tile_list + tile * 5 + 1)
    kv_begin = tl.load(tile_list + tile * 5 + 2)
    kv_end = tl.load(tile_list + tile * 5 + 4)
    group = head // GROUP
    q_rows = tl.make_tensor_descriptor(q, [q_tokens, q_heads * D], [q_stride_t, 1], [BLOCK_M, D])
    queries = q_rows.load([q_begin, head * D])
    token = q_begin + tl.arange(0, BLOCK_M)
    last = token + (kv_end - q_end + 1)

    # Finite, so that rows that have seen nothing stay free of NaN.
    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    for start in tl.range(kv_begin, kv_end, BLOCK_N, warp_specialize=True):
        keys = k.load([start, group * D])
        scores = tl.dot(queries, keys.T)
        at = start + tl.arange(0, BLOCK_N)
        scores = tl.where(at[None, :] < last[:, None], scores * scale_log2, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - new_best[:, None])
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        values = v.load([start, group * DV])
        acc = tl.dot(p.to(values.dtype), values, acc)
        best = new_best

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    store_rows(
        out, acc / total[:, None], q_begin, head, out_stride_t, out_stride_h, q_end, BLOCK_M, 1, DV, DV
    )
    logsum = tl.where(empty, float("inf"), (best + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + head.to(tl.int64) * q_tokens + token, logsum, mask=token < q_end)
