"""Common parts of the Gluon kernels, and what Triton 3.6 and 3.9 name or hide differently.

One Gluon program is a few partitions that run side by side on one multiprocessor: consumers of four warps
that multiply, one warp that loads by TMA, and in the backward two that add dQ. They meet at mbarriers. One
completes a phase when all its arrivals and all bytes it expects have come; `wait(barrier, phase & 1)` returns
once that phase is complete, and a new barrier counts as if phase 1 were. For every ring of buffers there are
two barriers a stage: `ready`, which the copy engine completes, and `free`, which the readers do.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed in Triton 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(descriptor, coordinates, source, _semantic=None):
    """Adds a tile in shared memory to global memory: tma.async_atomic_add in Triton 3.9, missing in 3.6."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


@gluon.jit
def wait_until_read():
    """Waits until this warp's TMA stores and additions have read their shared memory."""
    tma.store_wait(0)


@gluon.jit
def wait_until_added():
    """Waits until this warp's TMA stores and additions are in global memory; returns 1, for a use that must
    come after. In assembly, as Triton 3.6 only waits for the reads. One lane issued them; all lanes wait."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r",
        [1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def after_others(number):
    """The number, which others raised: what this warp adds from now on comes after what they had added."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def zero_here():
    """0, but the compiler cannot know it: what is computed from it stays where it is.

    A matrix product takes a 64-bit address for every 16 columns. If a buffer does not change, the compiler
    computes its addresses once, before the loop, and then has no registers to keep them in.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give(number, at):
    """Stores a number in shared memory, from a partition of one warp."""
    at.store(gl.full([1], number, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def given(at, WARPS: gl.constexpr):
    """The number there, for a partition of WARPS warps."""
    return gl.max(at.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def stage_and_phase(step):
    """Of a step, with two buffers; no division, which takes registers where numbers may be negative."""
    return step & 1, (step >> 1) & 1


@gluon.jit
def tile_and_head(number, heads, tiles, section):
    """Tile and head (or group of heads) of a piece of work.

    `section` heads at a time run through the whole list, so that their keys stay in the L2 cache; within a
    section all heads of the heaviest tile come first.
    """
    before = number // (tiles * section)
    width = gl.minimum(section, heads - before * section)
    rest = number - before * tiles * section
    return rest // width, before * section + rest % width


@gluon.jit
def item_blocks(items, item, TOKENS: gl.constexpr):
    """First block of TOKENS tokens, and number of blocks, of an item of a key tile."""
    block = gl.load(items + item * 6) // TOKENS
    return block, (gl.load(items + item * 6 + 3) + TOKENS - 1) // TOKENS - block


@gluon.jit
def step_place(place, block, blocks, first_group, groups, HEADS_FIRST: gl.constexpr):
    """Block of tokens and group of heads of an item's step, counted by `place`: the last block first."""
    if HEADS_FIRST:  # decided when compiling
        return block + blocks - 1 - place % blocks, first_group + place // blocks
    else:
        return block + blocks - 1 - place // groups, first_group + place % groups


@gluon.jit
def store_rows(x, values, begin, end, first_row, heads, head, spare, DIM: gl.constexpr):
    """A consumer's rows begin ... end of one head of x (rows, heads, DIM), counted from `first_row`, in whole
    lines of memory: `spare`, as many rows x 64 of shared memory, brings these together, but has no room for
    float32."""
    ROWS: gl.constexpr = values.shape[0]
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if x.dtype.element_ty == gl.float32:
        store_columns(x, values, begin, end, first_row, heads, head, 0, DIM, whole)
    elif DIM == 64:
        spare.store(values.to(x.dtype.element_ty))
        store_columns(x, spare.load(lines), begin, end, first_row, heads, head, 0, DIM, lines)
    else:
        halves = values.to(x.dtype.element_ty).reshape([ROWS, 2, 64]).permute((0, 2, 1))
        left, right = gl.split(halves)
        spare.store(left)
        store_columns(x, spare.load(lines), begin, end, first_row, heads, head, 0, DIM, lines)
        spare.store(right)
        store_columns(x, spare.load(lines), begin, end, first_row, heads, head, 64, DIM, lines)


@gluon.jit
def store_columns(
    x, values, begin, end, first_row, heads, head, first, DIM: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    row = begin + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    col = first + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    at = ((first_row + row).to(gl.int64)[:, None] * heads + head) * DIM + col[None, :]
    gl.store(x + at, values, mask=(row < end)[:, None])
