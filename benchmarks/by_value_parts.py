"""The parts of by_value.py that need torch, Triton and numpy alone: kernels, products in float8, overlap.

    python benchmarks/by_value_parts.py PART FILE DEVICE [again]

A part yields its cases, each a name and what measures it. What has a row of that part and case in FILE,
without an error, is not measured again. On a CPU all is small, and the reference stands for the kernels.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from by_value import ROOT, rows_of, tell

sys.path.append(str(ROOT / "tests" / "kernels"))
if not find_spec("wlb_titan"):  # as it would be installed
    package = sys.modules["wlb_titan"] = ModuleType("wlb_titan")
    package.__path__ = [str(ROOT / "wlb_titan"), str(ROOT)]

from gluon_trial import LAYOUTS, REPEATS, SMALL_REPEATS, repeat, try_way
from oracle import packed, rows
from wlb_titan.kernels import op, self_check
from wlb_titan.kernels.implementations import PASSES, TABLE, chosen, device_of
from wlb_titan.kernels.segments import Options, Saved, Shape

Case = tuple[str, Callable[[], dict[str, Any]]]
GPU = sys.argv[3:4] == ["cuda"]
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
WINDOW = 65536 if GPU else 256
if not GPU:
    torch.set_num_threads(1)  # a second one would only wait for a core that others have
GROUPS = (1, 2, 4)  # of heads
PRODUCTS = {
    "q, k and v": (4096, 6144),
    "output": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
}
"""Features into and out of a layer of Llama 3 8B."""


def shape_of(q_heads: int, kv_heads: int) -> Shape:
    return Shape(q_heads, kv_heads, *((128, 128) if GPU else (16, 16)))


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of 0.3 s on a GPU, whose L2 cache is emptied before each call."""
    if GPU:
        from triton.testing import do_bench

        return do_bench(call, warmup=100, rep=300, return_mode="median")
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def trial() -> Iterator[Case]:
    """Gluon's backward ends, is right, and repeats by any number of programs, each way to divide it."""
    self_check.PATIENCE = 20.0
    options = Options(shape_of(1, 1).dim ** -0.5, implementation="gluon" if GPU else "reference")
    if refused := TABLE["gluon"].refuses("backward", (128, 128), DTYPE, device_of(DEVICE)) if GPU else None:
        yield "all", lambda: {"skipped": f"gluon {refused}"}
        return
    for length, documents in ((129, 2032), (257, 1020)):  # whose tiles wait for each other
        noise = self_check.Noise.on(
            packed([length] * (documents if GPU else 3)), shape_of(8, 2), DTYPE, DEVICE
        )
        yield f"documents of {length} end", partial(ends, noise, options)
    # The one in the docs first; in small it stands for the others, which tests/gpu tries.
    for heads in sorted(LAYOUTS, key=lambda heads: heads != (32, 4))[: None if GPU else 1]:
        shape, scale = shape_of(*heads), 1 if GPU else 20
        self_check.warm_up(shape, options, DTYPE, DEVICE)
        noise = self_check.Noise.rich(shape, DTYPE, DEVICE, scale, seed=LAYOUTS.index(heads))
        few = self_check.rich_segments(shape.kv_heads, 1, scale=16 if GPU else 160)
        small = self_check.Noise.on(few, shape, DTYPE, DEVICE)
        want = self_check.wanted(noise, options, "reference")
        for divided in self_check.ways(noise, options):
            yield f"{shape.name}, {divided}", partial(tried, noise, small, options, want, divided)


def ends(noise: self_check.Noise, options: Options) -> dict[str, Any]:
    self_check.warm_up(noise.shape, options, DTYPE, DEVICE)
    got = self_check.attend(noise, options)
    return {"wrong": self_check.compare(got, self_check.wanted(noise, options, "reference"), "ends")}


