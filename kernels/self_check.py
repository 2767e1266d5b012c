"""Compiles all kernels that an attention layer can meet, before it meets them, and checks them: are they
right on this device, do they repeat, and do they end?

A kernel is compiled for a configuration (configs.py; in Gluon's backward, gluon_launch.Division) and never
for lengths, so any few tokens will do.

Which GPU, driver and compiler a job meets cannot be known before, and a wrong gradient shows in no loss curve
for a long time. So every way in which the backward may divide its work attends to the same noise, on segments
that need all of it: tiles that wait for many turns, several tiles a program, blocks that need no mask, short
documents that share tiles, padding, chunks that share keys; keys and values side by side in one row, as
context parallelism gathers them. New tensors are full of NaN, all rows are compared, and everything is done
twice: the same bits.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from . import implementations
from .implementations import chosen, device_of
from .options import Options, Saved, Shape, make_inputs, units
from .segments import CAUSAL, Visibility

SEGMENTS = torch.tensor([[0, 128, 0, 128]], dtype=torch.int32)
THREADS = 8  # that compile side by side
TOLERANCE = 1e-2  # of a whole tensor, norm over norm; rounding to bfloat16 leaves 0.003
ROW_TOLERANCE = 5e-2  # of any row of a token and head, over its norm or the mean row's, whichever is more
PATIENCE = 120.0  # seconds; a launch takes milliseconds, but others may have the GPU
LONG = (3000, 1, 5, 130, 4000, 777)
CHUNKS = ((300, 900), (400, 2500))  # queries and keys of two chunks of one document
SHORT = (300, 64, 9)  # and these again, until all multiprocessors have some tiles
TILES = 4  # of 128 keys, for each program


class KernelError(Exception):
    """What the kernels compute on this device is wrong, differs when repeated, or does not end."""


class Given(NamedTuple):
    """What is attended to. k, v: side by side. dlse: (Nq, Tq) float32, the log-sum-exp's gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    segments: Tensor


def warm_up(
    shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, int]]:
    """Launches every configuration of both passes; yields how many have been, of how many.

    shape: heads and head dims as a call of the op has them. options: of its calls; the scale does not matter.
    """
    given = shape, options, dtype, device
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(_forward, *given)]
        running += [pool.submit(_backward, *given, how) for how in ways(*given)]
        for number, done in enumerate(as_completed(running), start=1):
            done.result()
            yield number, len(running)


def ways(shape: Shape, options: Options, dtype: torch.dtype, device: torch.device) -> list[dict]:
    """Keywords of implementations.backward for each way in which it may run, whatever the segments."""
    which = chosen("backward", options.implementation, (shape.dim, shape.v_dim), dtype, device_of(device))
    if which != "gluon":
        return [{}]
    from .gluon_launch import divisions

    every = divisions(shape.q_heads, shape.kv_heads, options.visibility)
    return [{"divided": divided} for divided in every]


