"""Forward in Gluon,
in the order of FlashAttention-3 (Shah et al. 2024): Triton's own pipeliner cannot express it.

Three warpgroups: one loads keys and values by TMA into a ring of buffers, two compute, each on half of the
tile's 128 rows. While one computes its softmax the other's matrix products keep the tensor cores busy; and
within one, the scores of the next block are issued together with the output of the last, so that the softmax
between them overlaps with a product:

    S_0 = Q K_0';  P_0 = softmax(S_0);  then for each block i = 1, 2, ...
        issue S_i = Q K_i';  issue O += P_{i-1} V_{i-1}
        wait for S_i alone;  P_i = softmax(S_i);  wait for O;  rescale O

One tile a program, from the same list as the Triton kernel. Compiled and statically checked for sm_90 with
Triton 3.6 and 3.9; Gluon has no interpreter, so its results wait for a GPU.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.9

HALF = gl.constexpr(64)  # rows of one consumer: the M of a wgmma
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def load_keys_and_values(
    q, k, v, q_tile, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, q_begin, kv_begin, blocks,
    head, group,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: Q once, then every block's K and V as buffers fall free."""
    mbarrier.expect(q_ready, q.block_type.nbytes * 2)
    for half in gl.static_range(2):
        tma_load(q, [q_begin + half * HALF, head * D], q_ready, q_tile.index(half))
    for i in range(blocks):
        stage = i % STAGES
        # A new barrier counts as passed in phase 1, so the first round does not wait.
        phase = (i // STAGES) & 1
        start = kv_begin + i * BLOCK_N
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), k.block_type.nbytes)
        tma_load(k, [start, group * D], k_ready.index(stage), k_ring.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v.block_type.nbytes)
        tma_load(v, [start, group * DV], v_ready.index(stage), v_ring.index(stage))


@gluon.jit
def online_softmax(scores, start, kv_shared, first, last, best, total, scale_log2, BLOCK_N: gl.constexpr):
    """Probabilities of one block, and the new maximum, sum and the factor that earlier sums fade by."""
    layout: gl.constexpr = scores.type.layout
    if start + BLOCK_N > kv_shared:
        at = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        seen = (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * scale_log2)
    base = gl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing: no NaN
    p = gl.exp2(scores * scale_log2 - base[:, None])
    fade = gl.exp2(best - base)
    return p, new_best, total * fade + gl.sum(p, 1), fade


@gluon.jit
def attend(
    common,
    HALF_INDEX: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of the tile."""
    out, lse, bounds, q_tile, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free = common[:11]
    q_begin, q_end, kv_begin, kv_shared, blocks, head, q_tokens = common[11:18]
    scale_log2, out_stride_t, out_stride_h = common[18:]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    dtype: gl.constexpr = v_ring.dtype
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)

    token = q_begin + HALF_INDEX * HALF + gl.arange(0, HALF, layout=rows)
    first = gl.load(bounds + token, mask=token < q_end, other=0)
    last = gl.load(bounds + q_tokens + token, mask=token < q_end, other=0)
    best = gl.full([HALF], float("-inf"), gl.float32, layout=rows)
    total = gl.full([HALF], 0.0, gl.float32, layout=rows)
    no_scores = gl.full([HALF, BLOCK_N], 0.0, gl.float32, layout=s_layout)
    o = gl.full([HALF, DV], 0.0, gl.float32, layout=o_layout)

    queries = q_tile.index(HALF_INDEX)
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(queries, k_ring.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    p, best, total, _ = online_softmax(s, kv_begin, kv_shared, first, last, best, total, scale_log2, BLOCK_N)
    p = gl.convert_layout(p.to(dtype), p_layout)

    for i in range(1, blocks):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
        s = warpgroup_mma(
            queries, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(before), ((i - 1) // STAGES) & 1)
        o = warpgroup_mma(p, v_ring.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(stage), count=1)
        next_p, best, total, fade = online_softmax(
            s, kv_begin + i * BLOCK_N, kv_shared, first, last, best, total, scale_log2, BLOCK_N
        )
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        mbarrier.arrive(v_free.index(before), count=1)
        o = o * gl.convert_layout(fade, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(next_p.to(dtype), p_layout)

    stage = (blocks - 1) % STAGES
    mbarrier.wait(v_ready.index(stage), ((blocks - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])

    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    logsum = gl.where(empty, float("inf"), (best + gl.log2(total)) * LN_2)
    gl.store(lse + head.to(gl.int64) * q_tokens + token, logsum, mask=token < q_end)
    o = o / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    row = q_begin + HALF_INDEX * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, o_layout))
    col = gl.arange(0, DV, layout=gl.SliceLayout(0, o_layout))
    at = row.to(gl.int64)[:, None] * out_stride_t + head * out_stride_h + col[None, :]
    gl.store(out + at, o.to(out.dtype.element_ty), mask=(row < q_end)[:, None])


@gluon.jit(do_not_specialize=["tiles", "q_tokens"])
def gluon_forward_kernel(
    q, k, v, out, lse, tile_list, bounds, tiles, q_tokens, q_heads, scale_log2, out_stride_t, out_stride_h,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SECTION: gl.constexpr,
):  # fmt: skip
    """out (Tq, Nq, DV) and lse (Nq, Tq) of one tile of 128 query tokens and one head; four warps."""
    program = gl.program_id(0)
    section = program // (tiles * SECTION)
    width = gl.minimum(SECTION, q_heads - section * SECTION)
    rest = program - section * tiles * SECTION
    row = tile_list + rest // width * 5
    head = section * SECTION + rest % width
    group = head // GROUP
    q_begin = gl.load(row)
    q_end = gl.load(row + 1)
    kv_begin = gl.load(row + 2)
    kv_shared = gl.load(row + 3)
    kv_end = gl.load(row + 4)
    # A tile of padding runs one block that none of its rows sees, and so writes its zeros.
    blocks = gl.maximum((kv_end - kv_begin + BLOCK_N - 1) // BLOCK_N, 1)

    q_tile = gl.allocate_shared_memory(q.dtype, [2, HALF, D], q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, DV], v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)  # both consumers
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()

    common = (
        out, lse, bounds, q_tile, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, q_begin, q_end,
        kv_begin, kv_shared, blocks, head, q_tokens, scale_log2, out_stride_t, out_stride_h,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend, (common, 0, D, DV, BLOCK_N, STAGES)),
            (attend, (common, 1, D, DV, BLOCK_N, STAGES)),
            (
                load_keys_and_values,
                (
                    q, k, v, q_tile, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, q_begin,
                    kv_begin,
                    blocks, head, group, D, DV, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
