"""Backward in Gluon, all three gradients in one pass: five products (FlashAttention-3, Shah et al. 2024).

A tile is 128 keys of one key head; a program walks over all queries that see it in steps of 64 rows: PACK
query heads of each of 64 / PACK tokens, packed as in the forward. Where a group has more heads, it walks over
them at each block of tokens, or one after the other (HEADS_FIRST). Two consumers have 64 of the keys each;
one warp loads; two add dQ to global memory. Scores are computed as keys x queries, so that P' stays in
registers as the left operand of the next product. Per step:

    wait for S' = K Q';  issue dP' = V dO';  P' = exp2(...);  issue dV += P' dO
    wait for dP';  dS' = P' * (dP' - delta), to shared memory;  wait for dV
    when both consumers' dS' is there:  issue dQ = dS K, each half of the head dim;  issue dK += dS' Q
    wait for dQ, and give it to the adding warp;  issue the next step's S';  wait for dK

dQ takes dS' from shared memory, where both consumers' halves are; dK takes a consumer's own from registers,
as dV takes P': shared memory, not the tensor cores, is what a step is short of.

dK and dV are summed in the order of the tile list. So is dQ, by TMA reductions in float32: every step's rows
of a segment have a counter; the adding warp waits until it is its turn (tiles.key_tiles), and raises it when
its sum has arrived; the first to come stores. Each of the two has a buffer, so the consumers need not wait.
Queries are walked from last to first: tiles that start together meet each block one after another.

Persistent, as the forward: the loader takes the next tile that nobody has, by a counter in global memory, and
leaves what the others need to know beside the keys; these arrive while dK and dV of the last tile leave.
Tiles wait only for earlier ones, which running programs do in the order of the list: none waits for ever.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_common import (
    after_others,
    give,
    given,
    item_blocks,
    stage_and_phase,
    step_place,
    store_rows,
    tile_and_head,
    tma_add,
    tma_load,
    tma_store,
    wait_until_added,
    wait_until_read,
    zero_here,
)

KEYS = gl.constexpr(64)  # of one consumer: the M of a wgmma
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of one step, whose first token is a multiple of how many it has

# Barriers, those of a ring of buffers in one allocation: where two are in one, Triton has the warps of a
# partition meet between a wait for one and an arrival at the other. A ring's must; others would for nothing.
KV = gl.constexpr(0)
KV_READY = gl.constexpr(0)  # and the tile's numbers
KV_FREE = gl.constexpr(1)
QUERIES = gl.constexpr(1)
Q_READY = gl.constexpr(0)  # all of these once a stage
DO_READY = gl.constexpr(2)
FREE = gl.constexpr(4)  # Q and dO
DS = gl.constexpr(2)  # one, and no ring
DQ = gl.constexpr(3)
DQ_READY = gl.constexpr(0)
DQ_FREE = gl.constexpr(2)
STAGES = gl.constexpr(2)  # of Q and dO, dS and dQ, each of which has an adding warp
CONSUMERS = gl.constexpr(2)

# What the loader tells the others of a tile.
PROGRAM = gl.constexpr(0)  # of those that share its keys: key head and part of its query heads; -1 at the end
KV_BEGIN = gl.constexpr(1)
KV_END = gl.constexpr(2)
ITEM_BEGIN = gl.constexpr(3)
ITEM_END = gl.constexpr(4)
NUMBERS = gl.constexpr(5)


@gluon.jit
def next_program(work, bars, round, WARPS: gl.constexpr):
    """Waits for a round's tile."""
    mbarrier.wait(bars[KV].index(KV_READY), round & 1)
    return given(work.index(PROGRAM), WARPS)


