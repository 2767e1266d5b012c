"""What a race or a wrong layout of Gluon's backward would show in, on a GPU or emulated: the check of a job's
start; the same bits for any number of programs, one of which has none to race with, and in many launches. n
clean launches bound the rate of a race to 3 / n a launch (95 %)."""

import torch
from wlb_titan.kernels import op
from wlb_titan.kernels.gluon_launch import Division
from wlb_titan.kernels.implementations import units
from wlb_titan.kernels.segments import Options, Saved
from wlb_titan.kernels.self_check import KernelError, Noise, attend, compare, same

LAYOUTS = ((16, 16), (32, 8), (32, 4), (40, 8))  # query and key heads; groups of 1, 4, 8 and 5
PROGRAMS = (1, 2, 7, 64, 131, 132)
REPEATS = 300  # of the rich segments, in each way
SMALL_REPEATS = 2_000  # of some short documents, in each way


def try_way(noise: Noise, options: Options, want: dict, divided: Division, repeats: int) -> None:
    """Checks that a division is right, and repeats with any number of programs."""
    got = attend(noise, options, divided)
    compare(got, want, f"{divided}")
    for programs in PROGRAMS:
        fewer = options._replace(sm_margin=units(noise.q.device) - programs)
        same(got, attend(noise, fewer, divided), f"is computed by {programs} programs")
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
