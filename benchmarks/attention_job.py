"""One job of attention.py, in a process of its own: prints one JSON line for each row.

    python benchmarks/attention_job.py '{"kind": "warm", "implementation": "gluon", "shape": [8, 1, 64, 64]}'

kind: "ceiling" (matrix product and copy), "warm" (compile, by running something small), "turns" (ours and
FlashAttention-4 in turns, twice), "time", "grid" (one round over the grid of the latency model) or "packs"
(what its fit is checked by).
device, scale (lengths are divided by it), skip (cases that are done): as attention.py sets them.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attention_peers as peers
import torch
from attention_cases import Case, cases, flops, grid_cases, packs, whole
from torch import Tensor
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.segments import Shape
from wlb_titan.kernels.self_check import make_inputs

from wlb_titan.commands.profile import MILLISECONDS, time_attention, time_call

FA4 = ("FA4", "FA4, deterministic", "FA4, re-pack", "FA4, deterministic, re-pack")
PEERS = ("cuDNN dense", "varlen_attn", "varlen_attn, re-pack")
ROUNDS = 2  # of "turns": what differs between them is noise


def run(job: dict) -> Iterator[dict]:
    """The job's rows; the error of one case is its row's text and does not stop the rest."""
    for row, work in works(job):
        if row["case"] not in job.get("skip", ()):
            yield row | guarded(work)


def works(job: dict) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """The begin of each row, and what measures the rest of it."""
    device, scale, kind = job.get("device", "cuda"), job.get("scale", 1), job["kind"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no bfloat16
    shape, name = Shape(*job["shape"]), job["implementation"]
    if kind == "ceiling":
        yield {"case": "ceiling"}, partial(ceilings, device)
    elif kind == "warm":
        for case, lengths in (("long", [4096 // scale]), ("short", [512 // scale] * 4)):
            yield {"case": case}, partial(warm, name, shape, whole(lengths), dtype, device)
    elif kind == "grid":
        how = {"dtype": dtype, "device": device, "milliseconds": MILLISECONDS}
        for cut in grid_cases(shape, device, scale):
            text = f"{cut.q_len} queries, {cut.kv_len} keys, {cut.segments} segments"
            yield {"case": text, "cut": cut}, partial(time_segments, name, cut.rows(), shape, **how)
    elif kind == "packs":
        how = {"dtype": dtype, "device": device}
        for pack in packs(scale):
            yield {"case": pack.name}, partial(time_segments, name, pack.segments, shape, **how)
    for case in cases(scale) if kind in ("turns", "time") else ():
        if case.group not in job["groups"]:
            continue
        if kind == "turns":
            yield {"case": case.name}, partial(in_turns, job["names"], case, shape, dtype, device)
        elif kind == "time" and can_run(name, case):
            yield {"case": case.name}, partial(measure, name, case, shape, dtype, device)


def guarded(work: Callable[[], dict]) -> dict:
    """What it returns, or its error; one that leaves the GPU unusable ends the process at the next call."""
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def warm(implementation: str, shape: Shape, segments, dtype: torch.dtype, device: str) -> dict:
    q, k, v, dout = make_inputs(segments, shape, dtype, device)
    out = varlen_attention(*(x.requires_grad_() for x in (q, k, v)), segments, implementation=implementation)
    out.backward(dout)
    return {}


def in_turns(names: list[str], case: Case, shape: Shape, dtype: torch.dtype, device: str) -> dict:
    """Forward and backward ms of each implementation that can run the case, by round: none has the machine in
    another state than the others, and a round differs from the next by noise alone.
    """
    found: dict[str, list] = {name: [] for name in names if can_run(name, case)}
    for _ in range(ROUNDS):
        for name, times in found.items():
            row = guarded(partial(measure, name, case, shape, dtype, device))
            times.append(row.get("error") or [row["forward_ms"], row["backward_ms"]])
    return {"times": found}


def can_run(implementation: str, case: Case) -> bool:
    if implementation == "cuDNN dense":
        return case.dense
    return "rank" in case.name or "re-pack" not in implementation


def make_call(implementation: str, case: Case, q, k, v) -> peers.Call:
    if implementation == "cuDNN dense":
        return peers.cudnn(q, k, v)
    if implementation.startswith("varlen_attn"):
        return peers.varlen(case, q, k, v, repack="re-pack" in implementation)
    if implementation.startswith("FA4"):
        deterministic = "deterministic" in implementation
        return peers.fa4(case, q, k, v, deterministic=deterministic, repack="re-pack" in implementation)

    def call():
        return varlen_attention(q, k, v, case.segments, implementation=implementation)

    call.leaves = (q, k, v)
    return call


def measure(implementation: str, case: Case, shape: Shape, dtype: torch.dtype, device: str) -> dict:
    *tensors, dout = make_inputs(case.segments, shape, dtype, device)
    call = make_call(implementation, case, *(x.requires_grad_() for x in tensors))
    work = flops(case.segments, shape)
    with torch.no_grad():
        forward = time_call(call, device)
    backward = time_call(partial(torch.autograd.grad, call(), call.leaves, dout, retain_graph=True), device)
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": work / forward / 1e9,
        "backward_tflops": 2.5 * work / backward / 1e9,
        "both_tflops": 3.5 * work / (forward + backward) / 1e9,
    }


def time_segments(implementation: str, segments: Tensor, shape: Shape, **how: Any) -> dict:
    times = time_attention(segments, shape, implementation=implementation, **how)
    return {"forward_ms": times[0], "backward_ms": times[1]}


def ceilings(device: str) -> dict:
    """What the device does at best: a square product of random numbers, and a copy (bytes read + written)."""
    n = 8192 if device == "cuda" else 256
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    target = torch.empty_like(a)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "matmul_tflops": 2 * n**3 / time_call(lambda: a @ b, device) / 1e9,
        "copy_tb_s": 2 * a.nbytes / time_call(lambda: target.copy_(b), device) / 1e9,
    }


if __name__ == "__main__":
    for row in run(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)
