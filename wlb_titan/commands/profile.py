"""`wlb-titan profile`: measure the attention op and all else on the device at hand, for planning.

A latency model of attention is fitted to the cases of a `Grid`: equal segments of many shapes. Most lengths
are no multiple of a tile's size, as the model averages its count of tiles over where segments start. Matrix
products and element-wise operators are for W_l (paper section 4.1, Figure 7).
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from wlb_titan import __version__
from wlb_titan.commands.command_line import Output, TomlFile, progress, say, show_table
from wlb_titan.commands.command_line import load as load_config
from wlb_titan.cost.profile import TILES_OF, AttentionShape, Entry, LinearProfile, Profile, fitted, rate
from wlb_titan.errors import UserError
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.implementations import PASSES, chosen, device_of, load
from wlb_titan.kernels.implementations import units as device_units
from wlb_titan.kernels.segments import Shape
from wlb_titan.kernels.self_check import make_inputs
from wlb_titan.progress import counted
from wlb_titan.runs import CONFIG_FILE, TRACES, open_run, read_trace
from wlb_titan.simulator import calibrate
from wlb_titan.simulator.measured import NAMES

ROUNDS = 3  # over all cases, spread in time, so that a passing disturbance does not reach the median
SECONDS = 100.0  # after which no round starts
MILLISECONDS = 40.0  # spent on a case in each round; its time is the median
HOST_BOUND = 2.0  # milliseconds of a pass: below, the host may take longer than the GPU


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

    q_lens: tuple[int, ...]  # queries of a segment; around multiples of 64 the steps between tiles show
    kv_lens: tuple[int, ...]  # keys of a segment; as many keys as queries are measured too
    keys: tuple[int, ...]  # a case has as many segments as fit into this number of keys, but at least one
    pairs: int  # most pairs of a query and a key, times heads, in one call
    heads: int  # query heads, where nothing else decides them

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


LINEAR_SIZES = {
    "cuda": ((2048, 8192), (1024, 2048, 4096, 8192)),
    "cpu": ((512, 2048), (256, 512, 1024)),
}
"""Tokens, and widths of a layer and its MLP: products are of tokens x width with width x width."""


@click.command()
@click.argument("files", type=TomlFile(path_type=Path), nargs=-1, metavar="FILE...")
@click.option(
    "--from",
    "run",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Fit the traced steps of this run instead.",
)
@click.option(
    "--output",
    type=Output('{"schema": '),
    metavar="FILE",
    help="File to write: JSON, for [wlb.context] profile.",
)
@click.option("--check", is_flag=True, help="Print how wrong FILEs' attention is on this device instead.")
def profile(files: tuple[Path, ...], run: Path | None, output: Path | None, check: bool) -> None:
    """Measure this device for planning: the attention of FILEs' models, matrix products, other operators.

    Times forward and backward of wlb_titan's attention for segments of many shapes, fits the latency model to
    them and writes both as JSON, with the implementation that was measured. Each kind of attention takes
    about two minutes on a GPU and one on the CPU. It then measures matrix products and element-wise
    operators. Keep the device otherwise idle.

    With --from, without FILEs, it fits a run's passes that wlb.trace_every measured instead: their fixed
    time, their time per token, and their time in attention.

    With --check it times nothing, and compares each implementation of attention that can run here with the
    reference in float32, on segments of many lengths: errors of the output, of the log-sum-exp and of
    gradients, norm over norm.
    """
    if bool(files) == bool(run):
        raise UserError(
            "Name the FILEs whose attention is to be measured, or the dump folder of a run, --from RUN."
        )
    if check == (output is not None) or (check and run):
        raise UserError("Name the file to write, --output, or --check FILEs; one of both.")
    if run is not None and output is not None:
        _from_run(run, output)
        return
    loaded = [load_config(file) for file in files]
    jobs = [each.job for each in loaded]
    on_cpu = any(each.config.wlb.device == "cpu" for each in loaded) or not torch.cuda.is_available()
    device = "cpu" if on_cpu else "cuda"
    if output is None:
        from wlb_titan.runtime.attention.implementation import kernel_errors

        for file, each in zip(files, loaded, strict=True):
            say(f"{file}: {each.job.attention_shape.kind}, errors against the reference")
            show_table([*kernel_errors(each.config, each.job, torch.device(device))])
        return
    shapes = {shape.kind: shape for shape in (job.attention_shape for job in jobs)}.values()
    units = device_units(torch.device(device))
    entries: list[Entry] = []
    for shape in shapes:
        entries += _measure(shape, device, units)
    rates = measure_linear(*LINEAR_SIZES[device], jobs[0].dtype, device)
    name = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    if not on_cpu:
        name = torch.cuda.get_device_name()
    software = f"torch {torch.__version__}, wlb_titan {__version__}"
    result = Profile(name, units, software, tuple(entries), rates)
    result.save(output)
    _print(result)
    click.echo(f"Wrote {output}")


def _from_run(folder: Path, output: Path) -> None:
    run = open_run(folder, str(folder))
    loaded = load_config(folder / CONFIG_FILE)
    job = loaded.told(loaded.job)
    steps = run.traced[1:] or run.traced  # the first has caches to fill
    traced = [p for step in steps for p in read_trace(folder / TRACES / f"step-{step}.json")]
    passes = [p for p in traced if p.kind in NAMES]
    if not passes or not all(calibrate.PARTS in p.facts for p in passes):
        raise UserError(f"{folder}: no traces to fit. Train some steps with wlb.trace_every = 2.")
    if any(p.facts.get(calibrate.JOB) != calibrate.fingerprint(job) for p in passes):
        raise UserError(
            f"{folder}: its traces are of another job or cluster than its {CONFIG_FILE} gives here. Move "
            f"older {TRACES} away, or name the cluster that it ran on with wlb.cluster in that file."
        )
    parts, seconds = calibrate.measurements(passes)
    before = calibrate.as_predicted(job)
    factors, known = calibrate.fit(parts, seconds, before), parts.any(axis=1)
    off = [np.median(np.abs((parts @ [*f, 1.0] / seconds - 1)[known])) for f in (before, factors)]
    experts = max(run.mean("busiest_expert_rank") or 1.0, 1.0)
    software = f"torch {torch.__version__}, wlb_titan {__version__}"
    calibrate.calibrated(job, factors, software, experts).save(output)
    forward, backward, *times = factors.tolist()
    say(
        f"A layer's pass takes {forward * 1e3:.3g} ms forward and {backward * 1e3:.3g} backward whatever its "
        f"tokens; attention {times[1]:.2f}x and {times[2]:.2f}x, all else {times[0]:.2f}x of predictions."
    )
    if experts > 1:
        say(f"The busiest rank's experts get {experts:.2f}x their share of the tokens; all wait for it.")
    say(f"Passes are off by {off[0]:.1%} before and {off[1]:.1%} now, at the median of {known.sum():,}.")
    say(f'Wrote {output}; predictions follow it with wlb.context.profile = "{output}"')


def _measure(shape: AttentionShape, device: str, units: int) -> list[Entry]:
    grid = GPU_GRID if device == "cuda" else CPU_GRID
    shape = replace(shape, heads=-(-grid.heads // shape.group) * shape.group)
    dtype = getattr(torch, shape.dtype)
    cases = list(grid.cases(shape.heads))
    rule = "auto", shape.both_dims, dtype, device_of(torch.device(device))
    kinds = [chosen(which, *rule) for which in PASSES]
    label = f"{shape.kind}, {' and '.join(dict.fromkeys(kinds))}"
    sizes = Shape(shape.heads, shape.heads // shape.group, *shape.both_dims)
    cuts = [load(kind).cuts(sizes, torch.device(device))[number] for number, kind in enumerate(kinds)]
    kernels = [(kind, TILES_OF[cut.tiles_of](*cut[1:])) for kind, cut in zip(kinds, cuts, strict=True)]
    timed = partial(time_attention, shape=sizes, dtype=dtype, device=device, milliseconds=MILLISECONDS)
    rounds: list[list[tuple[float, float]]] = []
    start = time.monotonic()
    while len(rounds) < ROUNDS and (not rounds or time.monotonic() - start < SECONDS):
        with progress() as report:
            bar = counted(cases, report, f"{label}, round {len(rounds) + 1}")
            rounds.append([timed(case.rows()) for case in bar])
    return fitted(shape, cases, np.median(rounds, axis=0) / 1e3, units, kernels)


def _print(result: Profile) -> None:
    """Prints how well the coefficients fit the measurements, and the rates for a cluster's file."""
    say(f"{result.device}: predicted beside measured times of attention")
    rows = []
    for entry in result.entries:
        half, most = np.quantile(np.abs(entry.errors(result.units)), [0.5, 0.95])
        measured = {"attention": entry.shape.kind, "pass": entry.direction, "by": entry.implementation}
        rows.append({**measured, "error": f"{half:.1%}", "95 %": f"{most:.1%}"})
    show_table(rows)
    assert result.linear is not None
    click.echo(
        f"Matrix products and element-wise operators, {result.linear.dtype}: [gpu] linear_flops = "
        f"{result.linear.linear_flops:.3g}, memory_bandwidth = {result.linear.memory_bandwidth:.3g}"
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
    attend = partial(varlen_attention, *leaves, segments, implementation=implementation)
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


def measure_linear(
    all_tokens: Sequence[int], widths: Sequence[int], dtype: str, device: str
) -> LinearProfile:
    """Times of all but attention."""
    matrices, elements = [], []
    with torch.no_grad():
        for tokens, width in itertools.product(all_tokens, widths):
            x, y = torch.randn(2, tokens, width, device=device, dtype=getattr(torch, dtype))
            for outer in widths:
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
    return LinearProfile(dtype, rate(matrices), rate(elements))
