"""Are the kernels right on this device, and do they end? Asked before a job's first step.

Which GPU, driver and compiler a job meets cannot be known before, and a wrong gradient shows in no loss curve
for a long time. So every configuration that the job's segments can choose attends to noise once, and is
compared with the reference.
"""

import time
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import dispatch, reference
from .measure import Shape, make_inputs
from .options import Options, Saved
from .warm_up import configurations

ROWS = 64  # of a head that are compared together: what a kernel writes at once
TOLERANCE = 0.02  # rounding to bfloat16 leaves 0.003
PATIENCE = 120.0  # seconds; a launch takes milliseconds, but others may have the GPU

Place = tuple[slice, slice]  # tokens and heads of a tensor


class KernelError(Exception):
    """What the kernels compute on this device is wrong, or does not end."""


def check_kernels(shape: Shape, options: Options, dtype: torch.dtype, device: torch.device) -> float:
    """Runs both passes of every configuration, with a gradient of the log-sum-exp.

    shape: heads and head dims as a call of the op has them. options: of its calls.

    Returns the largest error of output and gradients in any ROWS rows of a head, over the norm of these rows.

    Raises KernelError if it is more than TOLERANCE, or if a launch has not ended after PATIENCE.
    """
    largest = 0.0
    # A forward and a backward that the same segments choose run together.
    for segments in dict.fromkeys(configurations(shape, options, dtype, device).values()):
        q, k, v, dout = make_inputs(segments, shape, dtype, str(device))
        dlse = dout[:, :, 0].float().T.contiguous()  # as good as any noise
        got = _both_passes(dispatch, q, k, v, dout, dlse, segments, options)
        _wait(device)
        for alone, queries, keys in _parts(segments, shape):
            given = q[queries], k[keys], v[keys], dout[queries], dlse[queries[::-1]]
            for name, want in _both_passes(reference, *given, alone, options).items():
                error = _error(got[name][keys if name in ("dk", "dv") else queries], want)
                if not error <= TOLERANCE:  # nor is NaN
                    _, q_len, _, kv_len = alone[0].tolist()
                    raise KernelError(
                        f"{name} is {error:.2g} of its norm away from the reference, in {ROWS} rows of a "
                        f"segment with {q_len} queries and {kv_len} keys ({shape.name})"
                    )
                largest = max(largest, error)
    return largest


def _parts(segments: Tensor, shape: Shape) -> Iterator[tuple[Tensor, Place, Place]]:
    """The first, the middle and the last segment, by themselves, and their queries and keys; a key head at a
    time, for the memory that the reference takes.
    """
    group = shape.q_heads // shape.kv_heads
    for index in sorted({0, len(segments) // 2, len(segments) - 1}):
        q_start, q_len, kv_start, kv_len = segments[index].tolist()
        alone = torch.tensor([[0, q_len, 0, kv_len]], dtype=torch.int32)
        for head in range(shape.kv_heads):
            queries = slice(q_start, q_start + q_len), slice(head * group, (head + 1) * group)
            yield alone, queries, (slice(kv_start, kv_start + kv_len), slice(head, head + 1))


def _both_passes(
    module: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    segments: Tensor,
    options: Options,
) -> dict[str, Tensor]:
    out, lse = module.forward(q, k, v, segments, options)
    gradients = module.backward(dout, dlse, Saved(q, k, v, out, lse), segments, options)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def _error(got: Tensor, want: Tensor) -> float:
    """Of (tokens, heads, dim), at worst over ROWS tokens of a head."""
    wrong, size = _norms(got.float() - want.float()), _norms(want.float())
    # What nearly cancels, or is not seen, is measured against what is usual.
    return float((wrong / size.clamp(min=0.1 * float(size.square().mean().sqrt()))).max())


def _norms(x: Tensor) -> Tensor:
    blocks = pad(x, (0, 0, 0, 0, 0, -len(x) % ROWS)).unflatten(0, (-1, ROWS))
    return torch.linalg.vector_norm(blocks, dim=(1, 3))


def _wait(device: torch.device) -> None:
    """Until the device has done what was launched on it."""
    if device.type != "cuda":
        return
    with dispatch.current(device):
        done = torch.cuda.Event()
        done.record()
        end = time.monotonic() + PATIENCE
        while not done.query():
            if time.monotonic() > end:
                raise KernelError(f"a launch has not ended after {PATIENCE:.0f} s")
            time.sleep(0.01)
