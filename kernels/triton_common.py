"""What the Triton kernels share: how a tile's rows map to memory, and loads with or without TMA.

The heads of a query tile: PACK query heads that share one key head are interleaved in the rows, row r of a
tile being token q_begin + r // PACK of head group * PACK + r % PACK. With PACK 8, sixteen query tokens fill
128 rows.

TMA descriptors (Hopper) are two-dimensional where they can be: (tokens, heads * dim) with blocks of one head,
which go from shared memory to wgmma as they are. With PACK > 1, or a head dim that is not a power of two,
they are (tokens, heads, dim): the copy engine gathers the heads of a tile and fills up the head dim with
zeros, and the tile takes a detour through registers. Without TMA (sm_80, sm_89) the same argument is a plain
pointer, and a mask does the padding.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    x, token, head, stride_token, stride_head, tokens,
    ROWS: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK) of x: tokens from `token` on, PACK heads from `head` on; zeros past the end and DIM."""
    if TMA and PACK == 1 and DIM == BLOCK:
        rows = x.load([token, head * DIM])
    elif TMA:
        rows = x.load([token, head, 0]).reshape(ROWS, BLOCK)
    else:
        row = tl.arange(0, ROWS)
        col = tl.arange(0, BLOCK)
        t = (token + row // PACK).to(tl.int64)
        at = t * stride_token + (head + row % PACK) * stride_head
        mask = (t < tokens)[:, None] & (col < DIM)[None, :]
        rows = tl.load(x + at[:, None] + col[None, :], mask=mask, other=0.0)
    return rows


@triton.jit
def store_rows(
    x, values, token, head, stride_token, stride_head, end,
    ROWS: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store (ROWS, BLOCK) values where the token is before `end` and the column before DIM."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    t = (token + row // PACK).to(tl.int64)
    at = t * stride_token + (head + row % PACK) * stride_head
    mask = (t < end)[:, None] & (col < DIM)[None, :]
    tl.store(x + at[:, None] + col[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def tile_and_group(groups, tiles, section):
    """This program's row of the tile list and its group of heads.

    `section` groups at a time run through the whole list, so that the keys of so many heads stay in the L2
    cache; within a section all heads of the heaviest tile come first.
    """
    program = tl.program_id(0)
    number = program // (tiles * section)
    width = tl.minimum(section, groups - number * section)
    rest = program - number * tiles * section
    return rest // width, number * section + rest % width


@triton.jit
def key_range(row, BLOCK_N: tl.constexpr):
    """First key of a query tile; first and end of the blocks that every row sees whole; keys of the others.

    row: of the tile list (tiles.query_tiles).
    """
    begin = tl.load(row + 2)
    shared_begin = tl.load(row + 3)
    shared_end = tl.load(row + 4)
    full_begin = begin + tl.cdiv(shared_begin - begin, BLOCK_N) * BLOCK_N
    full_end = full_begin + tl.maximum(shared_end - full_begin, 0) // BLOCK_N * BLOCK_N
    return begin, full_begin, full_end, full_begin - begin + tl.load(row + 5) - full_end


@triton.jit
def masked_block(offset, begin, full_begin, full_end):
    """First key of the block that lies `offset` keys into those that are not full."""
    before = full_begin - begin
    return tl.where(offset < before, begin + offset, full_end + offset - before)
