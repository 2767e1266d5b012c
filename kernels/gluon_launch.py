"""Launches of the Gluon kernels. Head dims 64 and 128, bf16 and fp16, Hopper."""

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .configs import choose
from .gluon_backward import gluon_key_tile_kernel
from .gluon_forward import gluon_forward_kernel
from .schedule import Schedule
from .triton_launch import LOG2_E, aligned, query_tiles_pass, row_statistics, section, strides

HEAD_DIMS = (64, 128)
TILE = 128  # query rows of a program: two consumers of 64
FORWARD_STAGES = {64: 3, 128: 2}


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, scale: float) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq) float32."""
    check_head_dims(q, v)
    (q_tokens, q_heads, dim), (kv_tokens, kv_heads, v_dim) = q.shape, v.shape
    if kv_tokens == 0 or q_tokens == 0:
        return q.new_zeros(q_tokens, q_heads, v_dim), q.new_full((q_heads, q_tokens), torch.inf).float()
    block_n = 128
    q, k, v = (aligned(x) for x in (q, k, v))
    out = q.new_empty(q_tokens, q_heads, v_dim)
    lse = q.new_empty(q_heads, q_tokens, dtype=torch.float32)
    tiles = schedule.query_tiles(TILE)
    gluon_forward_kernel[(len(tiles) * q_heads,)](
        descriptor(q, TILE // 2),
        descriptor(k, block_n),
        descriptor(v, block_n),
        out,
        lse,
        tiles,
        schedule.bounds,
        len(tiles),
        q_tokens,
        q_heads,
        scale * LOG2_E,
        *out.stride()[:2],
        D=dim,
        DV=v_dim,
        BLOCK_N=block_n,
        STAGES=FORWARD_STAGES[max(dim, v_dim)],
        GROUP=q_heads // kv_heads,
        SECTION=section(k, v, q_heads // kv_heads),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, schedule: Schedule, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: dK and dV in Gluon, dQ by the Triton kernel."""
    check_head_dims(q, v)
    (q_tokens, q_heads, dim), (kv_tokens, kv_heads, v_dim) = q.shape, v.shape
    if kv_tokens == 0 or q_tokens == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q, k, v, out, dout = (aligned(x) for x in (q, k, v, out, dout))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    group = q_heads // kv_heads
    statistics = row_statistics(dout, out, lse, pack=1)
    tiles, items = schedule.key_tiles(TILE // 2, TILE)
    gluon_key_tile_kernel[(len(tiles) * kv_heads,)](
        descriptor(q, TILE // 2),
        descriptor(k, TILE // 2),
        descriptor(v, TILE // 2),
        descriptor(dout, TILE // 2),
        dk,
        dv,
        *(statistic_descriptor(x, q_tokens) for x in statistics),
        tiles,
        items,
        schedule.bounds,
        len(tiles),
        q_tokens,
        kv_heads,
        scale,
        scale * LOG2_E,
        *strides(dk, dv),
        D=dim,
        DV=v_dim,
        GROUP=group,
        SECTION=section(q, dout, 1, group),
        STAGES=2,
        num_warps=4,
        enable_fp_fusion=True,
    )
    config = choose("query_tiles", max(dim, v_dim), schedule.long, tma=True)
    query_tiles_pass(dout, q, k, v, dq, statistics, 1, schedule, scale, True, config)
    return dq, dk, dv


def statistic_descriptor(x: Tensor, q_tokens: int) -> TensorDescriptor:
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, [x.shape[0], q_tokens], [x.stride(0), 1], [1, TILE // 2], layout)


def descriptor(x: Tensor, tokens: int) -> TensorDescriptor:
    """Of (tokens, heads * dim), in blocks of `tokens` of one head, 128-byte swizzled as wgmma wants them."""
    dim = x.shape[2]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * dim], [x.stride(0), 1], [tokens, dim], layout)


def check_head_dims(q: Tensor, v: Tensor) -> None:
    if q.shape[2] not in HEAD_DIMS or v.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"the Gluon kernels have head dims {HEAD_DIMS}, got {q.shape[2]} for q and {v.shape[2]} for v"
        )
