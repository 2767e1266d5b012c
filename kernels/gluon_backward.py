"""dK and dV in Gluon: a producer warpgroup and two consumers, each with 64 of the tile's 128 keys.

The scores are computed as keys x queries, so that P^T and dS^T stay in registers as the left operand of the
next product. Per step of 64 queries, with waits that leave one product in flight:

    issue S' = K Q';  issue dP' = V dO';   wait for S';  P' = exp2(...);   issue dV += P' dO;
    wait for dP';  dS' = P' * (dP' - delta);   issue dK += dS' Q;   wait for both

With head dim 128, dP' is issued only after the exponentials: 240 registers do not hold it any earlier.

The order of sums is that of the tile list, so results repeat bit for bit. Compiled and statically checked for
sm_90 with Triton 3.6 and 3.9; Gluon has no interpreter, so its results wait for a GPU.
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

KEYS = gl.constexpr(64)  # of one consumer: the M of a wgmma
QUERIES = gl.constexpr(64)  # of one step


@gluon.jit
def item_steps(items, item):
    """First row (aligned, see tiles.ROW_ALIGNMENT), number of steps, and the rows of an item."""
    q_begin = gl.load(items + item * 4)
    q_full = gl.load(items + item * 4 + 1)
    q_tail = gl.load(items + item * 4 + 2)
    q_end = gl.load(items + item * 4 + 3)
    aligned = q_begin // 4 * 4
    return aligned, (q_end - aligned + QUERIES - 1) // QUERIES, q_begin, q_full, q_tail, q_end


@gluon.jit
def load_queries(
    q, k, v, dout, lse_log2, delta, items, k_tile, v_tile, q_ring, do_ring, lse_ring, delta_ring, kv_ready,
    q_ready, do_ready, q_free, do_free, kv_begin, item_begin, item_end, group,
    D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: the tile's keys and values once, then Q, dO and their statistics step by step."""
    mbarrier.expect(kv_ready, (k.block_type.nbytes + v.block_type.nbytes) * 2)
    for half in gl.static_range(2):
        tma_load(k, [kv_begin + half * KEYS, group * D], kv_ready, k_tile.index(half))
        tma_load(v, [kv_begin + half * KEYS, group * DV], kv_ready, v_tile.index(half))
    step = 0
    for item in range(item_begin, item_end):
        aligned, steps, _, _, _, _ = item_steps(items, item)
        for head in range(group * GROUP, group * GROUP + GROUP):
            for i in range(steps):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                token = aligned + i * QUERIES
                mbarrier.wait(q_free.index(stage), phase ^ 1)
                mbarrier.expect(q_ready.index(stage), q.block_type.nbytes + lse_log2.block_type.nbytes)
                tma_load(q, [token, head * D], q_ready.index(stage), q_ring.index(stage))
                tma_load(lse_log2, [head, token], q_ready.index(stage), lse_ring.index(stage))
                mbarrier.wait(do_free.index(stage), phase ^ 1)
                mbarrier.expect(do_ready.index(stage), dout.block_type.nbytes + delta.block_type.nbytes)
                tma_load(dout, [token, head * DV], do_ready.index(stage), do_ring.index(stage))
                tma_load(delta, [head, token], do_ready.index(stage), delta_ring.index(stage))
                step += 1