def tried(noise, small, options: Options, want: dict, divided: Any) -> dict[str, Any]:
    launches = (REPEATS, SMALL_REPEATS) if GPU else (2, 2)
    try_way(noise, options, want, divided, launches[0])
    repeat(small, options, divided, launches[1])
    return {"launches": sum(launches)}


def cases() -> dict[str, torch.Tensor]:
    lengths = (
        np.random.default_rng(0).lognormal(np.log(WINDOW / 32), 1.2, 200).astype(int).clip(16, WINDOW // 2)
    )
    lengths = lengths[lengths.cumsum() <= WINDOW]
    chunk = WINDOW // 16
    return {
        f"one document of {WINDOW:,}": packed([WINDOW]),
        f"{WINDOW:,} on rank 0 of 8": rows([0, chunk, 0, chunk], [chunk, chunk, 0, WINDOW]),
        f"{len(lengths)} documents, {lengths.sum():,} tokens": packed(lengths.tolist()),
    }


def times() -> Iterator[Case]:
    """Both passes of each implementation; Gluon's backward beside Triton's decides kernels/fastest.py."""
    for (name, segments), heads in (
        (case, heads) for heads in ((32, 4), (32, 32)) for case in cases().items()
    ):
        for implementation in ("gluon", "triton", "fa4", "torch") if GPU else ("reference", "torch_cpu"):
            shape, options = shape_of(*heads), Options(0.1, implementation=implementation)
            yield f"{name}, {shape.name}, {implementation}", partial(passes, segments, shape, options)


def passes(segments: torch.Tensor, shape: Shape, options: Options, groups: int = 1) -> dict[str, Any]:
    """Forward and backward, a launch for each group of heads."""
    try:
        for which in PASSES:
            chosen(which, options.implementation, (shape.dim, shape.v_dim), DTYPE, device_of(DEVICE))
    except ValueError as error:
        return {"skipped": str(error)}
    tensors = self_check.make_inputs(segments, shape, DTYPE, DEVICE.type)
    parts = list(zip(*(x.chunk(groups, dim=1) for x in tensors), strict=True))
    saved = [Saved(q, k, v, *op.forward(q, k, v, segments, options)) for q, k, v, _ in parts]

    def forward() -> None:
        for q, k, v, _ in parts:
            op.forward(q, k, v, segments, options)

    def backward() -> None:
        for part, (*_, dout) in zip(saved, parts, strict=True):
            op.backward(dout, None, part, segments, options)

    return {"forward_ms": milliseconds(forward), "backward_ms": milliseconds(backward)}


def groups() -> Iterator[Case]:
    """What launches for 2 and 4 groups of heads cost beside one."""
    shape = shape_of(32, 8)
    for (name, segments), number in ((case, number) for case in cases().items() for number in GROUPS):
        yield (
            f"{name}, {shape.name}, groups: {number}",
            partial(passes, segments, shape, Options(0.1), number),
        )


def float8() -> Iterator[Case]:
    """Rowwise float8 of forward and both gradients beside bfloat16, and what makes its operands."""
    for name, (wide, out) in PRODUCTS.items():
        tokens, wide, out = (16384, wide, out) if GPU else (64, wide // 64, out // 64)
        for which, sizes in {
            "forward": (tokens, wide, out),
            "dX": (tokens, out, wide),
            "dW": (out, tokens, wide),
        }.items():
            yield f"{name}, {which}, {'x'.join(map(str, sizes))}", partial(product, *sizes)


def rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def product(m: int, k: int, n: int) -> dict[str, Any]:
    a, b = (torch.randn(size, k, device=DEVICE, dtype=torch.bfloat16) for size in (m, n))
    quantised = torch.compile(rowwise) if GPU else rowwise
    (a8, scale_a), (b8, scale_b) = quantised(a), quantised(b)
    call = partial(torch._scaled_mm, a8, b8.T, scale_a, scale_b.T, out_dtype=torch.bfloat16)
    try:
        wrong = (call() - a @ b.T).float().norm() / (a @ b.T).float().norm()
    except RuntimeError as error:
        return {"skipped": str(error).partition("\n")[0]}
    made = milliseconds(lambda: (quantised(a), quantised(b)))
    return {
        "wrong": wrong.item(),
        "bfloat16_ms": milliseconds(lambda: a @ b.T),
        "float8_ms": milliseconds(call),
        "made_ms": made,
    }


def overlap() -> Iterator[Case]:
    """How much of an all-gather lies behind attention on two GPUs, by NCCL's stream of either priority."""
    for priority in (False, True) if GPU else (False,):  # gloo has none
        yield f"high priority {priority}", partial(beside, priority)


def beside(priority: bool) -> dict[str, Any]:
    if GPU and torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = str(int(priority))  # torch's own
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (folder,), nprocs=2)
        return json.loads((Path(folder) / "row.json").read_text())


def of_rank(rank: int, folder: str) -> None:
    """Four groups of heads, of which one attends while the keys of the next travel; rank 0 writes the row."""
    device = torch.device("cuda", rank) if GPU else DEVICE
    if GPU:
        torch.cuda.set_device(device)
    where = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
    dist.init_process_group("nccl" if GPU else "gloo", **where)
    shape, chunk = shape_of(8, 2), WINDOW // 4  # of a group
    segments = rows([0, chunk, 0, chunk], [chunk, chunk, 0, WINDOW])
    q, keys, *_ = self_check.make_inputs(segments, shape, DTYPE, device.type)
    own = torch.stack([keys, keys])[:, : WINDOW // 2].contiguous()  # keys and values

    def gathered() -> tuple[torch.Tensor, dist.Work]:
        both = own.new_empty(4, *own.shape[1:])
        return both, dist.all_gather_into_tensor(both, own, async_op=True)

    def step() -> None:
        coming = gathered()
        for last in (False, False, False, True):
            both, work = coming
            work.wait()
            coming = coming if last else gathered()
            with torch.profiler.record_function("attention"):
                op.forward(
                    q, *both.unflatten(0, (2, 2)).transpose(0, 1).flatten(1, 2), segments, Options(0.1)
                )

    for _ in range(3):
        step()
    took = milliseconds(step)
    with torch.profiler.profile() as trace:
        step()
        if GPU:
            torch.cuda.synchronize()
    travel, attention = [], []
    for event in trace.events():
        span = event.time_range.start, event.time_range.end
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if ("nccl" in event.name and on_gpu) if GPU else event.name.startswith("gloo:"):
            travel.append(span)
        elif (on_gpu and "Mem" not in event.name) if GPU else event.name == "attention":
            attention.append(span)
    behind = covered(travel) + covered(attention) - covered(travel + attention)
    row = {
        "step_ms": took,
        "travel_ms": covered(travel),
        "attention_ms": covered(attention),
        "behind_ms": behind,
    }
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def covered(spans: list[tuple[float, float]]) -> float:
    """Milliseconds in at least one of the spans, in microseconds."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def main() -> None:
    name, file, _, *again = sys.argv[1:]
    told = [row for row in rows_of(Path(file)) if row["part"] == name and "error" not in row]
    kept = [] if again else [row["case"] for row in told if "case" in row]
    gpu = torch.cuda.get_device_name() if GPU else ""
    tell(Path(file), {"part": name, "device": gpu or "cpu", "torch": torch.__version__})
    failed = False
    for case, measure in globals()[name]():
        if case in kept:
            continue
        try:
            row = measure()
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[-1]  # of another process its own
            row, failed = {"error": f"{type(error).__name__}: {text}"[:400]}, True
        tell(Path(file), {"part": name, "case": case} | row)
        if "has not ended" in row.get("error", ""):
            os._exit(3)  # nothing else will, either
    sys.exit(failed)


if __name__ == "__main__":
    main()
