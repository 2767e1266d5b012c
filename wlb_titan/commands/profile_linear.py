"""The time of everything but attention on this device: matrix products, element-wise operators, gathers.

`wlb-titan profile` measures them beside the attention, for W_l (paper section 4.1, Figure 7).
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import linear, rms_norm, silu

from wlb_titan.commands.profile_attention import time_call

Point = tuple[float, float]
GATHERS = 20  # calls of each size, of which the median counts


class LinearGrid(NamedTuple):
    """Which sizes are measured.

    tokens: rows of an operand.
    widths: widths of a layer and its MLP; matrices are products of tokens x width with width x width.
    bytes_: that each rank brings to an all-gather.
    """

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    bytes_: tuple[int, ...]


GPU_GRID = LinearGrid((2048, 8192), (1024, 2048, 4096, 8192), (1 << 18, 1 << 21, 1 << 24, 1 << 26))
CPU_GRID = LinearGrid((512, 2048), (256, 512, 1024), (1 << 14, 1 << 17, 1 << 20))


def matrix_points(grid: LinearGrid, dtype: torch.dtype, device: str, milliseconds: float) -> Iterator[Point]:
    """FLOPs and seconds of products of tokens x inner with inner x outer."""
    for tokens in grid.tokens:
        for inner in grid.widths:
            for outer in grid.widths:
                x = torch.randn(tokens, inner, device=device, dtype=dtype)
                weight = torch.randn(outer, inner, device=device, dtype=dtype)
                with torch.no_grad():
                    took = time_call(partial(linear, x, weight), device, milliseconds)
                yield 2.0 * tokens * inner * outer, took / 1e3


def element_points(grid: LinearGrid, dtype: torch.dtype, device: str, milliseconds: float) -> Iterator[Point]:
    """Bytes read and written, and seconds, of a residual, a norm and a gated activation."""
    for tokens in grid.tokens:
        for width in grid.widths:
            x, y = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
            for call, passes in (
                (lambda x=x, y=y: x + y, 3),
                (lambda x=x: rms_norm(x, x.shape[-1:]), 2),
                (lambda x=x, y=y: silu(x) * y, 5),
            ):
                with torch.no_grad():
                    took = time_call(call, device, milliseconds)
                yield float(passes * x.nbytes), took / 1e3


def gather_points(grid: LinearGrid, device: str, ranks: int) -> list[Point]:
    """Bytes that each rank receives, and seconds, of an all-gather over the devices of this machine.

    Args:
        grid: its `bytes_` count.
        device: "cuda" (NCCL, a device a rank) or "cpu" (gloo).
        ranks: processes, at least 2.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (grid.bytes_, device, ranks, folder)
        mp.spawn(_gather, args=arguments, nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        lines = (Path(folder) / "points").read_text().splitlines()
    return [(float(size), float(seconds)) for size, seconds in map(str.split, lines)]


def _gather(rank: int, sizes: tuple[int, ...], device: str, ranks: int, folder: str) -> None:
    """One rank of `gather_points`; the first writes what it measured."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    if device == "cuda":
        torch.cuda.set_device(rank)
    lines = []
    for size in sizes:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        everything = torch.empty(size * ranks, dtype=torch.uint8, device=device)
        took = sorted(_seconds(own, everything) for _ in range(GATHERS))[GATHERS // 2]
        lines.append(f"{size * (ranks - 1)} {took!r}")
    if rank == 0:
        path = Path(folder) / "points"
        path.write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(own: torch.Tensor, everything: torch.Tensor) -> float:
    dist.barrier()
    if own.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    dist.all_gather_into_tensor(everything, own)
    if own.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def devices(device: str) -> int:
    """Devices of this machine that a group can be made of: GPUs, or on the CPU one."""
    return torch.cuda.device_count() if device == "cuda" else 1