@gluon.jit
def load_tile(
    kv_begin, item_begin, item_end, program, items, groups, step, bars, loaded, tensors,
    D: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr, PACK: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """A tile's keys and values once, then Q, dO and their statistics step by step, counted from `step`."""
    k_tile, v_tile, q_ring, do_ring, statistics, bound_ring = loaded
    q, k, v, dout, lse_log2, delta, bounds = tensors
    kv_head = program // SPLIT
    mbarrier.expect(bars[KV].index(KV_READY), (k.block_type.nbytes + v.block_type.nbytes) * 2)
    for half in gl.static_range(2):
        tma_load(k, [kv_begin + half * KEYS, kv_head * D], bars[KV].index(KV_READY), k_tile.index(half))
        tma_load(v, [kv_begin + half * KEYS, kv_head * DV], bars[KV].index(KV_READY), v_tile.index(half))
    for item in range(item_begin, item_end):
        block, blocks = item_blocks(items, item, ROWS // PACK)
        for place in range(blocks * groups):
            at, group = step_place(place, block, blocks, program * groups, groups, HEADS_FIRST)
            row = at * ROWS  # in the packed order
            stage, phase = stage_and_phase(step)
            q_ready = bars[QUERIES].index(Q_READY + stage)
            do_ready = bars[QUERIES].index(DO_READY + stage)
            mbarrier.wait(bars[QUERIES].index(FREE + stage), phase ^ 1)
            mbarrier.expect(q_ready, q.block_type.nbytes + 3 * lse_log2.block_type.nbytes)
            heads = [row // PACK, group * PACK, 0]
            tma_load(q, heads, q_ready, q_ring.index(stage))
            tma_load(lse_log2, [group, row], q_ready, statistics.index(stage))
            tma_load(bounds, [0, row], q_ready, bound_ring.index(stage))
            tma_load(bounds, [1, row], q_ready, bound_ring.index(STAGES + stage))
            mbarrier.expect(do_ready, dout.block_type.nbytes + delta.block_type.nbytes)
            tma_load(dout, heads, do_ready, do_ring.index(stage))
            tma_load(delta, [group, row], do_ready, statistics.index(STAGES + stage))
            step += 1
    return step


@gluon.jit
def load(
    lists, items, groups, work, bars, loaded, tensors,
    D: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr, PACK: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """The loader: takes the next tile of the list that nobody has, and tells the others."""
    tile_list, taken, tiles, programs, section = lists
    round = 0
    step = 0
    number = gl.atomic_add(taken, 1, sem="relaxed")
    while number < tiles * programs:
        tile, program = tile_and_head(number, programs, tiles, section)
        kv_begin = gl.load(tile_list + tile * 4)
        item_begin = gl.load(tile_list + tile * 4 + 2)
        item_end = gl.load(tile_list + tile * 4 + 3)
        mbarrier.wait(bars[KV].index(KV_FREE), (round & 1) ^ 1)
        give(program, work.index(PROGRAM))
        give(kv_begin, work.index(KV_BEGIN))
        give(gl.load(tile_list + tile * 4 + 1), work.index(KV_END))
        give(item_begin, work.index(ITEM_BEGIN))
        give(item_end, work.index(ITEM_END))
        mbarrier.arrive(bars[KV].index(KV_READY), count=1)
        step = load_tile(
            kv_begin, item_begin, item_end, program, items, groups, step, bars, loaded, tensors,
            D, DV, SPLIT, PACK, HEADS_FIRST,
        )  # fmt: skip
        number = gl.atomic_add(taken, 1, sem="relaxed")  # not sooner: see the forward's
        round += 1
    mbarrier.wait(bars[KV].index(KV_FREE), (round & 1) ^ 1)
    give(-1, work.index(PROGRAM))
    mbarrier.arrive(bars[KV].index(KV_READY), count=1)
    mbarrier.expect(bars[KV].index(KV_READY), 0)


@gluon.jit
def add_tile(
    item_begin, item_end, program, items, groups, step, bars, sums,
    STAGE: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """An adding warp's share of a tile: dQ of every other step, in two halves of the head dim.

    To look for the turn, to add, and to pass the turn on are three round trips to memory, more than a step
    takes: so two warps add by turns, and each looks for its turn before the sum is there.
    """
    dq_tile, dq, turns, counters, all_groups = sums
    for item in range(item_begin, item_end):
        block, blocks = item_blocks(items, item, ROWS // PACK)
        begin = gl.load(items + item * 6)
        end = gl.load(items + item * 6 + 3)
        counter = turns + gl.load(items + item * 6 + 4)
        turn = gl.load(items + item * 6 + 5)
        for place in range((step + STAGE) % STAGES, blocks * groups, STAGES):
            at, group = step_place(place, block, blocks, program * groups, groups, HEADS_FIRST)
            first = at * (ROWS // PACK)
            count = ((first < begin) | (first + ROWS // PACK > end)).to(gl.int32)
            if turn >= 0:
                count = gl.atomic_add(counter + group * counters + at, 0, sem="acquire")
                while count >> 1 != turn:
                    count = gl.atomic_add(counter + group * counters + at, 0, sem="acquire")
                count = after_others(count)
            mbarrier.wait(bars[DQ].index(DQ_READY + STAGE), ((step + place) // STAGES) & 1)
            row = (at * all_groups + group) * (D // 2)
            for half in gl.static_range(2):
                if (count & 1) == 1:
                    tma_add(dq, [row + half * (D // 4), 0], dq_tile.index(2 * STAGE + half))
                else:
                    tma_store(dq, [row + half * (D // 4), 0], dq_tile.index(2 * STAGE + half))
            wait_until_read()
            mbarrier.arrive(bars[DQ].index(DQ_FREE + STAGE), count=1)
            if turn >= 0:
                raised = wait_until_added() + 2 - (count & 1)  # by two, and odd from the first on
                gl.atomic_add(counter + group * counters + at, raised, sem="release")
        step += blocks * groups
    return step


@gluon.jit
def add_dq(
    items, groups, work, bars, sums,
    STAGE: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """An adding warp: its share of every tile."""
    round = 0
    step = 0
    program = next_program(work, bars, round, 1)
    while program >= 0:
        item_begin = given(work.index(ITEM_BEGIN), 1)
        item_end = given(work.index(ITEM_END), 1)
        mbarrier.arrive(bars[KV].index(KV_FREE), count=1)  # of the numbers
        step = add_tile(
            item_begin, item_end, program, items, groups, step, bars, sums, STAGE, D, PACK, HEADS_FIRST
        )
        round += 1
        program = next_program(work, bars, round, 1)


@gluon.jit
def accumulate_tile(
    work, items, groups, step, bars, loaded, results,
    PART: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PACK: gl.constexpr, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """A consumer's share of a tile: dK and dV of keys PART * 64 ... PART * 64 + 63; half of each dQ."""
    k_tile, v_tile, q_ring, do_ring, statistics, bound_ring = loaded
    ds_tile, dq_tile, _, _, _, _, scale_log2 = results
    TOKENS: gl.constexpr = ROWS // PACK
    HALF_D: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_D, 16])
    p_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv_layout, k_width=2)
    ds_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk_layout, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_ring.dtype

    dk_acc = gl.full([KEYS, D], 0.0, gl.float32, layout=dk_layout)
    dv_acc = gl.full([KEYS, DV], 0.0, gl.float32, layout=dv_layout)
    nothing = gl.full([KEYS, ROWS], 0.0, gl.float32, layout=s_layout)
    no_dq = gl.full([ROWS, HALF_D], 0.0, gl.float32, layout=dq_layout)
    first_key = given(work.index(KV_BEGIN), 4) + PART * KEYS
    key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
    for item in range(given(work.index(ITEM_BEGIN), 4), given(work.index(ITEM_END), 4)):
        block, blocks = item_blocks(items, item, TOKENS)
        q_begin = gl.load(items + item * 6)
        q_full = gl.load(items + item * 6 + 1)
        q_tail = gl.load(items + item * 6 + 2)
        q_end = gl.load(items + item * 6 + 3)
        final = step + blocks * groups - 1
        stage, phase = stage_and_phase(step)
        mbarrier.wait(bars[QUERIES].index(Q_READY + stage), phase)
        queries = q_ring.index(stage).reshape([ROWS, D])
        s = warpgroup_mma(k_tile.index(PART), queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
        for place in range(blocks * groups):  # one loop: nested, it would spill
            stage, phase = stage_and_phase(step)
            token = step_place(place, block, blocks, 0, groups, HEADS_FIRST)[0] * TOKENS
            queries = q_ring.index(stage).reshape([ROWS, D])
            do = do_ring.index(stage).reshape([ROWS, DV])
            zero = zero_here()
            mbarrier.wait(bars[QUERIES].index(DO_READY + stage), phase)
            s = warpgroup_mma_wait(0, deps=[s])
            if place > 0:
                mbarrier.arrive(bars[QUERIES].index(FREE + (stage ^ 1)), count=1)  # the step's before
            values = v_tile.index(PART + zero)
            dp = warpgroup_mma(values, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
            lse = statistics.index(stage).reshape([ROWS]).load(columns)
            p = gl.exp2(s * scale_log2 - lse[None, :])
            if (token < q_full) | (token + TOKENS > q_tail):
                row = token + gl.arange(0, ROWS, layout=columns) // PACK
                first = bound_ring.index(stage).reshape([ROWS]).load(columns)
                last = bound_ring.index(STAGES + stage).reshape([ROWS]).load(columns)
                last = gl.where((row >= q_begin) & (row < q_end), last, 0)  # or they belong to another item
                p = gl.where((key[:, None] >= first[None, :]) & (key[:, None] < last[None, :]), p, 0.0)
            p_left = gl.convert_layout(p.to(dtype), p_operand)
            dv_acc = warpgroup_mma(p_left, do, dv_acc, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            row_delta = statistics.index(STAGES + stage).reshape([ROWS]).load(columns)
            ds = (p * (dp - row_delta[None, :])).to(dtype)
            # Who hands over this step's dS has read the last but one's.
            ds_tile.index(2 * stage + PART).store(ds)
            ds_left = gl.convert_layout(ds, ds_operand)
            fence_async_shared()
            mbarrier.arrive(bars[DS].index(0), count=1)
            dv_acc, p_left = warpgroup_mma_wait(0, deps=[dv_acc, p_left])
            mbarrier.wait(bars[DS].index(0), step & 1)
            part = no_dq
            for half in gl.static_range(2):
                part = warpgroup_mma(
                    ds_tile.index(2 * stage + half).permute((1, 0)),
                    k_tile.index(half + zero).slice(PART * HALF_D, HALF_D, 1),
                    part, use_acc=half > 0, is_async=True,
                )  # fmt: skip
            dk_acc = warpgroup_mma(ds_left, queries, dk_acc, is_async=True)
            mbarrier.wait(bars[DQ].index(DQ_FREE + stage), phase ^ 1)
            part = warpgroup_mma_wait(1, deps=[part])
            # Each thread's values side by side: see gluon_launch.py.
            part = part.reshape([4, 2, 8, HALF_D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
            dq_tile.index(2 * stage + PART).store(part.reshape([HALF_D // 2, 128]))
            fence_async_shared()
            mbarrier.arrive(bars[DQ].index(DQ_READY + stage), count=1)
            # After an item's last step the same S' again: products must not be under way in one branch alone.
            following, its_phase = stage_and_phase(gl.minimum(step + 1, final))
            mbarrier.wait(bars[QUERIES].index(Q_READY + following), its_phase)
            queries = q_ring.index(following).reshape([ROWS, D])
            keys = k_tile.index(PART + zero_here())
            s = warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)
            dk_acc, ds_left = warpgroup_mma_wait(1, deps=[dk_acc, ds_left])
            step += 1
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(bars[QUERIES].index(FREE + (final & 1)), count=1)
    return dk_acc, dv_acc, step


@gluon.jit
def accumulate(
    items, groups, work, bars, loaded, results,
    PART: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr, PACK: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """A consumer: its share of every tile."""
    ds_tile, _, dk, dv, kv_tokens, kv_heads, scale_log2 = results
    round = 0
    step = 0
    while next_program(work, bars, round, 4) >= 0:
        dk_acc, dv_acc, step = accumulate_tile(
            work, items, groups, step, bars, loaded, results, PART, D, DV, PACK, HEADS_FIRST
        )
        program = given(work.index(PROGRAM), 4)  # only now: while a tile is walked over, registers are short
        begin = given(work.index(KV_BEGIN), 4) + PART * KEYS
        end = given(work.index(KV_END), 4)
        mbarrier.arrive(bars[KV].index(KV_FREE), count=1)
        kv_head = program // SPLIT
        first_row = program % SPLIT * kv_tokens
        spare = ds_tile.index(2 * (step & 1) + PART)  # the next step's
        store_rows(dk, dk_acc * (scale_log2 * LN_2), begin, end, first_row, kv_heads, kv_head, spare, D)
        store_rows(dv, dv_acc, begin, end, first_row, kv_heads, kv_head, spare, DV)
        round += 1


@gluon.jit(do_not_specialize=["tiles", "section", "counters", "kv_tokens"])
def gluon_backward_kernel(
    q, k, v, dout, dk, dv, dq, lse_log2, delta, tile_list, items, turns, bounds, tiles, section, counters,
    kv_tokens, kv_heads, scale_log2,
    D: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr, PACK: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """All tiles of 128 keys, for SPLIT parts of each key head's query heads, by any number of programs.

    Writes dk (SPLIT, Tk, Nkv, D) and dv (SPLIT, Tk, Nkv, DV), to be summed over the parts, and dq, as
    gluon_launch.py says, where edges must be zero before (tiles.key_tiles).
    turns: (Nq / PACK, counters) int32, `first_turns` for each group of heads; the last of the first row
    counts the tiles that are taken. Launched with four warps, those of the first consumer.
    """
    work = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_tile = gl.allocate_shared_memory(k.dtype, [2, KEYS, D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [2, KEYS, DV], v.layout)
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, ROWS // PACK, PACK, D], q.layout)
    do_ring = gl.allocate_shared_memory(dout.dtype, [STAGES, ROWS // PACK, PACK, DV], dout.layout)
    statistics = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, ROWS], lse_log2.layout)
    bound_ring = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1, ROWS], bounds.layout)
    ds_tile = gl.allocate_shared_memory(q.dtype, [4, KEYS, ROWS], gl.NVMMASharedLayout(128, 16, 2))
    dq_tile = gl.allocate_shared_memory(gl.float32, [2 * STAGES, D // 4, 128], dq.layout)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    bars = (
        gl.allocate_shared_memory(gl.int64, [2, 1], layout),
        gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], layout),
        gl.allocate_shared_memory(gl.int64, [1, 1], layout),
        gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], layout),
    )
    mbarrier.init(bars[KV].index(KV_READY), count=2)
    mbarrier.init(bars[KV].index(KV_FREE), count=CONSUMERS + STAGES)
    mbarrier.init(bars[DS].index(0), count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars[DQ].index(DQ_FREE + stage), count=1)
        mbarrier.init(bars[DQ].index(DQ_READY + stage), count=CONSUMERS)
        mbarrier.init(bars[QUERIES].index(Q_READY + stage), count=1)
        mbarrier.init(bars[QUERIES].index(FREE + stage), count=CONSUMERS)
        mbarrier.init(bars[QUERIES].index(DO_READY + stage), count=1)
    fence_async_shared()

    groups: gl.constexpr = GROUP // SPLIT // PACK
    lists = (tile_list, turns + (counters - 1), tiles, kv_heads * SPLIT, section)
    loaded = (k_tile, v_tile, q_ring, do_ring, statistics, bound_ring)
    results = (ds_tile, dq_tile, dk, dv, kv_tokens, kv_heads, scale_log2)
    tensors = (q, k, v, dout, lse_log2, delta, bounds)
    sums = (dq_tile, dq, turns, counters, kv_heads * GROUP // PACK)
    gl.warp_specialize(
        [
            (accumulate, (items, groups, work, bars, loaded, results, 0, D, DV, SPLIT, PACK, HEADS_FIRST)),
            (accumulate, (items, groups, work, bars, loaded, results, 1, D, DV, SPLIT, PACK, HEADS_FIRST)),
            (load, (lists, items, groups, work, bars, loaded, tensors, D, DV, SPLIT, PACK, HEADS_FIRST)),
            (add_dq, (items, groups, work, bars, sums, 0, D, PACK, HEADS_FIRST)),
            (add_dq, (items, groups, work, bars, sums, 1, D, PACK, HEADS_FIRST)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
