"""One job of attention.py, in a process of its own: prints one JSON line for each row.

    python benchmarks/attention_job.py '{"kind": "check", "implementation": "gluon", "shape": [8, 1, 64, 64]}'
    compute-sanitizer --tool memcheck python benchmarks/attention_job.py '{"kind": "check", ..., "scale": 8}'

kind: "ceiling" (matrix product and copy), "warm" (compile, by running something small), "ends" (whether
launches of many tiles that wait for each other end at all), "check", "turns" (ours and FlashAttention-4 in
turns, twice), "time", "grid" (one round over the grid of the latency model) or "packs" (what its fit
is checked by).
device, scale (lengths are divided by it), skip (cases that are done): as attention.py sets them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attention_peers as peers
import torch
from attention_cases import Case, cases, flops, whole
from attention_grid import grid_cases, packs
from torch import Tensor
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.implementations import units
from wlb_titan.kernels.segments import Options, Shape, Visibility
from wlb_titan.kernels.self_check import Noise, check_kernels, compare, make_inputs, masks

from wlb_titan.commands.profile import MILLISECONDS, time_attention, time_call, time_graph

TINY_GROUPS = "e"  # cases so short that Python would be timed: CUDA graphs
MILLION = "a million tokens"
FA4 = ("FA4", "FA4, deterministic", "FA4, re-pack", "FA4, deterministic, re-pack")
PEERS = ("cuDNN dense", "varlen_attn", "varlen_attn, re-pack", "FlexAttention")
ROUNDS = 2  # of "turns": what differs between them is noise
HANGS_S = 5.0
STRADDLING = ((129, 2032), (257, 1020))  # length and number of documents that share their key tiles


def run(job: dict) -> Iterator[dict]:
    """The job's rows; the error of one case is its row's text and does not stop the rest."""
    device, scale, skip = job.get("device", "cuda"), job.get("scale", 1), set(job.get("skip", ()))
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter has no bfloat16
    if job["kind"] == "ceiling":
        yield {"case": "ceiling"} | ceilings(device)
        return
    shape, implementation = Shape(*job["shape"]), job["implementation"]
    if job["kind"] == "warm":
        for name, lengths in (("long", [4096 // scale]), ("short", [512 // scale] * 4)):
            yield {"case": name} | guarded(
                partial(warm, implementation, shape, whole(lengths), dtype, device)
            )
    elif job["kind"] == "ends":
        warm(implementation, shape, whole([512 // scale] * 4), dtype, device)
        for length, documents in STRADDLING:
            name = f"{documents:,} documents of {length}"
            if name not in skip:
                segments = whole([max(1, length // scale)] * max(1, documents // scale))
                yield {"case": name} | guarded(partial(ends, implementation, segments, shape, dtype, device))
    elif job["kind"] == "turns":
        for case in by_worth(cases(scale)):
            if case.group in job["groups"] and case.group not in TINY_GROUPS and case.name not in skip:
                yield {"case": case.name} | guarded(
                    partial(in_turns, job["names"], case, shape, dtype, device)
                )
    elif job["kind"] == "check":
        seed = time.time_ns() % 2**31
        for mask in masks(scale):
            if str(mask) not in skip:
                work = partial(check, implementation, mask, shape, dtype, device, scale, seed)
                yield {"case": str(mask)} | guarded(work)
        if device == "cuda" and (shape.q_heads, shape.dim) == (32, 128) and MILLION not in skip:
            yield {"case": MILLION} | guarded(partial(check_million, implementation, shape, device))
    elif job["kind"] == "grid":
        for cut in grid_cases(shape, device, scale):
            name = f"{cut.q_len} queries, {cut.kv_len} keys, {cut.segments} segments"
            if name not in skip:
                how = {"dtype": dtype, "device": device, "milliseconds": MILLISECONDS}
                work = partial(time_segments, implementation, cut.rows(), shape, **how)
                yield {"case": name, "cut": cut} | guarded(work)
    elif job["kind"] == "packs":
        for pack in packs(scale, job["seeds"]):
            how = {"dtype": dtype, "device": device}
            work = partial(time_segments, implementation, pack.segments, shape, **how)
            if pack.name not in skip:
                yield {"case": pack.name, "scale": scale} | guarded(work)
    else:
        for case in by_worth(cases(scale)):
            if case.group in job["groups"] and case.name not in skip and can_run(implementation, case):
                yield {"case": case.name} | guarded(
                    partial(measure, implementation, case, shape, dtype, device)
                )


def by_worth(found: list[Case]) -> list[Case]:
    """The first case of each group, then the second of each: the first of a group tells most."""
    rank = {}
    for case in found:
        rank[case.name] = sum(c.group == case.group for c in found[: found.index(case)])
    return sorted(found, key=lambda case: (rank[case.name], case.group))


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


def ends(implementation: str, segments, shape: Shape, dtype: torch.dtype, device: str) -> dict:
    """Forward and backward once. RuntimeError if they have not ended after `HANGS_S`: a turn never comes."""
    q, k, v, dout = make_inputs(segments, shape, dtype, device)
    out = varlen_attention(*(x.requires_grad_() for x in (q, k, v)), segments, implementation=implementation)
    out.backward(dout)
    if device == "cuda":
        ended, limit = torch.cuda.Event(), time.monotonic() + HANGS_S
        ended.record()
        while not ended.query():
            if time.monotonic() > limit:
                raise RuntimeError(f"not ended after {HANGS_S:.0f} s")
            time.sleep(0.01)
    return {}


def check(
    implementation: str,
    mask: Visibility,
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    scale: int,
    seed: int,
) -> dict:
    """The largest error in a job's own check, beside the reference. KernelError for what is wrong."""
    options, on = Options(shape.dim**-0.5, mask, implementation), torch.device(device)
    error = check_kernels(Noise.rich(shape, dtype, on, scale, seed), options, judge="reference")
    return {"wrong": [], "largest": error}


