"""Launches of the Gluon kernels (head dims 64 and 128, bf16 and fp16, Hopper), and the sums of dQ.

The backward's sums of dQ are float32, in an order of their own, from which `dq_kernel` makes dQ. In this
order each thread of a consumer has its values side by side, and hands a step's dQ to the copy engine by
stores of 16 bytes that meet in no bank of shared memory. For 64 rows, `pack` heads of each token, they are
(half of D, 8 columns, warp, row of 8, lane of 4, row // 8 of the warp's 16, 2 columns).
"""

from math import log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_backward import gluon_backward_kernel
from .gluon_forward import gluon_forward_kernel
from .implementations import units
from .schedule import Schedule
from .segments import Options, Saved, Shape, aligned
from .tiles import Cut
from .triton_launch import LOG2_E, result, row_statistics

ROWS = 64  # of one of the forward's two consumers, and of a step of the backward
WIDTH = 128  # of a row of the sums of dQ
KEYS = 128  # of a block of the forward, and of a tile of the backward
PACK = 8  # most query heads in a tile of the forward, and in a step of the backward
LEAST_PACKED = 4  # in a step of the backward: packs of two spill registers in its loop
SECTION = 8  # key heads side by side: 132 multiprocessors leave each 16 programs, which read the same keys
HEADS_FIRST = 12_288  # mean keys from which the backward walks over one query head after the other
SIDE_BY_SIDE = 1 << 18  # tokens times query heads of the key heads whose backwards run side by side
MOST_SIDE_BY_SIDE = 16  # key heads


