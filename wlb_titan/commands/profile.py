"""`wlb-titan profile`: measure the attention op and all else on the device at hand, for planning.

A latency model of attention is fitted to the cases of a `Grid`: equal segments of many shapes. Most lengths
are no multiple of a tile's size, as the model averages its count of tiles over where segments start. Matrix
products, element-wise operators and all-gathers are for W_l (paper section 4.1, Figure 7).
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from wlb_titan import __version__
from wlb_titan.commands.command_line import Output, TomlFile, resolved_job, say, show_table
from wlb_titan.cost.profile import AttentionShape, Entry, LinearProfile, Profile, fitted
from wlb_titan.errors import UserError
from wlb_titan.kernels import record, varlen_attention
from wlb_titan.kernels.implementations import chosen, device_of
from wlb_titan.kernels.implementations import units as device_units
from wlb_titan.kernels.segments import Shape
from wlb_titan.kernels.self_check import make_inputs

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST = 1024  # elements of a head
ROUNDS = 3  # over all cases, spread in time, so that a passing disturbance does not reach the median
SECONDS = 100.0  # after which no round starts
MILLISECONDS = 40.0  # spent on a case in each round; its time is the median
HOST_BOUND = 2.0  # milliseconds of a pass: below, the host may take longer than the GPU
GATHERS = 20  # calls of each size; their median counts


class GridCase(NamedTuple):
    """`segments` equal segments in a row, each of `q_len` queries and `kv_len` keys of its own."""

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
    """The attention to measure: each number of queries with each number of keys that is not smaller."""

    q_lens: tuple[int, ...]
    """Queries of a segment; around multiples of 64 the steps between tiles show."""
    kv_lens: tuple[int, ...]
    """Keys of a segment; as many keys as queries are measured too."""
    keys: tuple[int, ...]
    """A case has as many segments as fit into this number of keys, but at least one."""
    pairs: int
    """Most pairs of a query and a key, times heads, in one call."""
    heads: int
    """Query heads, where nothing else decides them."""

    def cases(self, heads: int) -> Iterator[GridCase]:
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
    """Sizes at which the rest is measured."""

    tokens: tuple[int, ...]
    """Rows of an operand."""
    widths: tuple[int, ...]
    """Widths of a layer and its MLP; products are of tokens x width with width x width."""
    bytes_: tuple[int, ...]
    """What each rank brings to an all-gather."""


GPU_LINEAR = LinearGrid((2048, 8192), (1024, 2048, 4096, 8192), (1 << 18, 1 << 21, 1 << 24, 1 << 26))
CPU_LINEAR = LinearGrid((512, 2048), (256, 512, 1024), (1 << 14, 1 << 17, 1 << 20))


class HeadDims(click.ParamType):  # type: ignore[type-arg]
    """`128`, or `192/128` where values have another head dim than queries and keys."""

    name = "D[/DV]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        dims = str(value).split("/")
        if len(dims) > 2 or not all(dim.isdecimal() and 0 < int(dim) <= MOST for dim in dims):
            self.fail(
                f"{value!r} is no head dim, such as 128, nor two, such as 192/128, of at most {MOST}.",
                param,
                ctx,
            )
        return int(dims[0]), int(dims[-1])


@click.command()
@click.argument("file", type=TomlFile(), required=False, metavar="[FILE]")
@click.option(
    "--head-dim",
    type=HeadDims(),
    multiple=True,
    help="Of queries and keys, and of values if theirs is another; may be repeated.  [default: FILE's; 128]",
)
@click.option(
    "--group",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Query heads to a key head (grouped-query attention); may be repeated.  [default: FILE's; 1]",
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="[default: FILE's; or bfloat16 on a GPU, else float32]"
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="What is measured; auto is the GPU, where there is one.",
)
@click.option(
    "--output",
    type=Output(),
    required=True,
    metavar="FILE",
    help="Where the profile goes: JSON, for [wlb.sharding] profile.",
)
def profile(
    file: Path | None,
    head_dim: tuple[tuple[int, int], ...],
    group: tuple[int, ...],
    dtype: str | None,
    device: str,
    output: Path,
) -> None:
    """Measure the attention of FILE's model on this device and all else that a layer does, for planning.

    Times forward and backward of wlb_titan's attention for segments of many shapes, fits the latency model to
    them and writes both as JSON, with the implementation that was measured. Takes about two minutes on a GPU
    and one on the CPU, for each head dim and group. Then matrix products, element-wise operators and, between
    the GPUs of a machine, all-gathers. Nothing else should use the device meanwhile. On Hopper it first tries
    Gluon's backward pass and records for training what came of it (docs/kernels.md).
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here. Use --device cpu to profile the reference attention.")
    on_gpu = device == "cuda"
    shape = AttentionShape(dtype="bfloat16" if on_gpu else "float32")
    if file is not None:
        shape = resolved_job(file, (), None)[0].attention_shape
    dtype = dtype or shape.dtype
    head_dims = head_dim or ((shape.head_dim, shape.v_head_dim or shape.head_dim),)
    for dims in head_dims:
        _try_gluon(dims, DTYPES[dtype], torch.device(device))
    units = device_units(torch.device(device))
    entries: list[Entry] = []
    for dim, v_dim in head_dims:
        for heads_per_key in group or (shape.group,):
            entries += _measure(dim, v_dim, heads_per_key, dtype, device, units)
    ranks = torch.cuda.device_count() if on_gpu else 1
    rates = measure_linear(GPU_LINEAR if on_gpu else CPU_LINEAR, dtype, device, ranks)
    name = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    if on_gpu:
        name = torch.cuda.get_device_name()
    software = f"torch {torch.__version__}, wlb_titan {__version__}"
    result = Profile(name, units, software, tuple(entries), rates)
    result.save(output)
    _print_table(result)
    _print_rates(rates)
    click.echo(f"Wrote {output}")


