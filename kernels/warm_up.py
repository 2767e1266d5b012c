"""Compiles all kernels that an attention layer can meet, before it meets them.

A kernel is compiled for a configuration (configs.py; in Gluon's backward, gluon_launch.Division) and never
for lengths, so any few tokens will do.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from . import implementations
from .implementations import chosen, device_of
from .inputs import Shape, make_inputs
from .options import Options, Saved

SEGMENTS = torch.tensor([[0, 128, 0, 128]], dtype=torch.int32)
THREADS = 8  # that compile side by side


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
