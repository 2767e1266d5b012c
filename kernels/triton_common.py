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
def tile_and_group(groups, tiles, SECTION: tl.constexpr):
    """This program's row of the tile list and its group of heads.

    SECTION groups at a time run through the whole list, so that the keys of SECTION heads stay in the L2
    cache; within a section all heads of the heaviest tile come first.
    """
    program = tl.program_id(0)
    section = program // (tiles * SECTION)
    width = tl.minimum(SECTION, groups - section * SECTION)
    rest = program - section * tiles * SECTION
    return rest // width, section * SECTION + rest % width