@gluon.jit
def accumulate(
    common, rings,
    HALF_INDEX: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: dK and dV of 64 keys."""
    dk, dv, items, bounds, kv_begin, kv_end, item_begin, item_end, group, q_tokens = common[:10]
    scale, scale_log2, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h = common[10:]
    k_tile, v_tile, q_ring, do_ring, lse_ring, delta_ring, kv_ready, q_ready, do_ready, q_free, do_free = (
        rings
    )
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    ds_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk_layout, k_width=2)
    p_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv_layout, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_ring.dtype
    EARLY: gl.constexpr = D + DV <= 128  # with larger heads dP' would be one block of registers too many

    dk_acc = gl.full([KEYS, D], 0.0, gl.float32, layout=dk_layout)
    dv_acc = gl.full([KEYS, DV], 0.0, gl.float32, layout=dv_layout)
    nothing = gl.full([KEYS, QUERIES], 0.0, gl.float32, layout=s_layout)
    keys = k_tile.index(HALF_INDEX)
    values = v_tile.index(HALF_INDEX)
    key = kv_begin + HALF_INDEX * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
    mbarrier.wait(kv_ready, 0)
    step = 0
    for item in range(item_begin, item_end):
        aligned, steps, q_begin, q_full, q_tail, q_end = item_steps(items, item)
        for _ in range(GROUP):
            for i in range(steps):
                stage = step % STAGES
                phase = (step // STAGES) & 1
                token = aligned + i * QUERIES
                queries = q_ring.index(stage)
                do = do_ring.index(stage)
                mbarrier.wait(q_ready.index(stage), phase)
                s = warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
                if EARLY:
                    mbarrier.wait(do_ready.index(stage), phase)
                    dp = warpgroup_mma(values, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
                lse = lse_ring.index(stage).reshape([QUERIES]).load(columns)
                s = warpgroup_mma_wait(1 if EARLY else 0, deps=[s])
                p = gl.exp2(s * scale_log2 - lse[None, :])
                if (token < q_full) | (token + QUERIES > q_tail):
                    row = token + gl.arange(0, QUERIES, layout=columns)
                    inside = (row >= q_begin) & (row < q_end)
                    first = gl.load(bounds + row, mask=inside, other=0)
                    last = gl.load(bounds + q_tokens + row, mask=inside, other=0)
                    p = gl.where((key[:, None] >= first[None, :]) & (key[:, None] < last[None, :]), p, 0.0)
                if not EARLY:
                    mbarrier.wait(do_ready.index(stage), phase)
                    dp = warpgroup_mma(values, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
                p_half = gl.convert_layout(p.to(dtype), p_operand)
                dv_acc = warpgroup_mma(p_half, do, dv_acc, is_async=True)
                drop = delta_ring.index(stage).reshape([QUERIES]).load(columns)
                dp = warpgroup_mma_wait(1, deps=[dp])
                ds_half = gl.convert_layout((p * (dp - drop[None, :])).to(dtype), ds_operand)
                dk_acc = warpgroup_mma(ds_half, queries, dk_acc, is_async=True)
                dv_acc, p_half = warpgroup_mma_wait(1, deps=[dv_acc, p_half])
                mbarrier.arrive(do_free.index(stage), count=1)
                dk_acc, ds_half = warpgroup_mma_wait(0, deps=[dk_acc, ds_half])
                mbarrier.arrive(q_free.index(stage), count=1)
                step += 1

    first_key = kv_begin + HALF_INDEX * KEYS
    store_gradient(dk, dk_acc * scale, first_key, kv_end, group, dk_stride_t, dk_stride_h, D, dk_layout)
    store_gradient(dv, dv_acc, first_key, kv_end, group, dv_stride_t, dv_stride_h, DV, dv_layout)


@gluon.jit
def store_gradient(
    x, values, begin, end, head, stride_t, stride_h,
    DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    row = begin + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    at = row.to(gl.int64)[:, None] * stride_t + head * stride_h + col[None, :]
    gl.store(x + at, values.to(x.dtype.element_ty), mask=(row < end)[:, None])


@gluon.jit(do_not_specialize=["tiles", "q_tokens"])
def gluon_key_tile_kernel(
    q, k, v, dout, dk, dv, lse_log2, delta, tile_list, items, bounds, tiles, q_tokens, kv_heads, scale,
    scale_log2, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h,
    D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk (Tk, Nkv, D) and dv (Tk, Nkv, DV) of one tile of 128 keys and one key head; four warps at launch."""
    program = gl.program_id(0)
    section = program // (tiles * SECTION)
    width = gl.minimum(SECTION, kv_heads - section * SECTION)
    rest = program - section * tiles * SECTION
    tile = tile_list + rest // width * 4
    group = section * SECTION + rest % width
    kv_begin = gl.load(tile)
    kv_end = gl.load(tile + 1)
    item_begin = gl.load(tile + 2)
    item_end = gl.load(tile + 3)

    k_tile = gl.allocate_shared_memory(k.dtype, [2, KEYS, D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [2, KEYS, DV], v.layout)
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, QUERIES, D], q.layout)
    do_ring = gl.allocate_shared_memory(dout.dtype, [STAGES, QUERIES, DV], dout.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], lse_log2.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], delta.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(do_ready.index(stage), count=1)
        mbarrier.init(q_free.index(stage), count=2)  # both consumers
        mbarrier.init(do_free.index(stage), count=2)
    fence_async_shared()

    common = (
        dk, dv, items, bounds, kv_begin, kv_end, item_begin, item_end, group, q_tokens, scale, scale_log2,
        dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h,
    )  # fmt: skip
    rings = (
        k_tile, v_tile, q_ring, do_ring, lse_ring, delta_ring, kv_ready, q_ready, do_ready, q_free, do_free,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (accumulate, (common, rings, 0, D, DV, GROUP, STAGES)),
            (accumulate, (common, rings, 1, D, DV, GROUP, STAGES)),
            (
                load_queries,
                (
                    q, k, v, dout, lse_log2, delta, items, k_tile, v_tile, q_ring, do_ring, lse_ring,
                    delta_ring,
                    kv_ready, q_ready, do_ready, q_free, do_free, kv_begin, item_begin, item_end, group,
                    D, DV, GROUP, STAGES,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