def _try_gluon(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Tries Gluon's backward on this GPU, where `auto` would take it and nothing is recorded yet."""
    facts = device_of(device)
    if chosen("backward", "auto", dims, dtype, facts._replace(passed=frozenset({(dims, dtype)}))) != "gluon":
        return
    subject = record.subject(device, dims, dtype)
    found = record.verdict(subject)
    if found is None:
        say(f"Trying Gluon's backward on {subject}: some minutes, in a process of its own")
        found = record.tried(subject, device)
        device_of.cache_clear()
    say("Gluon's backward has passed" if found.passed else f"Triton's backward is taken: {found.reason}")


def _measure(dim: int, v_dim: int, group: int, dtype: str, device: str, units: int) -> list[Entry]:
    grid = GPU_GRID if device == "cuda" else CPU_GRID
    heads = -(-grid.heads // group) * group
    shape = Shape(heads, heads // group, dim, v_dim)
    measured = AttentionShape(dim, heads, group, dtype, v_head_dim=None if v_dim == dim else v_dim)
    cases = list(grid.cases(heads))
    rule = "auto", (dim, v_dim), DTYPES[dtype], device_of(torch.device(device))
    kinds = chosen("forward", *rule), chosen("backward", *rule)
    label = f"{measured.kind}, {' and '.join(dict.fromkeys(kinds))}"
    timed = partial(
        time_attention, shape=shape, dtype=DTYPES[dtype], device=device, milliseconds=MILLISECONDS
    )
    rounds: list[list[tuple[float, float]]] = []
    start = time.monotonic()
    while len(rounds) < ROUNDS and (not rounds or time.monotonic() - start < SECONDS):
        with click.progressbar(cases, label=f"{label}, round {len(rounds) + 1}") as bar:
            rounds.append([timed(case.rows()) for case in bar])
    return fitted(measured, cases, np.median(rounds, axis=0) / 1e3, units, kinds)


def _print_table(result: Profile) -> None:
    """Prints the main coefficients, in microseconds, and how well all of them fit the measurements."""
    say(f"{result.device}: microseconds of a query head on one unit")
    rows = []
    for entry in result.entries:
        cost, errors = entry.cost, np.abs(entry.errors(result.units))
        rows.append(
            {
                "D": entry.shape.dims,
                "group": str(entry.group),
                "dtype": entry.dtype,
                "pass": entry.direction,
                "by": entry.implementation,
                "tiles": f"{cost.tiling.query_tile}x{cost.tiling.key_block}",
                "launch": f"{cost.launch * 1e6:.3g}",
                "tile": f"{cost.tile * 1e6:.3g}",
                "block": f"{cost.block * 1e6:.3g}",
                "error": f"{np.median(errors):.1%}",
                "95 %": f"{np.quantile(errors, 0.95):.1%}",
            }
        )
    show_table(rows)


def _print_rates(measured: LinearProfile) -> None:
    click.echo(
        f"Matrix products and element-wise operators, {measured.dtype}: [gpu] linear_flops = "
        f"{measured.matrix_flops:.3g}, memory_bandwidth = {measured.element_bandwidth:.3g}"
    )
    if measured.link is not None:
        click.echo(
            f"All-gathers over {measured.ranks} GPUs: [node] bandwidth = {measured.link.bandwidth:.3g}, "
            f"latency = {measured.link.latency:.2g}"
        )


def time_attention(
    segments: Tensor,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    implementation: str = "auto",
    milliseconds: float = 200.0,
) -> tuple[float, float]:
    """Milliseconds of the forward and the backward of `varlen_attention`, tile lists already made; in CUDA
    graphs where a GPU would wait for the host."""
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


def time_call(call: Callable[[], object], device: str, milliseconds: float = 200.0) -> float:
    """Median milliseconds of a warmed-up call; on CUDA of seven or more, with the L2 cache cleared."""
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


def measure_linear(grid: LinearGrid, dtype: str, device: str, ranks: int) -> LinearProfile:
    """Times of all but attention, and of gathers where there are several `ranks`."""
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

    Each rank brings `sizes` bytes in turn. "cuda" is NCCL, with a device for each rank, and "cpu" gloo.
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
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    lines = []
    for size in sizes:
        mine = torch.zeros(size, dtype=torch.uint8, device=device)
        everything = torch.empty(size * ranks, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(GATHERS):
            dist.barrier()
            wait()
            start = time.perf_counter()
            dist.all_gather_into_tensor(everything, mine)
            wait()
            seconds.append(time.perf_counter() - start)
        lines.append(f"{size * (ranks - 1)} {float(np.median(seconds))!r}")
    if rank == 0:
        (Path(folder) / "points").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()
