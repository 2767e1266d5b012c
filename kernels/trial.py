"""The trial of Gluon's backward on a GPU, for record.py: all that a race or a wrong layout would show in.

    python -m wlb_titan.kernels.trial cuda:0 128 128 bfloat16

For several numbers of heads, which together pack and split in every way: self_check.py's comparison, with the
reference as judge; the same bits for any number of programs, one of which has no other to race with; the same
bits in many launches. n clean launches bound the rate of a race to 3 / n a launch (95 %).

Exit status 0: passed. 75: could not be tried. Any other: the last line says why it was refused.
"""

import os
import sys

import torch

from . import op
from .gluon_launch import Division
from .record import NOT_TRIED
from .segments import Options, Saved, Shape
from .self_check import KernelError, Noise, attend, compare, rich_segments, same, wanted, warm_up, ways

LAYOUTS = ((16, 16), (32, 8), (32, 4), (40, 8))  # query and key heads; groups of 1, 4, 8 and 5
PROGRAMS = (1, 2, 7, 64, 131, 132)
REPEATS = 300  # of the rich segments, in each way
SMALL_REPEATS = 2_000  # of some short documents, in each way


def make(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Raises KernelError where something is wrong."""
    options = Options(dims[0] ** -0.5, implementation="gluon")
    for seed, heads in enumerate(LAYOUTS):
        shape = Shape(*heads, *dims)
        print(f"{shape.name}: {warm_up(shape, options, dtype, device)} compiled", flush=True)
        noise = Noise.rich(shape, dtype, device, seed=seed)
        small = Noise.on(rich_segments(shape.kv_heads, 1, scale=16), shape, dtype, device)
        want = wanted(noise, options, "reference")
        for divided in ways(noise, options):
            print(f"{shape.name}: {divided}", flush=True)
            try_way(noise, options, want, divided, REPEATS)
            repeat(small, options, divided, SMALL_REPEATS)


def try_way(
    noise: Noise, options: Options, want: dict[str, torch.Tensor], divided: Division, repeats: int
) -> None:
    """Checks that a division is right, and repeats with any number of programs."""
    got = attend(noise, options, divided)
    compare(got, want, f"{divided}")
    for programs in PROGRAMS:
        same(got, attend(noise, options, divided, programs), f"is computed by {programs} programs")
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


def main(name: str, dim: str, v_dim: str, dtype: str) -> int:
    device = torch.device(name)
    try:
        torch.ones(1, device=device)
    except Exception as error:
        print(f"the GPU cannot be used beside this process: {error}".splitlines()[0])
        return NOT_TRIED
    try:
        make((int(dim), int(v_dim)), getattr(torch, dtype), device)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        # A launch may hang: leaving in any other way would wait for it.
        os._exit(NOT_TRIED if isinstance(error, torch.OutOfMemoryError) else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
