"""The time of the attention of given segments on this device, and how much work it is.

Used by benchmarks/attention.py, and meant for the latency table behind adaptive sharding (paper section 5.3).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .op import varlen_attention

HOST_BOUND = 2.0  # milliseconds of a pass: below, the host may take longer than the GPU


@dataclass(frozen=True)
class Shape:
    """Heads and head dims of one attention layer."""

    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        return f"D {dims}, {self.q_heads}:{self.kv_heads} heads"


def pairs(segments: Tensor) -> int:
    """How many (query, key) pairs the segments let meet."""
    q_len, kv_len = segments.numpy().astype(np.int64).T[[1, 3]]
    return int((q_len * kv_len - q_len * (q_len - 1) // 2).sum())


def flops(segments: Tensor, shape: Shape) -> int:
    """Operations of the forward's two products over the real mask; the backward's are 2.5 times that."""
    return 2 * pairs(segments) * shape.q_heads * (shape.dim + shape.v_dim)


def make_inputs(
    segments: Tensor, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q, k, v and output gradient, as many tokens as the segments reach."""
    q_start, q_len, kv_start, kv_len = segments.T
    q_tokens, kv_tokens = int((q_start + q_len).max()), int((kv_start + kv_len).max())
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device, dtype=dtype)

    return (
        normal(q_tokens, shape.q_heads, shape.dim),
        normal(kv_tokens, shape.kv_heads, shape.dim),
        normal(kv_tokens, shape.kv_heads, shape.v_dim),
        normal(q_tokens, shape.q_heads, shape.v_dim),
    )


def time_call(call: Callable[[], object], device: str, milliseconds: float = 200.0) -> float:
    """Median milliseconds of a call, warmed up, of seven samples at least. CUDA: by events, with the L2 cache
    cleared before each.
    """
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        once = do_bench(call, warmup=1, rep=1, return_mode="median")
        milliseconds = max(milliseconds, 7.5 * once)
        return do_bench(call, warmup=milliseconds / 4, rep=milliseconds, return_mode="median")
    call()
    times, end = [], time.perf_counter() + milliseconds / 1e3
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def time_graph(call: Callable[[], object], device: str, calls: int = 20) -> float:
    """Milliseconds of a call on a GPU without the host's share: `calls` of them in one CUDA graph."""
    stream = torch.cuda.Stream(device)
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
        return varlen_attention(*leaves, segments, implementation=implementation)

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
