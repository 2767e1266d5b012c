"""Compiles all kernels that an attention layer can meet, before it meets them, and checks that they are right
on this device, repeat and end (docs/kernels.md).

A kernel is compiled for a configuration (triton_launch.Config; in Gluon's backward, gluon_launch.Division)
and never for lengths, so any few tokens will do.

Each way in which the backward may divide its work attends to the same noise, on segments that need all of it:
tiles that wait for many turns, several tiles a program, blocks that need no mask, short documents that share
tiles, padding, chunks that share keys; keys and values side by side in one row, as context parallelism
gathers them. New tensors are full of NaN, all rows are compared, and all is done twice for the same bits.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import op
from .implementations import REFERENCE, TABLE, load, units
from .segments import Options, Saved, Shape

FEW = torch.tensor([[0, 128, 0, 128]], dtype=torch.int32)  # segments to compile for
THREADS = 8  # that compile side by side
TOLERANCE = 1e-2  # of a whole tensor, norm over norm; rounding to bfloat16 leaves 0.003
ROW_TOLERANCE = 5e-2  # of any row of a token and head, over the larger of its norm and the mean row's
PATIENCE = 120.0  # seconds; a launch takes milliseconds, but others may have the GPU
LONG = (3000, 1, 5, 130, 4000, 777)
CHUNKS = ((300, 900), (400, 2500))  # queries and keys of two chunks of one document
SHORT = (300, 64, 9)  # repeated until all multiprocessors have some tiles
TILES = 4  # of 128 keys, for each program


class KernelError(Exception):
    """What the kernels compute on this device is wrong, differs when repeated, or does not end."""


class Noise(NamedTuple):
    q: Tensor
    k: Tensor  # side by side with v
    v: Tensor
    dout: Tensor
    dlse: Tensor | None  # (Nq, Tq) float32, the log-sum-exp's gradient, in models with sinks
    segments: Tensor

    @classmethod
    def on(
        cls, segments: Tensor, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> "Noise":
        q, k, v, dout = make_inputs(segments, shape, dtype, str(device), seed)
        widths = [x.shape[1] * x.shape[2] for x in (k, v)]
        both = torch.cat([k.flatten(1), v.flatten(1)], dim=1).split(widths, dim=1)
        k, v = (x.unflatten(1, like.shape[1:]) for x, like in zip(both, (k, v), strict=True))
        return cls(q, k, v, dout, dout[:, :, 0].float().T.contiguous(), segments)  # as good as any noise

    @classmethod
    def rich(cls, shape: Shape, dtype: torch.dtype, device: torch.device, scale: int = 1, seed: int = 0):
        return cls.on(rich_segments(shape.kv_heads, units(device), scale), shape, dtype, device, seed)

    @property
    def shape(self) -> Shape:
        return Shape(self.q.shape[1], self.k.shape[1], self.q.shape[2], self.v.shape[2])


def make_inputs(
    segments: Tensor, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q, k, v and output gradient, of as many tokens as the segments reach."""
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


