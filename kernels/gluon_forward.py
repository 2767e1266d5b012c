"""Forward in Gluon, in the order of FlashAttention-3 (Shah et al. 2024), which Triton's own pipeliner cannot
express.

One warp loads queries, keys and values by TMA into rings of buffers; two consumers compute, each 64 rows of
the tile. While one computes its softmax the other's matrix products keep the tensor cores busy; and within
one, the scores of the next block are issued together with the output of the last, so that the softmax between
them overlaps with a product:

    S_0 = Q K_0';  P_0 = softmax(S_0);  then for each block i = 1, 2, ...
        issue S_i = Q K_i';  issue O += P_{i-1} V_{i-1}
        wait for S_i alone;  P_i = softmax(S_i);  wait for O;  rescale O

Rows of a tile are tokens and the PACK query heads of each that share a key head, row r being token r // PACK
and head r % PACK: keys and values are loaded once for all of them, and tiles hold few tokens, so that little
of what is computed is masked away.

Persistent: one program a multiprocessor. Its loader takes the next tile of the list that nobody has, by a
counter in global memory, while the consumers are still at the last blocks; they find the number beside the
queries. With two buffers of both, the next tile's loads run under this one's end. The first tile is taken so
too: a program that gets its multiprocessor late, as where a collective holds it, leaves the heavy tiles to
others. Who computes a tile does not change its sums: results repeat bit for bit.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_common import give, given, tile_and_head, tma_load

ROWS = gl.constexpr(64)  # of one consumer: the M of a wgmma
CONSUMERS = gl.constexpr(2)
Q_STAGES = gl.constexpr(2)
STAGES = gl.constexpr(2)  # of keys and values

# Barriers, those of a ring of buffers in one allocation: see the backward's.
Q = gl.constexpr(0)
K = gl.constexpr(1)
V = gl.constexpr(2)
READY = gl.constexpr(0)  # all of these once a stage
FREE = gl.constexpr(2)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def work_of(number, tile_list, tiles, groups, section, BLOCK_N: gl.constexpr):
    """Row of the tile list, group of PACK heads, first key and number of blocks."""
    tile, group = tile_and_head(number, groups, tiles, section)
    row = tile_list + tile * 6
    kv_begin = gl.load(row + 2)
    # A tile of padding runs one block that none of its rows sees, and so writes its zeros.
    blocks = gl.maximum((gl.load(row + 5) - kv_begin + BLOCK_N - 1) // BLOCK_N, 1)
    return row, group, kv_begin, blocks


@gluon.jit
def load(
    work, rings, taken, q, k, v,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """The loader: every tile's number and Q, and every block's K and V, as buffers fall free."""
    tile_list, tiles, groups, section = work
    numbers, q_ring, k_ring, v_ring, bars = rings
    number = gl.atomic_add(taken, 1, sem="relaxed")
    round = 0
    step = 0
    while number < tiles * groups:
        row, group, kv_begin, blocks = work_of(number, tile_list, tiles, groups, section, BLOCK_N)
        q_begin = gl.load(row)
        kv_head = group * PACK // GROUP
        q_stage = round % Q_STAGES
        mbarrier.wait(bars[Q].index(FREE + q_stage), ((round // Q_STAGES) & 1) ^ 1)
        give(number, numbers.index(q_stage))
        mbarrier.arrive(bars[Q].index(READY + q_stage), count=1)
        mbarrier.expect(bars[Q].index(READY + q_stage), q.block_type.nbytes * CONSUMERS)
        for part in gl.static_range(CONSUMERS):
            tma_load(
                q, [q_begin + part * (ROWS // PACK), group * PACK, 0], bars[Q].index(READY + q_stage),
                q_ring.index(q_stage * CONSUMERS + part),
            )  # fmt: skip
        for i in range(blocks):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            start = kv_begin + i * BLOCK_N
            mbarrier.wait(bars[K].index(FREE + stage), phase ^ 1)
            mbarrier.expect(bars[K].index(READY + stage), k.block_type.nbytes)
            tma_load(k, [start, kv_head * D], bars[K].index(READY + stage), k_ring.index(stage))
            mbarrier.wait(bars[V].index(FREE + stage), phase ^ 1)
            mbarrier.expect(bars[V].index(READY + stage), v.block_type.nbytes)
            tma_load(v, [start, kv_head * DV], bars[V].index(READY + stage), v_ring.index(stage))
            step += 1
        # Not sooner: who takes a tile while it has most of another to do leaves the others without.
        number = gl.atomic_add(taken, 1, sem="relaxed")
        round += 1
    last = round % Q_STAGES
    mbarrier.wait(bars[Q].index(FREE + last), ((round // Q_STAGES) & 1) ^ 1)
    give(-1, numbers.index(last))
    mbarrier.arrive(bars[Q].index(READY + last), count=1)
    mbarrier.expect(bars[Q].index(READY + last), 0)


@gluon.jit
def next_number(numbers, bars, round):
    """Waits for a round's Q and returns the number of its tile; -1 if there is none left."""
    q_stage = round % Q_STAGES
    mbarrier.wait(bars[Q].index(READY + q_stage), (round // Q_STAGES) & 1)
    return given(numbers.index(q_stage), 4)


@gluon.jit
def online_softmax(
    scores, start, shared_begin, shared_end, first, last, m, l_sum, scale_log2,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Probabilities of one block, the new maximum m and sum, and alpha, by which earlier sums fade."""
    if (start < shared_begin) | (start + BLOCK_N > shared_end):
        at = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        seen = (at[None, :] >= first[:, None]) & (at[None, :] < last[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * scale_log2)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing: no NaN
    p = gl.exp2(scores * scale_log2 - base[:, None])
    alpha = gl.exp2(m - base)
    return p, m_new, l_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def attend(
    work, rings, results,
    PART: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """A consumer: rows PART * 64 ... PART * 64 + 63 of every tile."""
    tile_list, tiles, groups, section = work
    numbers, q_ring, k_ring, v_ring, bars = rings
    out, lse, bounds, q_tokens, scale_log2, out_stride_t, out_stride_h = results
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    # 16 bytes of a row a thread: whole lines of memory, by way of shared memory.
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = v_ring.dtype
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    no_scores = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=s_layout)

    round = 0
    step = 0
    number = next_number(numbers, bars, round)
    while number >= 0:
        row, group, kv_begin, blocks = work_of(number, tile_list, tiles, groups, section, BLOCK_N)
        q_begin = gl.load(row) + PART * (ROWS // PACK)
        q_end = gl.load(row + 1)
        shared_begin = gl.load(row + 3)
        shared_end = gl.load(row + 4)
        token = q_begin + gl.arange(0, ROWS, layout=rows) // PACK
        first = gl.load(bounds + token, mask=token < q_end, other=0)
        last = gl.load(bounds + q_tokens + token, mask=token < q_end, other=0)
        m = gl.full([ROWS], float("-inf"), gl.float32, layout=rows)
        l_sum = gl.full([ROWS], 0.0, gl.float32, layout=rows)
        o = gl.full([ROWS, DV], 0.0, gl.float32, layout=o_layout)

        q_stage = round % Q_STAGES
        queries = q_ring.index(q_stage * CONSUMERS + PART).reshape([ROWS, D])
        stage = step % STAGES
        mbarrier.wait(bars[K].index(READY + stage), (step // STAGES) & 1)
        s = warpgroup_mma(
            queries, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(bars[K].index(FREE + stage), count=1)
        p, m, l_sum, _ = online_softmax(
            s, kv_begin, shared_begin, shared_end, first, last, m, l_sum, scale_log2, BLOCK_N, s_layout
        )
        p = gl.convert_layout(p.to(dtype), p_layout)
        for i in range(1, blocks):
            before = stage
            before_phase = (step // STAGES) & 1
            step += 1
            stage = step % STAGES
            mbarrier.wait(bars[K].index(READY + stage), (step // STAGES) & 1)
            s = warpgroup_mma(
                queries, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            mbarrier.wait(bars[V].index(READY + before), before_phase)
            o = warpgroup_mma(p, v_ring.index(before), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(bars[K].index(FREE + stage), count=1)
            next_p, m, l_sum, alpha = online_softmax(
                s, kv_begin + i * BLOCK_N, shared_begin, shared_end, first, last, m, l_sum, scale_log2,
                BLOCK_N, s_layout,
            )  # fmt: skip
            o, p = warpgroup_mma_wait(0, deps=[o, p])
            mbarrier.arrive(bars[V].index(FREE + before), count=1)
            o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
            p = gl.convert_layout(next_p.to(dtype), p_layout)

        mbarrier.arrive(bars[Q].index(FREE + q_stage), count=1)
        mbarrier.wait(bars[V].index(READY + stage), (step // STAGES) & 1)
        o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(bars[V].index(FREE + stage), count=1)
        step += 1

        empty = l_sum == 0.0
        l_sum = gl.where(empty, 1.0, l_sum)
        natural = gl.where(empty, float("inf"), (m + gl.log2(l_sum)) * LN_2)
        head = group * PACK + gl.arange(0, ROWS, layout=rows) % PACK
        gl.store(lse + head.to(gl.int64) * q_tokens + token, natural, mask=token < q_end)
        o = o / gl.convert_layout(l_sum, gl.SliceLayout(1, o_layout))[:, None]
        o = gl.convert_layout(o.to(out.dtype.element_ty), out_layout)
        o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
        o_token = q_begin + o_row // PACK
        o_head = group * PACK + o_row % PACK
        col = gl.arange(0, DV, layout=gl.SliceLayout(0, out_layout))
        at = (o_token.to(gl.int64) * out_stride_t + o_head * out_stride_h)[:, None] + col[None, :]
        gl.store(out + at, o, mask=(o_token < q_end)[:, None])
        round += 1
        number = next_number(numbers, bars, round)


@gluon.jit(do_not_specialize=["tiles", "section", "q_tokens"])
def gluon_forward_kernel(
    q, k, v, out, lse, tile_list, taken, bounds, tiles, section, q_tokens, q_heads, scale_log2, out_stride_t,
    out_stride_h,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """out (Tq, Nq, DV) and lse (Nq, Tq), by any number of programs; tiles of 128 rows, PACK of them a token.
    taken: (1,) int32, zero. Launched with four warps, those of the first consumer."""
    numbers = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ring = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS, ROWS // PACK, PACK, D], q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, DV], v.layout)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    bars = (
        gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], layout),
        gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], layout),
        gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], layout),
    )
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(bars[Q].index(READY + stage), count=2)
        mbarrier.init(bars[Q].index(FREE + stage), count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars[K].index(READY + stage), count=1)
        mbarrier.init(bars[K].index(FREE + stage), count=CONSUMERS)
        mbarrier.init(bars[V].index(READY + stage), count=1)
        mbarrier.init(bars[V].index(FREE + stage), count=CONSUMERS)
    fence_async_shared()

    work = (tile_list, tiles, q_heads // PACK, section)
    rings = (numbers, q_ring, k_ring, v_ring, bars)
    results = (out, lse, bounds, q_tokens, scale_log2, out_stride_t, out_stride_h)
    gl.warp_specialize(
        [
            (attend, (work, rings, results, 0, D, DV, BLOCK_N, PACK)),
            (attend, (work, rings, results, 1, D, DV, BLOCK_N, PACK)),
            (load, (work, rings, taken, q, k, v, D, DV, BLOCK_N, GROUP, PACK)),
        ],
        [4, 1],
        [240, 24],
    )
