"""Launches of the Triton kernels (triton_forward.py, triton_backward.py): shapes, TMA descriptors, grids."""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import Config, choose
from .options import Options, Saved
from .schedule import Schedule
from .triton_backward import key_tile_kernel, query_tile_kernel, statistics_kernel
from .triton_forward import forward_kernel

LOG2_E = math.log2(math.e)
L2_BYTES = 8 * 2**20  # of keys and values for one section of heads to keep in L2 (FlashAttention-3's figure)
STATISTICS_ROWS = 64
MIN_BLOCK = 16  # columns that a matrix product takes at least


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    options: Options,
    *,
    tma: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq) float32. tma: load by TMA (sm_90)."""
    (q_tokens, q_heads, dim), (kv_tokens, kv_heads, v_dim) = q.shape, v.shape
    tma = tma and k.numel() > 0  # nothing can be described of an empty tensor
    config = config or choose("forward", (dim, v_dim), tma)
    q, k, v = (aligned(x) for x in (q, k, v))
    out = q.new_empty(q_tokens, q_heads, v_dim)
    lse = q.new_empty(q_heads, q_tokens, dtype=torch.float32)
    tiles = schedule.query_tiles(config.block_m)
    if len(tiles) == 0:
        return out, lse
    forward_kernel[(len(tiles) * q_heads,)](
        **operand("q", q, config.block_m, tma),
        **operand("k", k, config.block_n, tma),
        **operand("v", v, config.block_n, tma),
        **result("out", out),
        lse=lse,
        tile_list=tiles,
        bounds=schedule.bounds,
        tiles=len(tiles),
        section=section(k, v, q_heads // kv_heads),
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
        q_heads=q_heads,
        scale_log2=options.scale * LOG2_E,
        GROUP=q_heads // kv_heads,
        TMA=tma,
        **head_dims(dim, v_dim),
        **tile_shape(config),
    )
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    schedule: Schedule,
    options: Options,
    *,
    tma: bool,
    key_config: Config | None = None,
    query_config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for those of the output and, unless None, of the log-sum-exp."""
    dims = saved.q.shape[2], saved.v.shape[2]
    tma = tma and saved.q.numel() > 0 and saved.k.numel() > 0  # nothing can be described of an empty tensor
    key_config = key_config or choose("key_tiles", dims, tma)
    query_config = query_config or choose("query_tiles", dims, tma)
    dout, q, k, v, out = (aligned(x) for x in (dout, saved.q, saved.k, saved.v, saved.out))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    statistics = row_statistics(dout, dlse, out, saved.lse)
    key_tiles_pass(dout, q, k, v, dk, dv, statistics, schedule, options, tma, key_config)
    query_tiles_pass(dout, q, k, v, dq, statistics, schedule, options, tma, query_config)
    return dq, dk, dv