class Division(NamedTuple):
    """How the backward divides its work."""

    split: int  # parts of a key head's query heads, a program each
    pack: int  # heads in a step
    heads_first: bool  # over a segment's queries once for each head, not for all heads block by block
    section: int  # key heads that run side by side


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq) float32, the same for any number of programs."""
    (q_tokens, q_heads, dim), (_, kv_heads, v_dim) = q.shape, v.shape
    q, k, v = (aligned(x) for x in (q, k, v))
    out = q.new_empty(q_tokens, q_heads, v_dim)
    lse = q.new_empty(q_heads, q_tokens, dtype=torch.float32)
    group = q_heads // kv_heads
    pack = packed(group)
    tiles = schedule.query_tiles(2 * ROWS // pack)
    programs = most_programs(q.device, options)
    gluon_forward_kernel[(min(programs, len(tiles) * q_heads // pack),)](
        q=packed_descriptor(q, pack),
        k=descriptor(k, KEYS),
        v=descriptor(v, KEYS),
        **result("out", out),
        lse=lse,
        tile_list=tiles,
        taken=torch.zeros(1, dtype=torch.int32, device=q.device),
        bounds=schedule.bounds,
        tiles=len(tiles),
        section=min(kv_heads, SECTION) * (group // pack),
        q_tokens=q_tokens,
        q_heads=q_heads,
        scale_log2=options.scale * LOG2_E,
        D=dim,
        DV=v_dim,
        BLOCK_N=KEYS,
        GROUP=group,
        PACK=pack,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule, options: Options,
    divided: Division | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, given those of the output and, unless None, of the log-sum-exp."""
    q, k, v, out, lse = saved
    (q_tokens, q_heads, dim), (kv_tokens, kv_heads, v_dim) = q.shape, v.shape
    q, k, v, out, dout = (aligned(x) for x in (q, k, v, out, dout))
    group = q_heads // kv_heads
    programs = most_programs(q.device, options)
    divided = divided or division(schedule, q_heads, kv_heads, programs)
    split, pack, heads_first, section = divided
    lists = schedule.key_tiles(ROWS // pack, KEYS, turn_rows=ROWS // pack)
    tiles, items, first_turns, edges, *_ = lists
    lse_log2, delta = row_statistics(dout, dlse, out, lse, pack)
    dtype = torch.float32 if split > 1 else q.dtype
    dk = k.new_empty((split, *k.shape), dtype=dtype)
    dv = v.new_empty((split, *v.shape), dtype=dtype)
    sums = no_sums(q, pack, edges)
    turns = first_turns.expand(q_heads // pack, -1).clone()
    gluon_backward_kernel[(min(programs, len(tiles) * kv_heads * split),)](
        q=packed_descriptor(q, pack),
        k=descriptor(k, ROWS),
        v=descriptor(v, ROWS),
        dout=packed_descriptor(dout, pack),
        dk=dk,
        dv=dv,
        dq=described(sums, list(sums.shape), [WIDTH, 1], [dim // 4, WIDTH], swizzle=0),  # half a head
        lse_log2=row_descriptor(lse_log2, q_tokens * pack),
        delta=row_descriptor(delta, q_tokens * pack),
        tile_list=tiles,
        items=items,
        turns=turns,
        bounds=row_descriptor(schedule.packed_bounds(pack), q_tokens * pack),
        tiles=len(tiles),
        section=section * split,
        counters=turns.shape[-1],
        kv_tokens=kv_tokens,
        kv_heads=kv_heads,
        scale_log2=options.scale * LOG2_E,
        D=dim,
        DV=v_dim,
        GROUP=group,
        SPLIT=split,
        PACK=pack,
        HEADS_FIRST=heads_first,
        num_warps=4,
        enable_fp_fusion=True,
    )
    dq = gradient(sums, q, schedule.bounds, pack, options.scale)
    if split == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(0).to(k.dtype), dv.sum(0).to(v.dtype)


def packed(heads: int, least: int = 1) -> int:
    """How many of the query heads that share a key head to pack; one if fewer than `least` can be."""
    pack = min(PACK, heads & -heads)
    return pack if pack >= least else 1


def division(schedule: Schedule, q_heads: int, kv_heads: int, programs: int) -> Division:
    """What was fastest on an H100 (docs/kernels.md). Short documents want all heads at once, or a tile would
    wait for turns that heavier ones pass on only at the end of a head. Split groups pack no heads: their few
    tiles are long."""
    group = q_heads // kv_heads
    heads_first = group > 1 and schedule.mean_keys >= HEADS_FIRST
    pack = 1 if heads_first else packed(group, LEAST_PACKED)
    tokens = ROWS // pack
    lists = schedule.key_tiles(tokens, KEYS, turn_rows=tokens)
    split = parts(lists.heaviest, lists.steps * kv_heads / programs, group)
    if split > 1 or heads_first:
        return Division(split, 1, heads_first and split < group, min(kv_heads, SECTION))
    fits = 2 ** max(0, round(log2(SIDE_BY_SIDE / (schedule.key.q_tokens * group))))
    section = max(SECTION // group, min(fits, MOST_SIDE_BY_SIDE))
    return Division(1, pack, False, min(kv_heads, section))


def divisions(q_heads: int, kv_heads: int, reach: int) -> list[Division]:
    """What `division` may choose, whatever the segments, but for the section."""
    group, section = q_heads // kv_heads, min(kv_heads, SECTION)
    splits = [2**i for i in range(group.bit_length()) if group % 2**i == 0]
    ways = [Division(1, packed(group, LEAST_PACKED), False, section)]
    ways += [Division(split, 1, False, section) for split in splits[1:]]
    if reach >= HEADS_FIRST:
        ways += [Division(split, 1, True, section) for split in splits if split < group]
    return ways


def cuts(shape: Shape, device: torch.device) -> tuple[Cut, Cut]:
    group = shape.q_heads // shape.kv_heads
    pack = packed(group)
    forward = Cut("queries", 2 * ROWS // pack, KEYS, heads_per_tile=pack)
    return forward, Cut("keys", ROWS // packed(group, LEAST_PACKED), KEYS)


def parts(heaviest: int, mean: float, group: int) -> int:
    """Into how many parts to split a key head's query heads, so that no program takes longer than all
    multiprocessors together. Each part beyond the first writes dK and dV once more, in float32.

    heaviest: steps of the heaviest tile, for one key head. mean: steps of all tiles and key heads, for each
    multiprocessor. Returns a power of two that divides the group.
    """
    split = 1
    while heaviest > mean * split and group % (2 * split) == 0:
        split *= 2
    return split


def most_programs(device: torch.device, options: Options) -> int:
    """One for each multiprocessor not left to others: it fills the shared memory and stays to the end."""
    return max(units(device) - options.sm_margin, 1)


def row_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """For x (n, `rows` or more), 32 bits each, in blocks of one step's rows."""
    return described(x, [x.shape[0], rows], [x.stride(0), 1], [1, ROWS], swizzle=0)


def descriptor(x: Tensor, tokens: int) -> TensorDescriptor:
    """For x as (all tokens, heads * dim), in blocks of `tokens` of one head."""
    dim = x.shape[2]
    return described(x, [x.shape[0], x.shape[1] * dim], [x.stride(0), 1], [tokens, dim])


def packed_descriptor(x: Tensor, pack: int) -> TensorDescriptor:
    """For x (tokens, heads, dim), in blocks of one consumer's rows: `pack` heads of each token."""
    return described(x, list(x.shape), list(x.stride()), [ROWS // pack, pack, x.shape[2]])


def described(x: Tensor, shape: list, strides: list, block: list, swizzle: int = 128) -> TensorDescriptor:
    """Swizzled over 128 bytes, as wgmma wants its operands."""
    layout = NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=len(block)
    )
    return TensorDescriptor(x, shape, strides, block, layout)


def no_sums(q: Tensor, pack: int, edges: Tensor) -> Tensor:
    """Room for the sums of dQ, one block of 64 rows of q (Tq, Nq, D) after another: (n, WIDTH) float32, zero
    only in `edges`, int64 (e,), blocks of 64 / pack tokens."""
    tokens, heads, dim = q.shape
    blocks = triton.cdiv(tokens, ROWS // pack)
    shape = blocks * (heads // pack) * ROWS * dim // WIDTH, WIDTH
    sums = q.new_empty(shape, dtype=torch.float32)
    sums.view(blocks, -1).index_fill_(0, edges, 0)
    return sums


def gradient(sums: Tensor, q: Tensor, bounds: Tensor, pack: int, scale: float) -> Tensor:
    """dQ (Tq, Nq, D) from its sums, scaled, in the dtype of q; zero in rows without keys, whatever their
    sums. bounds: int32 (2, Tq) of `tiles.row_bounds`."""
    tokens, heads, dim = q.shape
    dq = q.new_empty(q.shape)
    dq_kernel[(triton.cdiv(tokens, ROWS // pack), heads // pack)](
        sums=sums,
        dq=dq,
        bounds=bounds,
        tokens=tokens,
        heads=heads,
        scale=scale,
        D=dim,
        PACK=pack,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return dq


@triton.jit(do_not_specialize=["tokens"])
def dq_kernel(sums, dq, bounds, tokens, heads, scale, D: tl.constexpr, PACK: tl.constexpr):
    """One block of 64 rows: 64 / PACK tokens, PACK heads of each."""
    block = tl.program_id(0).to(tl.int64) * (heads // PACK) + tl.program_id(1)
    values = tl.load(sums + block * (64 * D) + tl.arange(0, 64 * D))
    values = tl.reshape(values, (2, D // 16, 4, 8, 4, 2, 2))
    values = tl.reshape(tl.permute(values, (2, 5, 3, 0, 1, 4, 6)), (64, D)) * scale
    row = tl.arange(0, 64)
    token = tl.program_id(0) * (64 // PACK) + row // PACK
    head = tl.program_id(1) * PACK + row % PACK
    first = tl.load(bounds + token, mask=token < tokens, other=0)
    last = tl.load(bounds + tokens + token, mask=token < tokens, other=0)
    values = tl.where((first < last)[:, None], values, 0.0)
    at = (token.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dq + at, values.to(dq.dtype.element_ty), mask=(token < tokens)[:, None])
