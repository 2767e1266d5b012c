"""Common parts of the Triton kernels: loads and stores of tiles, with or without TMA.

A head dim is one or two powers of two, BLOCK and REST: 128 is 128 alone, 192 is 128 and 64, 96 is 64 and 32.
A tile is a tuple of one or two tensors, so that products have no column of padding; only head dims that
two powers do not make are filled up with zeros.

TMA descriptors (Hopper) are two-dimensional where they can be: (tokens, heads * dim) with blocks of one head,
which go from shared memory to wgmma as they are. Where zeros are filled up they are (tokens, heads, dim), and
the tile takes a detour through registers. Without TMA (sm_80, sm_89) the same argument is a plain pointer,
and a mask does the padding.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    x, token, head,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK) and, if REST > 0, (ROWS, REST) of an operand from `token` on; zeros past the end and DIM.

    x: (pointer or descriptor, the same for REST, stride of a token, stride of a head, tokens).
    """
    piece = load_piece(x, x[0], token, head, ROWS, DIM, 0, BLOCK, TMA)
    if REST > 0:  # noqa: SIM108 - decided when compiling
        pieces = (piece, load_piece(x, x[1], token, head, ROWS, DIM, BLOCK, REST, TMA))
    else:
        pieces = (piece,)
    return pieces


@triton.jit
def load_piece(
    x, source, token, head,
    ROWS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Columns FIRST ... FIRST + BLOCK of `load_rows`, by their descriptor, or the pointer, `source`."""
    if TMA and FIRST + BLOCK <= DIM:
        rows = source.load([token, head * DIM + FIRST])
    elif TMA:
        rows = source.load([token, head, FIRST]).reshape(ROWS, BLOCK)
    else:
        row = tl.arange(0, ROWS)
        col = FIRST + tl.arange(0, BLOCK)
        t = (token + row).to(tl.int64)
        at = t * x[2] + head * x[3]
        mask = (t < x[4])[:, None] & (col < DIM)[None, :]
        rows = tl.load(source + at[:, None] + col[None, :], mask=mask, other=0.0)
    return rows


@triton.jit
def store_rows(
    x, pieces, token, head, stride_token, stride_head, end,
    DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Store a tile where the token is before `end` and the column before DIM."""
    store_piece(x, pieces[0], token, head, stride_token, stride_head, end, DIM, 0, BLOCK)
    if REST > 0:
        store_piece(x, pieces[1], token, head, stride_token, stride_head, end, DIM, BLOCK, REST)


@triton.jit
def store_piece(
    x, values, token, head, stride_token, stride_head, end,
    DIM: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, values.shape[0])
    col = FIRST + tl.arange(0, BLOCK)
    t = (token + row).to(tl.int64)
    at = t * stride_token + head * stride_head
    mask = (t < end)[:, None] & (col < DIM)[None, :]
    tl.store(x + at[:, None] + col[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def no_rows(ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """A tile of zeros, float32."""
    zeros = tl.zeros([ROWS, BLOCK], tl.float32)
    return (zeros, tl.zeros([ROWS, REST], tl.float32)) if REST > 0 else (zeros,)


@triton.jit
def times_transposed(x, y):
    """x y^T of two tiles, float32."""
    product = tl.dot(x[0], y[0].T)
    if len(x) > 1:
        product = tl.dot(x[1], y[1].T, product)
    return product


@triton.jit
def add_product(acc, x, y):
    """acc + x y, of a tensor x and two tiles."""
    piece = tl.dot(x, y[0], acc[0])
    return (piece, tl.dot(x, y[1], acc[1])) if len(acc) > 1 else (piece,)


@triton.jit
def scaled(x, factor):
    """A tile times a number, or times (ROWS, 1)."""
    return (x[0] * factor, x[1] * factor) if len(x) > 1 else (x[0] * factor,)


@triton.jit
def tile_and_head(heads, tiles, section):
    """This program's row of the tile list and its head.

    `section` heads at a time run through the whole list, so that their keys stay in the L2 cache; within a
    section all heads of the heaviest tile come first.
    """
    program = tl.program_id(0)
    number = program // (tiles * section)
    width = tl.minimum(section, heads - number * section)
    rest = program - number * tiles * section
    return rest // width, number * section + rest % width


@triton.jit
def key_range(row, BLOCK_N: tl.constexpr):
    """First key of a row of tiles.query_tiles; first and end of its full blocks; keys of the others."""
    begin = tl.load(row + 2)
    shared_begin = tl.load(row + 3)
    shared_end = tl.load(row + 4)
    full_begin = begin + tl.cdiv(shared_begin - begin, BLOCK_N) * BLOCK_N
    full_end = full_begin + tl.maximum(shared_end - full_begin, 0) // BLOCK_N * BLOCK_N
    return begin, full_begin, full_end, full_begin - begin + tl.load(row + 5) - full_end


@triton.jit
def masked_block(offset, begin, full_begin, full_end):
    """First key of the block `offset` keys into those that are not full."""
    before = full_begin - begin
    return tl.where(offset < before, begin + offset, full_end + offset - before)