def row_statistics(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, pack: int = 1
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp in base 2, and delta less dlse, both (Nq / pack, Tq * pack) float32.

    Rows are of whole 16 bytes, for TMA.
    """
    q_tokens, q_heads, v_dim = out.shape
    row_length = triton.cdiv(q_tokens * pack, 4) * 4  # TMA strides are multiples of 16 bytes
    lse_log2, delta = out.new_empty(2, q_heads // pack, row_length, dtype=torch.float32)
    if q_tokens > 0:
        statistics_kernel[(triton.cdiv(q_tokens, STATISTICS_ROWS), q_heads)](
            **result("out", out),
            **result("dout", dout),
            lse=lse,
            dlse=lse if dlse is None else dlse.contiguous(),
            lse_log2=lse_log2,
            delta=delta,
            q_tokens=q_tokens,
            row_length=row_length,
            DV=v_dim,
            BLOCK_DV=max(MIN_BLOCK, triton.next_power_of_2(v_dim)),
            BLOCK_M=STATISTICS_ROWS,
            PACK=pack,
            HAS_DLSE=dlse is not None,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return lse_log2, delta


def key_tiles_pass(dout, q, k, v, dk, dv, statistics, schedule, options, tma, config) -> None:
    """Fill dk and dv."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    lse_log2, delta = statistics
    row_length = lse_log2.shape[1]
    lists = schedule.key_tiles(config.block_m, config.block_n)
    tiles, items = lists.tiles, lists.items
    if len(tiles) == 0:
        return
    if tma:
        lse_log2, delta = (
            TensorDescriptor(x, [x.shape[0], q.shape[0]], [row_length, 1], [1, config.block_m])
            for x in (lse_log2, delta)
        )
    key_tile_kernel[(len(tiles) * kv_heads,)](
        **operand("q", q, config.block_m, tma),
        **operand("k", k, config.block_n, tma),
        **operand("v", v, config.block_n, tma),
        **operand("dout", dout, config.block_m, tma),
        **result("dk", dk),
        **result("dv", dv),
        lse_log2=lse_log2,
        delta=delta,
        row_length=row_length,
        tile_list=tiles,
        items=items,
        bounds=schedule.bounds,
        tiles=len(tiles),
        section=section(q, dout, 1, group),
        q_tokens=q.shape[0],
        kv_tokens=k.shape[0],
        kv_heads=kv_heads,
        scale=options.scale,
        scale_log2=options.scale * LOG2_E,
        GROUP=group,
        TRANSPOSED=config.transposed,
        TMA=tma,
        **head_dims(q.shape[2], v.shape[2]),
        **tile_shape(config),
    )


def query_tiles_pass(dout, q, k, v, dq, statistics, schedule, options, tma, config) -> None:
    """Fill dq."""
    q_heads, kv_heads = q.shape[1], k.shape[1]
    lse_log2, delta = statistics
    tiles = schedule.query_tiles(config.block_m)
    if len(tiles) == 0:
        return
    query_tile_kernel[(len(tiles) * q_heads,)](
        **operand("q", q, config.block_m, tma),
        **operand("k", k, config.block_n, tma),
        **operand("v", v, config.block_n, tma),
        **operand("dout", dout, config.block_m, tma),
        **result("dq", dq),
        lse_log2=lse_log2,
        delta=delta,
        row_length=lse_log2.shape[1],
        tile_list=tiles,
        bounds=schedule.bounds,
        tiles=len(tiles),
        section=section(k, v, q_heads // kv_heads),
        q_tokens=q.shape[0],
        kv_tokens=k.shape[0],
        q_heads=q_heads,
        scale=options.scale,
        scale_log2=options.scale * LOG2_E,
        GROUP=q_heads // kv_heads,
        TMA=tma,
        **head_dims(q.shape[2], v.shape[2]),
        **tile_shape(config),
    )


def aligned(x: Tensor) -> Tensor:
    """x itself if TMA can read it (heads dense and side by side, tokens 16 bytes apart), or else a copy.

    Keys and values side by side in one row, as context parallelism gathers them, need no copy.
    """
    if x.shape[1] == 1:
        x = x[:, 0].unsqueeze(1)  # whatever the stride from one head to the next was, there is no next
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) >= x.shape[1] * x.shape[2]
    fits = dense and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def operand(name: str, x: Tensor, tokens: int, tma: bool) -> dict[str, object]:
    """The arguments by which a kernel loads tiles of `tokens` x whole head dim of x: x, or its descriptors of
    both parts of the head dim, and strides (triton_common.load_rows).
    """
    dim = x.shape[2]
    block, rest = parts(dim)
    source, second = x, x if rest else None
    if tma:
        source = descriptor(x, tokens, block, padded=block > dim)
        second = descriptor(x, tokens, rest, padded=block + rest > dim) if rest else None
    return {
        name: source,
        f"{name}_rest": second,
        f"{name}_stride_t": x.stride(0),
        f"{name}_stride_h": x.stride(1),
    }


def descriptor(x: Tensor, tokens: int, columns: int, padded: bool) -> TensorDescriptor:
    """For tiles of so many columns of one head; three-dimensional if zeros are filled up."""
    if not padded:
        shape = [x.shape[0], x.shape[1] * x.shape[2]]
        return TensorDescriptor(x, shape, [x.stride(0), 1], [tokens, columns])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tokens, 1, columns])


def result(name: str, x: Tensor) -> dict[str, object]:
    """The arguments by which a kernel reads or writes x without TMA."""
    return {name: x, f"{name}_stride_t": x.stride(0), f"{name}_stride_h": x.stride(1)}


def parts(dim: int) -> tuple[int, int]:
    """The two powers of two, or one and 0, that hold a head dim in the fewest columns."""
    block = max(MIN_BLOCK, triton.next_power_of_2(dim))
    rest = max(MIN_BLOCK, triton.next_power_of_2(dim - block // 2))
    return (block // 2, rest) if rest < block // 2 else (block, 0)


def head_dims(dim: int, v_dim: int) -> dict[str, int]:
    (block_d, rest_d), (block_dv, rest_dv) = parts(dim), parts(v_dim)
    return {
        "D": dim,
        "BLOCK_D": block_d,
        "REST_D": rest_d,
        "DV": v_dim,
        "BLOCK_DV": block_dv,
        "REST_DV": rest_dv,
    }


def section(x: Tensor, y: Tensor, programs: int, group: int = 1) -> int:
    """Programs of one tile that run side by side: those of as many key heads as the L2 cache holds."""
    bytes_per_head = (x.shape[0] * (x.shape[2] + y.shape[2])) * x.element_size() * group
    heads = min(x.shape[1] // group, max(1, L2_BYTES // max(1, bytes_per_head)))
    return programs * heads


def tile_shape(config: Config) -> dict[str, object]:
    """What a configuration says to the compiler."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,  # the default up to Triton 3.9 and not after
    }
