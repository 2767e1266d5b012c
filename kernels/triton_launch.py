"""Launches of the Triton kernels (triton_forward.py, triton_backward.py): tiles, TMA descriptors, grids.

Tile shapes and options depend on pass and head dim, never on lengths: those change every step, and each new
configuration is compiled. They were chosen by cross-compiling for sm_90 (registers, spills, shared memory,
programs per multiprocessor); docs/kernels.md has the figures.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .schedule import Schedule
from .segments import Options, Saved
from .triton_backward import key_tile_kernel, query_tile_kernel, statistics_kernel
from .triton_forward import forward_kernel

LOG2_E = math.log2(math.e)
L2_BYTES = 8 * 2**20  # of keys and values for one section of heads to keep in L2 (FlashAttention-3's figure)
STATISTICS_ROWS = 64
MIN_BLOCK = 16  # columns that a matrix product takes at least

HEAD_DIMS = (64, 96, 128, 192, 256)  # the classes: the larger of D and Dv, rounded up
LATENT = (192, 128)  # and a class of its own: D and Dv of multi-head latent attention


@dataclass(frozen=True)
class Config:
    block_m: int  # rows of a query tile
    block_n: int  # keys of a block
    warps: int
    stages: int
    transposed: bool = False  # keys x rows scores in the key-tile pass

    @property
    def arguments(self) -> dict[str, object]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,  # the default up to Triton 3.9 and not after
        }


_HOPPER = {
    ("forward", 64): Config(128, 128, 8, 3),
    ("forward", 96): Config(128, 128, 8, 2),
    ("forward", 128): Config(128, 128, 8, 2),
    ("forward", LATENT): Config(128, 128, 8, 2),
    ("forward", 192): Config(128, 64, 8, 2),
    ("forward", 256): Config(128, 64, 8, 2),
    ("key_tiles", 64): Config(128, 64, 8, 2),
    ("key_tiles", 96): Config(128, 64, 8, 2),
    ("key_tiles", 128): Config(128, 64, 8, 2),
    ("key_tiles", LATENT): Config(128, 64, 8, 2),
    ("key_tiles", 192): Config(128, 64, 8, 1),
    ("key_tiles", 256): Config(64, 32, 8, 1),
    ("query_tiles", 64): Config(128, 128, 8, 2),
    ("query_tiles", 96): Config(128, 64, 8, 3),
    ("query_tiles", 128): Config(128, 64, 8, 3),
    ("query_tiles", LATENT): Config(128, 64, 8, 2),
    ("query_tiles", 192): Config(128, 32, 8, 2),
    ("query_tiles", 256): Config(128, 32, 8, 2),
}

# Smaller tiles for 100 KB of shared memory (sm_86, sm_89) and loads by cp.async (sm_80 too).
_AMPERE = {
    ("forward", 64): Config(128, 64, 4, 3),
    ("forward", 128): Config(128, 32, 4, 3),
    ("forward", 256): Config(64, 32, 4, 1),
    ("key_tiles", 64): Config(32, 128, 8, 2, transposed=True),
    ("key_tiles", 128): Config(32, 64, 4, 2, transposed=True),
    ("key_tiles", 256): Config(32, 32, 4, 1, transposed=True),
    ("query_tiles", 64): Config(64, 64, 4, 2),
    ("query_tiles", 128): Config(64, 32, 4, 2),
    ("query_tiles", 256): Config(32, 32, 4, 1),
}


def choose(which: str, dims: tuple[int, int], tma: bool) -> Config:
    """The configuration of a pass, "forward", "key_tiles" (dK, dV) or "query_tiles" (dQ), for D and Dv."""
    table = _HOPPER if tma else _AMPERE
    head_dim: object = dims
    if (which, dims) not in table:
        head_dim = next(d for d in HEAD_DIMS if max(dims) <= d and (which, d) in table)
    return table[which, head_dim]


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
    """Output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq) float32. tma: loads by TMA (sm_90)."""
    (q_tokens, q_heads, dim), (_, kv_heads, v_dim) = q.shape, v.shape
    tma = tma and k.numel() > 0  # nothing can be described of an empty tensor
    config = config or choose("forward", (dim, v_dim), tma)
    q, k, v = (aligned(x) for x in (q, k, v))
    out = q.new_empty(q_tokens, q_heads, v_dim)
    lse = q.new_empty(q_heads, q_tokens, dtype=torch.float32)
    tiles = schedule.query_tiles(config.block_m)
    if len(tiles) == 0:
        return out, lse
    forward_kernel[(len(tiles) * q_heads,)](
        **inputs(q, k, v, schedule, options, tma, config),
        **result("out", out),
        lse=lse,
        tile_list=tiles,
        tiles=len(tiles),
        section=section(k, v, q_heads // kv_heads),
        q_heads=q_heads,
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
    """Gradients of q, k and v, given those of the output and, unless None, of the log-sum-exp."""
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
    """Log-sum-exp in base 2, and delta less dlse, both (Nq / pack, Tq * pack or a little more) float32."""
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
    kv_heads = k.shape[1]
    lse_log2, delta = statistics
    row_length = lse_log2.shape[1]
    lists = schedule.key_tiles(config.block_m, config.block_n)
    if len(lists.tiles) == 0:
        return
    if tma:
        lse_log2, delta = (
            TensorDescriptor(x, [x.shape[0], q.shape[0]], [row_length, 1], [1, config.block_m])
            for x in (lse_log2, delta)
        )
    key_tile_kernel[(len(lists.tiles) * kv_heads,)](
        **inputs(q, k, v, schedule, options, tma, config),
        **operand("dout", dout, config.block_m, tma),
        **result("dk", dk),
        **result("dv", dv),
        lse_log2=lse_log2,
        delta=delta,
        row_length=row_length,
        tile_list=lists.tiles,
        items=lists.items,
        tiles=len(lists.tiles),
        section=section(q, dout, 1, q.shape[1] // kv_heads),
        kv_heads=kv_heads,
        scale=options.scale,
        TRANSPOSED=config.transposed,
    )


def query_tiles_pass(dout, q, k, v, dq, statistics, schedule, options, tma, config) -> None:
    q_heads = q.shape[1]
    lse_log2, delta = statistics
    tiles = schedule.query_tiles(config.block_m)
    if len(tiles) == 0:
        return
    query_tile_kernel[(len(tiles) * q_heads,)](
        **inputs(q, k, v, schedule, options, tma, config),
        **operand("dout", dout, config.block_m, tma),
        **result("dq", dq),
        lse_log2=lse_log2,
        delta=delta,
        row_length=lse_log2.shape[1],
        tile_list=tiles,
        tiles=len(tiles),
        section=section(k, v, q_heads // k.shape[1]),
        q_heads=q_heads,
        scale=options.scale,
    )


def inputs(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options, tma: bool, config: Config
) -> dict[str, object]:
    """The arguments that all passes have."""
    (block_d, rest_d), (block_dv, rest_dv) = parts(q.shape[2]), parts(v.shape[2])
    return {
        **operand("q", q, config.block_m, tma),
        **operand("k", k, config.block_n, tma),
        **operand("v", v, config.block_n, tma),
        "bounds": schedule.bounds,
        "q_tokens": q.shape[0],
        "kv_tokens": k.shape[0],
        "scale_log2": options.scale * LOG2_E,
        "GROUP": q.shape[1] // k.shape[1],
        "TMA": tma,
        "D": q.shape[2],
        "BLOCK_D": block_d,
        "REST_D": rest_d,
        "DV": v.shape[2],
        "BLOCK_DV": block_dv,
        "REST_DV": rest_dv,
        **config.arguments,
    }


def aligned(x: Tensor) -> Tensor:
    """x itself if TMA can read it (heads dense and side by side, tokens 16 bytes apart or a multiple, as
    where context parallelism gathers keys and values in one row), or else a copy."""
    if x.shape[1] == 1:
        x = x[:, 0].unsqueeze(1)  # whatever the stride from one head to the next was, there is no next
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) >= x.shape[1] * x.shape[2]
    fits = dense and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def operand(name: str, x: Tensor, tokens: int, tma: bool) -> dict[str, object]:
    """The arguments with which a kernel loads tiles of `tokens` x whole head dim of x: x, or descriptors of
    both parts of the head dim, and strides (triton_common.load_rows)."""
    dim = x.shape[2]
    block, rest = parts(dim)
    source, second = x, x if rest else None
    if tma:
        source = descriptor(x, tokens, block, padded=block > dim)
        second = descriptor(x, tokens, rest, padded=block + rest > dim) if rest else None
    return result(name, x) | {name: source, f"{name}_rest": second}


def descriptor(x: Tensor, tokens: int, columns: int, padded: bool) -> TensorDescriptor:
    """For tiles of `columns` columns of one head; three-dimensional if zeros are filled up."""
    if not padded:
        shape = [x.shape[0], x.shape[1] * x.shape[2]]
        return TensorDescriptor(x, shape, [x.stride(0), 1], [tokens, columns])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tokens, 1, columns])


def result(name: str, x: Tensor) -> dict[str, object]:
    """The arguments with which a kernel reads or writes x without TMA."""
    return {name: x, f"{name}_stride_t": x.stride(0), f"{name}_stride_h": x.stride(1)}


def parts(dim: int) -> tuple[int, int]:
    """The two powers of two, or one and 0, that hold a head dim in the fewest columns."""
    block = max(MIN_BLOCK, triton.next_power_of_2(dim))
    rest = max(MIN_BLOCK, triton.next_power_of_2(dim - block // 2))
    return (block // 2, rest) if rest < block // 2 else (block, 0)


def section(x: Tensor, y: Tensor, programs: int, group: int = 1) -> int:
    """Programs of one tile that run side by side: those of the key heads that the L2 cache holds."""
    bytes_per_head = (x.shape[0] * (x.shape[2] + y.shape[2])) * x.element_size() * group
    heads = min(x.shape[1] // group, max(1, L2_BYTES // max(1, bytes_per_head)))
    return programs * heads