def _forward(shape: Shape, options: Options, dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, _ = make_inputs(SEGMENTS, shape, dtype, str(device))
    implementations.forward(q, k, v, SEGMENTS, options)


def _backward(shape: Shape, options: Options, dtype: torch.dtype, device: torch.device, how: dict) -> None:
    """With a gradient of the log-sum-exp, as models with sinks have one, and without."""
    q, k, v, out = make_inputs(SEGMENTS, shape, dtype, str(device))
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    for dlse in (None, lse):
        implementations.backward(out, dlse, Saved(q, k, v, out, lse), SEGMENTS, options, **how)


def rich_segments(kv_heads: int, units: int, scale: int = 1) -> Tensor:
    """Segments for so many key heads and multiprocessors; lengths are divided by `scale`."""
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


def masks(scale: int = 1) -> list[Visibility]:
    """All kinds, windows divided by `scale`."""
    windows = [Visibility(window=max(1, window // scale)) for window in (130, 1024)]
    return [CAUSAL, *windows, Visibility(causal=False)]


def given(segments: Tensor, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Given:
    """Noise for these segments."""
    q, k, v, dout = make_inputs(segments, shape, dtype, str(device), seed)
    widths = [x.shape[1] * x.shape[2] for x in (k, v)]
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1).split(widths, dim=1)
    k, v = (x.unflatten(1, like.shape[1:]) for x, like in zip(both, (k, v), strict=True))
    return Given(q, k, v, dout, dout[:, :, 0].float().T.contiguous(), segments)  # as good as any noise


def attend(given: Given, options: Options, programs: int | None = None, **how) -> dict[str, Tensor]:
    """Output, log-sum-exp (0 for padding) and gradients, on memory full of NaN.

    programs, how: keywords of gluon_launch.forward and backward, where these run.

    Raises KernelError if a launch has not ended after PATIENCE.
    """
    q, k, v, dout, dlse, segments = given
    if programs is not None:
        how["programs"] = programs
    with poisoned():
        out, lse = implementations.forward(
            q, k, v, segments, options, **({} if programs is None else {"programs": programs})
        )
        saved = Saved(q, k, v, out, lse)
        dq, dk, dv = implementations.backward(dout, dlse, saved, segments, options, **how)
    _wait(q.device)
    lse = torch.where(torch.isposinf(lse), 0.0, lse).T  # of tokens, as all else
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def check_kernels(
    shape: Shape,
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
    *,
    segments: Tensor | None = None,
    judge: str | None = None,
    seed: int = 0,
) -> float:
    """Runs both passes in every way that the backward has, twice.

    shape: heads and head dims as a call of the op has them. options: of its calls. segments: rich ones unless
    told. judge: the implementation to compare with; unless told, Triton's for Gluon's backward, as its
    programs share nothing, and the reference for Triton's.

    Returns the largest error of an output or gradient, norm over norm.

    Raises KernelError if one is more than TOLERANCE, or ROW_TOLERANCE in any row, or differs when repeated,
    or if a launch has not ended after PATIENCE.
    """
    dims = shape.dim, shape.v_dim
    gluon = chosen("backward", options.implementation, dims, dtype, device_of(device)) == "gluon"
    segments = rich_segments(shape.kv_heads, units(device)) if segments is None else segments
    noise = given(segments, shape, dtype, device, seed)
    want = wanted(noise, options, judge or ("triton" if gluon else "reference"))
    largest = 0.0
    for how in ways(shape, options, dtype, device):
        got = attend(noise, options, **how)
        largest = max(largest, compare(got, want, f"{shape.name}, {how.get('divided', 'undivided')}"))
        same(got, attend(noise, options, **how), "is repeated")
    return largest


def wanted(given: Given, options: Options, judge: str) -> dict[str, Tensor]:
    """What another implementation says; the reference in float32."""
    if judge == "reference":
        q, k, v, dout, dlse, segments = given
        given = Given(q.float(), k.float(), v.float(), dout.float(), dlse, segments)
    return attend(given, options._replace(implementation=judge))


def compare(got: dict[str, Tensor], want: dict[str, Tensor], where: str) -> float:
    """The largest error of a whole tensor, norm over norm. Raises KernelError: see `check_kernels`."""
    largest = 0.0
    for name, expected in want.items():
        whole, row = errors(got[name].float(), expected.float())
        if not (whole <= TOLERANCE and row <= ROW_TOLERANCE):  # nor is NaN
            raise KernelError(f"{name} is {whole:.2g} of its norm wrong, and {row:.2g} in one row ({where})")
        largest = max(largest, whole)
    return largest


def same(got: dict[str, Tensor], again: dict[str, Tensor], when: str) -> None:
    """Raises KernelError unless all bits are the same."""
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
    """Until the device has done what was launched on it."""
    if device.type != "cuda":
        return
    with implementations.current(device):
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + PATIENCE
        while not done.query():
            if time.monotonic() > end:
                raise KernelError(f"a launch has not ended after {PATIENCE:.0f} s")
            time.sleep(0.001)