def rich_segments(kv_heads: int, units: int, scale: int = 1) -> Tensor:
    """Segments for this number of key heads and multiprocessors; lengths are divided by `scale`."""
    rows, q, k = [], 0, 0

    def add(q_len: int, kv_len: int) -> None:
        nonlocal q, k
        rows.append([q, q_len, k, kv_len])
        q, k = q + q_len, k + kv_len

    for length in LONG:
        add(*[max(1, length // scale)] * 2)
        q, k = q + len(rows), k + 1  # padding
    for q_len, kv_len in CHUNKS:
        add(q_len // scale, kv_len // scale)
        k = rows[len(LONG)][2]
    k += CHUNKS[-1][1] // scale
    while k < TILES * units * 128 // (kv_heads * scale):
        for length in SHORT:
            add(*[max(1, length // scale)] * 2)
    return torch.tensor(rows, dtype=torch.int32)


def ways(noise: Noise, options: Options) -> list:
    """The divisions with which the backward may run, whatever the segments; [None] if it has no choice."""
    kernels = load(op.taken("backward", noise.q, noise.v, options, noise.dlse is not None))
    divisions = getattr(kernels, "divisions", lambda *_: [None])
    return divisions(noise.shape.q_heads, noise.shape.kv_heads, options.reach)


def warm_up(shape: Shape, options: Options, dtype: torch.dtype, device: torch.device, sinks=True) -> int:
    """Compiles every configuration of both passes, by a launch of each; returns how many there are."""
    noise = Noise.on(FEW, shape, dtype, device)
    q, k, v, dout, lse, _ = noise
    k, v = k.contiguous(), v.contiguous()

    def backward(divided: Any) -> None:
        for dlse in (None, lse)[: 1 + sinks]:
            op.backward(dout, dlse, Saved(q, k, v, dout, lse), FEW, options, divided)

    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(op.forward, q, k, v, FEW, options)]
        running += [pool.submit(backward, divided) for divided in ways(noise, options)]
        for launch in running:
            launch.result()
    return len(running)


def check_kernels(noise: Noise, options: Options) -> float:
    """Runs both passes twice in each of the backward's ways. Returns the largest error of an output or
    gradient, norm over norm; raises KernelError.

    The judge is that of the backward's implementation: of Gluon's Triton's, whose programs share nothing.
    """
    implementation = TABLE[op.taken("backward", noise.q, noise.v, options, noise.dlse is not None)]
    want = wanted(noise, options, implementation.judge)
    largest = 0.0
    for divided in ways(noise, options):
        got = attend(noise, options, divided)
        largest = max(largest, compare(got, want, f"{noise.shape.name}, {divided or 'undivided'}"))
        if implementation.repeats:
            same(got, attend(noise, options, divided), "is repeated")
    return largest


def errors_of(noise: Noise, options: Options) -> dict[str, float]:
    """The error of each result against the reference's in float32, norm over norm, in the worst of the
    backward's ways."""
    want = wanted(noise, options, REFERENCE)
    ran = [attend(noise, options, divided) for divided in ways(noise, options)]
    return {name: max(errors(got[name].float(), x.float())[0] for got in ran) for name, x in want.items()}


def attend(noise: Noise, options: Options, divided: Any = None) -> dict[str, Tensor]:
    """Output, log-sum-exp (0 for padding) and gradients, on memory full of NaN."""
    q, k, v, dout, dlse, segments = noise
    with poisoned():
        out, lse = op.forward(q, k, v, segments, options)
        saved = Saved(q, k, v, out, lse)
        dq, dk, dv = op.backward(dout, dlse, saved, segments, options, divided)
    _wait(q.device)
    lse = torch.where(torch.isposinf(lse), 0.0, lse).T  # of tokens, as all else
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def wanted(noise: Noise, options: Options, judge: str) -> dict[str, Tensor]:
    """The results of another implementation; the reference's in float32."""
    if judge == REFERENCE:
        wide = {name: getattr(noise, name).float() for name in ("q", "k", "v", "dout")}
        noise = noise._replace(**wide)
    return attend(noise, options._replace(implementation=judge))


def compare(got: dict[str, Tensor], want: dict[str, Tensor], where: str) -> float:
    """Largest error of a whole tensor, norm over norm. Raises KernelError if it or a row's is too large."""
    largest = 0.0
    for name, expected in want.items():
        whole, row = errors(got[name].float(), expected.float())
        if not (whole <= TOLERANCE and row <= ROW_TOLERANCE):  # nor is NaN
            raise KernelError(f"{name} is {whole:.2g} of its norm wrong, and {row:.2g} in one row ({where})")
        largest = max(largest, whole)
    return largest


def same(got: dict[str, Tensor], again: dict[str, Tensor], when: str) -> None:
    for name, x in got.items():
        if not torch.equal(x, again[name]):
            rows = int((x != again[name]).reshape(x.shape[0], -1).any(1).sum())
            raise KernelError(f"{name} differs in {rows} of {x.shape[0]} tokens when it {when}")


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Relative error of the whole, and the largest of a row (all dimensions but the last)."""
    got, want = (x.unsqueeze(-1) if x.dim() == 2 else x for x in (got, want))
    difference, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    usual = max(size.square().mean().sqrt().item(), 1e-6)
    whole = difference.norm() / max(size.norm().item(), 1e-6)
    return float(whole), float((difference / size.clamp(min=usual)).max())


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN until something writes them."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _wait(device: torch.device) -> None:
    if device.type != "cuda":
        return
    with op.current(device):
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + PATIENCE
        while not done.query():
            if time.monotonic() > end:
                raise KernelError(f"a launch has not ended after {PATIENCE:.0f} s")
            time.sleep(0.001)