def check_million(implementation: str, shape: Shape, device: str, tokens: int = 2**20) -> dict:
    """A tensor of more than 2**32 elements: the last document of 1,024, forward and backward.

    Nothing before it is compared; the point is addresses that overflow 32 bits.
    """
    length = min(1024, tokens)
    segments = whole([length] * (tokens // length))
    q, k, v, dout = make_inputs(segments, shape, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, segments, implementation=implementation)
    names = ("out", "dq", "dk", "dv")
    got = dict(zip(names, (out, *torch.autograd.grad(out, leaves, dout)), strict=True))
    last = [x[-length:].detach().float().requires_grad_() for x in (q, k, v)]
    want = varlen_attention(*last, whole([length]), implementation="reference")
    wanted = (want, *torch.autograd.grad(want, last, dout[-length:].float()))
    ends = {name: x[-length:].detach() for name, x in got.items()}
    return {"wrong": [], "largest": compare(ends, dict(zip(names, wanted, strict=True)), MILLION)}


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
    if "re-pack" in implementation:
        return "rank" in case.name
    if implementation.startswith(("varlen_attn", "FA4")):  # keys cannot overlap: timed as if packed already
        return True
    return implementation != "FlexAttention" or case.group in "cd" or "of 8" in case.name


def make_call(implementation: str, case: Case, q, k, v) -> peers.Call:
    if implementation == "cuDNN dense":
        return peers.cudnn(q, k, v)
    if implementation == "FlexAttention":
        return peers.flex(case, q, k, v)
    if implementation.startswith("varlen_attn"):
        return peers.varlen(case, q, k, v, repack="re-pack" in implementation)
    if implementation.startswith("FA4"):
        return peers.fa4(
            case,
            q,
            k,
            v,
            deterministic="deterministic" in implementation,
            repack="re-pack" in implementation,
        )

    def call():
        return varlen_attention(q, k, v, case.segments, implementation=implementation)

    call.leaves = (q, k, v)
    return call


def measure(implementation: str, case: Case, shape: Shape, dtype: torch.dtype, device: str) -> dict:
    *tensors, dout = make_inputs(case.segments, shape, dtype, device)
    call = make_call(implementation, case, *(x.requires_grad_() for x in tensors))
    work = flops(case.segments, shape)
    if case.group in TINY_GROUPS and device == "cuda":
        with torch.no_grad():
            forward = time_graph(call, device)
        backward = time_graph(lambda: torch.autograd.grad(call(), call.leaves, dout), device) - forward
    else:
        with torch.no_grad():
            forward = time_call(call, device)
        backward = partial(torch.autograd.grad, call(), call.leaves, dout, retain_graph=True)
        backward = time_call(backward, device)
    row = {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": work / forward / 1e9,
        "backward_tflops": 2.5 * work / backward / 1e9,
        "both_tflops": 3.5 * work / (forward + backward) / 1e9,
    }
    return row | ({"mask_ms": time_call(call.build_mask, device)} if hasattr(call, "build_mask") else {})


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
        "units": units(torch.device(device)),
        "dtype": "bfloat16" if device == "cuda" else "float16",  # of all other jobs
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "matmul_tflops": 2 * n**3 / time_call(lambda: a @ b, device) / 1e9,
        "copy_tb_s": 2 * a.nbytes / time_call(lambda: target.copy_(b), device) / 1e9,
    }


if __name__ == "__main__":
    for row in run(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)
        if "not ended" in row.get("error", ""):
            os._exit(1)  # the GPU is still at it: leaving in any other way would wait for it
