"""The trial of Gluon's backward on a GPU, for record.py: all that a race or a wrong layout would show in.

    python -m wlb_titan.kernels.stress cuda:0 128 128 bfloat16

For several numbers of heads, which together pack and split in every way: self_check.py's comparison, with the
reference as judge; the same bits for any number of programs, one of which has no other to race with; the same
bits in many launches, and beside a kernel that holds multiprocessors. n clean launches bound the rate of a
race to 3 / n a launch (95 %).

Exit status 0: passed. 75: could not be tried. Any other: the last line says why it was refused.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from . import op
from .gluon_launch import Division
from .record import NOT_TRIED
from .segments import CAUSAL, Options, Saved, Shape
from .self_check import (
    KernelError,
    Noise,
    attend,
    compare,
    masks,
    rich_segments,
    same,
    wanted,
    warm_up,
    ways,
)

LAYOUTS = ((16, 16), (32, 8), (32, 4), (40, 8))  # query and key heads; groups of 1, 4, 8 and 5
PROGRAMS = (1, 2, 7, 64, 131, 132)
REPEATS = 300  # of the rich segments, in each way
SMALL_REPEATS = 30_000  # of some short documents, in all ways together
HELD = 16  # multiprocessors
HELD_NS = 20_000_000


def trial(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    options = Options(dims[0] ** -0.5, implementation="gluon")
    layouts = [Shape(*heads, *dims) for heads in LAYOUTS]
    for shape in layouts:
        for done, every in warm_up(shape, options, dtype, device):
            print(f"{shape.name}: {done} of {every} compiled", flush=True)
    for seed, shape in enumerate(layouts):
        noise = Noise.rich(shape, dtype, device, seed=seed)
        for mask in masks():
            masked = options._replace(visibility=mask)
            want = wanted(noise, masked, "reference")
            for divided in ways(noise, masked):
                print(f"{shape.name}: {mask}, {divided}", flush=True)
                try_way(noise, masked, want, divided, REPEATS if mask == CAUSAL else 1)
    small = [Noise.on(rich_segments(s.kv_heads, 1, scale=16), s, dtype, device) for s in layouts]
    every = [(noise, divided) for noise in small for divided in ways(noise, options)]
    for noise, divided in every:
        print(f"{noise.shape.name}: {divided}, again and again", flush=True)
        repeat(noise, options, divided, SMALL_REPEATS // len(every))


def try_way(
    noise: Noise, options: Options, want: dict[str, torch.Tensor], divided: Division, repeats: int
) -> None:
    """Checks that a division is right, and repeats with any number of programs and beside a kernel."""
    got = attend(noise, options, divided)
    compare(got, want, f"{options.visibility}, {divided}")
    for programs in PROGRAMS:
        same(got, attend(noise, options, divided, programs), f"is computed by {programs} programs")
    same(got, beside(noise.q.device, partial(attend, noise, options, divided)), "shares the GPU")
    repeat(noise, options, divided, repeats)


def repeat(noise: Noise, options: Options, divided: Division, times: int) -> None:
    """Raises KernelError unless the backward's bits, compared on the device, are always the same."""
    q, k, v, dout, dlse, segments = noise
    saved = Saved(q, k, v, *op.forward(q, k, v, segments, options))
    first = op.backward(dout, dlse, saved, segments, options, divided)
    differs = torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(times):
        again = op.backward(dout, dlse, saved, segments, options, divided)
        differs += torch.stack([(a != b).any() for a, b in zip(first, again, strict=True)]).any()
    if wrong := int(differs):
        raise KernelError(f"gradients differ in {wrong} of {times} launches ({divided})")


def beside(device: torch.device, work: Callable[[], dict]) -> dict:
    """Runs `work` while another kernel, launched before, holds HELD multiprocessors."""
    if device.type != "cuda":
        return work()
    other = torch.cuda.Stream(device)
    with torch.cuda.stream(other):
        begins = torch.empty(HELD, dtype=torch.int64, device=device)
        hold_kernel[(HELD,)](begins=begins, NANOSECONDS=HELD_NS, num_warps=32)
    found = work()
    torch.cuda.current_stream(device).wait_stream(other)
    return found


@triton.jit
def hold_kernel(begins, NANOSECONDS: tl.constexpr):
    """Each program holds a multiprocessor: the registers of its 32 warps leave no room for ours."""
    begin = globaltimer()
    while globaltimer() - begin < NANOSECONDS:
        pass
    tl.store(begins + tl.program_id(0), begin)


def main(arguments: list[str]) -> int:
    name, dim, v_dim, dtype = arguments
    device = torch.device(name)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        torch.ones(1, device=device)
    except Exception as error:
        print(f"the GPU cannot be used beside this process: {error}".splitlines()[0])
        return NOT_TRIED
    try:
        trial((int(dim), int(v_dim)), getattr(torch, dtype), device)
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0], flush=True)
        os._exit(NOT_TRIED)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        os._exit(1)  # a launch may hang: leaving in any other way would wait for it
    return 0


def _leave_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
