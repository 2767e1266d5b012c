"""Times on this device: attention of given segments, matrix products, element-wise operators, gathers.

`wlb-titan profile` and benchmarks/attention.py fit a latency model of attention to the cases of a `Grid`:
equal segments of many shapes. Most lengths are multiples of no tile's size, as the model counts tiles on
average over where segments begin. The rest is for W_l (paper section 4.1, Figure 7).
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from wlb_titan.cost.profile import LinearProfile
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.segments import Shape
from wlb_titan.kernels.self_check import make_inputs

ROUNDS = 3  # over all cases, some time apart: what disturbs the machine for a while does not reach the median
SECONDS = 100.0  # after which no further round is begun
MILLISECONDS = 40.0  # for which a case is run again and again in each round; its time is the median
HOST_BOUND = 2.0  # milliseconds of a pass: below, the host may take longer than the GPU
GATHERS = 20  # calls of each size; their median counts


class GridCase(NamedTuple):
    """`segments` equal segments, one after the other, of `q_len` queries and `kv_len` keys of their own."""

    q_len: int
    kv_len: int
    segments: int

    def rows(self) -> Tensor:
        """int32 (segments, 4), as the op takes them."""
        number = np.arange(self.segments)
        ones = np.ones_like(number)
        columns = (number * self.q_len, ones * self.q_len, number * self.kv_len, ones * self.kv_len)
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.int32))


class Grid(NamedTuple):
    """Which attention is measured: each number of queries with each number of keys that is not smaller.

    q_lens: queries of a segment; around multiples of 64 the steps between tiles show.
    kv_lens: keys of a segment; it is also measured with as many keys as queries.
    keys: a case has as many segments as fit into this number of keys, and one at least.
    pairs: most pairs of a query and a key, times heads, in one call.
    heads: query heads, where nothing else decides them.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    keys: tuple[int, ...]
    pairs: int
    heads: int

    def cases(self, heads: int) -> Iterator[GridCase]:
        """All cases with this number of query heads, each once."""
        for q_len in self.q_lens:
            for kv_len in sorted({q_len, *(k for k in self.kv_lens if k > q_len)}):
                most = self.pairs // (q_len * kv_len * heads)
                for segments in sorted({min(max(keys // kv_len, 1), most) for keys in self.keys} - {0}):
                    yield GridCase(q_len, kv_len, segments)


GPU_GRID = Grid(
    q_lens=(1, 50, 65, 129, 300, 700, 1500, 4000, 16000),
    kv_lens=(300, 1500, 6000, 24000, 96000),
    keys=(1, 2**18),  # one segment, for which there are more units than tiles, and many
    pairs=2**35,
    heads=32,
)
CPU_GRID = Grid(
    q_lens=(1, 16, 64, 128, 256, 257, 512, 1024),
    kv_lens=(128, 512, 2048),
    keys=(2**11, 2**12),
    pairs=2**24,
    heads=4,
)


class LinearGrid(NamedTuple):
    """Which sizes of the rest are measured.

    tokens: rows of an operand.
    widths: widths of a layer and its MLP; matrices are products of tokens x width with width x width.
    bytes_: that each rank brings to an all-gather.
    """

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    bytes_: tuple[int, ...]


GPU_LINEAR = LinearGrid((2048, 8192), (1024, 2048, 4096, 8192), (1 << 18, 1 << 21, 1 << 24, 1 << 26))
CPU_LINEAR = LinearGrid((512, 2048), (256, 512, 1024), (1 << 14, 1 << 17, 1 << 20))


def time_call(call: Callable[[], object], device: str, milliseconds: float = 200.0) -> float:
    """Median milliseconds of a call, warmed up, of seven samples at least. CUDA: by events, with the L2 cache
    cleared before each.
    """
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        once = do_bench(call, warmup=1, rep=1, return_mode="median")
        milliseconds = max(milliseconds, 7.5 * once)
        return float(do_bench(call, warmup=milliseconds / 4, rep=milliseconds, return_mode="median"))
    call()
    times: list[float] = []
    end = time.perf_counter() + milliseconds / 1e3
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def time_graph(call: Callable[[], object], device: str, calls: int = 20) -> float:
    """Milliseconds of a call on a GPU without the host's share: `calls` of them in one CUDA graph."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and sends the tile lists, which are kept for each stream
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        return time_call(graph.replay, device) / calls


def time_attention(
    segments: Tensor,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    implementation: str = "auto",
    milliseconds: float = 200.0,
) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward of `varlen_attention`, tile lists already made.

    Calls so short that a GPU would wait for the host are timed in CUDA graphs.
    """
    q, k, v, dout = make_inputs(segments, shape, dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend() -> Tensor:
        out: Tensor = varlen_attention(*leaves, segments, implementation=implementation)
        return out

    with torch.no_grad():
        forward = time_call(attend, device, milliseconds)
    out = attend()
    backward = time_call(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, milliseconds
    )
    if torch.device(device).type == "cuda" and min(forward, backward) < HOST_BOUND:
        with torch.no_grad():
            forward = time_graph(attend, device)
        backward = time_graph(lambda: torch.autograd.grad(attend(), leaves, dout), device) - forward
    return forward, backward


def measure_linear(grid: LinearGrid, dtype: str, device: str, ranks: int) -> LinearProfile:
    """Times of all but attention; of gathers too, where there are several `ranks`."""
    matrices, elements = [], []
    with torch.no_grad():
        for tokens in grid.tokens:
            for width in grid.widths:
                x, y = torch.randn(2, tokens, width, device=device, dtype=getattr(torch, dtype))
                for outer in grid.widths:
                    weight = torch.randn(outer, width, device=device, dtype=x.dtype)
                    took = time_call(partial(linear, x, weight), device, MILLISECONDS)
                    matrices.append((2.0 * tokens * width * outer, took / 1e3))
                for call, passes in (
                    (lambda x=x, y=y: x + y, 3),  # reads and writes of an operand's bytes
                    (lambda x=x: rms_norm(x, x.shape[-1:]), 2),
                    (lambda x=x, y=y: silu(x) * y, 5),
                ):
                    took = time_call(call, device, MILLISECONDS)
                    elements.append((float(passes * x.nbytes), took / 1e3))
    gathers = gather_points(grid.bytes_, device, ranks) if ranks > 1 else ()
    return LinearProfile(dtype, tuple(matrices), tuple(elements), tuple(gathers), ranks)


def gather_points(sizes: tuple[int, ...], device: str, ranks: int) -> list[tuple[float, float]]:
    """Bytes that each rank receives, and seconds, of all-gathers over `ranks` processes on this machine.

    Args:
        sizes: bytes that each rank brings.
        device: "cuda" (NCCL, a device a rank) or "cpu" (gloo).
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (sizes, device, ranks, folder)
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
        mine = torch.zeros(size, dtype=torch.uint8, device=device)
        everything = torch.empty(size * ranks, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(GATHERS):
            dist.barrier()
            _wait_for(device)
            start = time.perf_counter()
            dist.all_gather_into_tensor(everything, mine)
            _wait_for(device)
            seconds.append(time.perf_counter() - start)
        lines.append(f"{size * (ranks - 1)} {float(np.median(seconds))!r}")
    if rank == 0:
        (Path(folder) / "points").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
