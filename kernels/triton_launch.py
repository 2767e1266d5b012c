"""Launches of the Triton kernels (triton_forward.py, triton_backward.py): tiles, TMA descriptors, grids.

Tile shapes and options depend on pass and head dim, never on lengths: those change every step, and each new
configuration is compiled. They were chosen by cross-compiling for sm_90 (registers, spills, shared memory,
programs per multiprocessor); docs/kernels.md has the figures.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .implementations import device_of
from .schedule import Schedule
from .segments import Options, Saved, Shape, aligned
from .tiles import Cut
from .triton_backward import key_tile_kernel, query_tile_kernel, statistics_kernel
from .triton_forward import forward_kernel

LOG2_E = math.log2(math.e)
L2_BYTES = 8 * 2**20  # of keys and values for one section of heads to keep in L2 (FlashAttention-3's figure)
STATISTICS_ROWS = 64
MIN_BLOCK = 16  # columns that a matrix product takes at least


class Config(NamedTuple):
    block_m: int  # rows of a query tile
    block_n: int  # keys of a block
    stages: int = 1
    warps: int = 8

    @property
    def arguments(self) -> dict[str, object]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,  # the default up to Triton 3.9 and not after
        }


class Configs(NamedTuple):
    forward: Config
    key_tiles: Config  # dK, dV
    query_tiles: Config  # dQ


LATENT = (192, 128)  # D and Dv of multi-head latent attention
HOPPER = {  # by D and Dv, or by the larger of them, rounded up
    64: Configs(Config(128, 128, 3), Config(128, 64, 2), Config(128, 128, 2)),
    96: Configs(Config(128, 128, 2), Config(128, 64, 2), Config(128, 64, 3)),
    128: Configs(Config(128, 128, 2), Config(128, 64, 2), Config(128, 64, 3)),
    LATENT: Configs(Config(128, 128, 2), Config(128, 64, 2), Config(128, 64, 2)),
    192: Configs(Config(128, 64, 2), Config(128, 64, 1), Config(128, 32, 2)),
    256: Configs(Config(128, 64, 2), Config(64, 32, 1), Config(128, 32, 2)),
}
# What fits at any head dim into the 99 KB of shared memory of sm_86 and sm_89, on which nothing was timed.
OTHERS = Configs(Config(64, 32, warps=4), Config(32, 32, warps=4), Config(32, 32, warps=4))


def choose(dims: tuple[int, int], tma: bool) -> Configs:
    """The configurations for D and Dv."""
    if not tma:
        return OTHERS
    if dims in HOPPER:
        return HOPPER[dims]
    return HOPPER[next(dim for dim in HOPPER if dim != LATENT and max(dims) <= dim)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options, *, tma: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) and log-sum-exp (Nq, Tq) float32. tma: loads by TMA (sm_90), by default where the
    device can."""
    tma = device_of(q.device).tma if tma is None else tma
    (q_tokens, q_heads, dim), (_, kv_heads, v_dim) = q.shape, v.shape
    config = choose((dim, v_dim), tma).forward
    q, k, v = (aligned(x) for x in (q, k, v))
    out = q.new_empty(q_tokens, q_heads, v_dim)
    lse = q.new_empty(q_heads, q_tokens, dtype=torch.float32)
    tiles = schedule.query_tiles(config.block_m)
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
    dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule, options: Options, *,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, given those of the output and, unless None, of the log-sum-exp."""
    tma = device_of(saved.q.device).tma if tma is None else tma
    configs = choose((saved.q.shape[2], saved.v.shape[2]), tma)
    dout, q, k, v, out = (aligned(x) for x in (dout, saved.q, saved.k, saved.v, saved.out))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    q_heads, kv_heads = q.shape[1], k.shape[1]
    lse_log2, delta = row_statistics(dout, dlse, out, saved.lse)
    row_length = lse_log2.shape[1]

    config = configs.key_tiles
    lists = schedule.key_tiles(config.block_m, config.block_n)
    by_step = [
        TensorDescriptor(x, [x.shape[0], q.shape[0]], [row_length, 1], [1, config.block_m]) if tma else x
        for x in (lse_log2, delta)
    ]
    key_tile_kernel[(len(lists.tiles) * kv_heads,)](
        **inputs(q, k, v, schedule, options, tma, config),
        **operand("dout", dout, config.block_m, tma),
        **result("dk", dk),
        **result("dv", dv),
        lse_log2=by_step[0],
        delta=by_step[1],
        row_length=row_length,
        tile_list=lists.tiles,
        items=lists.items,
        tiles=len(lists.tiles),
        section=section(q, dout, 1, q_heads // kv_heads),
        kv_heads=kv_heads,
        scale=options.scale,
    )

    config = configs.query_tiles
    tiles = schedule.query_tiles(config.block_m)
    query_tile_kernel[(len(tiles) * q_heads,)](
        **inputs(q, k, v, schedule, options, tma, config),
        **operand("dout", dout, config.block_m, tma),
        **result("dq", dq),
        lse_log2=lse_log2,
        delta=delta,
        row_length=row_length,
        tile_list=tiles,
        tiles=len(tiles),
        section=section(k, v, q_heads // kv_heads),
        q_heads=q_heads,
        scale=options.scale,
    )
    return dq, dk, dv


def cuts(shape: Shape, device: torch.device) -> tuple[Cut, Cut]:
    """Those of long segments; both kernels of the backward count as one."""
    configs = choose((shape.dim, shape.v_dim), device_of(device).tma)
    forward, backward = (Cut("queries", x.block_m, x.block_n) for x in (configs.forward, configs.query_tiles))
    return forward, backward


def row_statistics(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, pack: int = 1
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp in base 2, and delta less dlse, both (Nq / pack, Tq * pack or a little more) float32."""
    q_tokens, q_heads, v_dim = out.shape
    row_length = triton.cdiv(q_tokens * pack, 4) * 4  # TMA strides are multiples of 16 bytes
    lse_log2, delta = out.new_empty(2, q_heads // pack, row_length, dtype=torch.float32)
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
