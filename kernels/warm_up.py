"""Compiles all kernels that an attention layer can meet, before it meets them.

A kernel is compiled for a configuration (configs.py; in Gluon's backward, gluon_launch.Division) and never
for lengths. Which one a micro-batch takes depends on its segments: so short and long documents, and a few
queries of very long ones, are attended to, one, two, four ... until all multiprocessors have work without
splitting.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from . import dispatch
from .configs import LONG, choose
from .implementations import chosen, device_of
from .measure import Shape, make_inputs
from .options import Options, Saved

SHORT = 128  # tokens of three documents, whose keys are one tile
FEW = 128  # queries of a chunk
THREADS = 8  # that compile side by side


def warm_up(
    shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, int]]:
    """Launches every configuration of both passes; yields how many have been, of how many.

    shape: heads and head dims as a call of the op has them. options: of its calls; the scale does not matter.
    """
    found = configurations(shape, options, dtype, device)
    launches = {"forward": _forward, "backward": _backward}
    with ThreadPoolExecutor(THREADS) as pool:
        running = [
            pool.submit(launches[one[0]], segments, shape, options, dtype, device)
            for one, segments in found.items()
        ]
        for number, done in enumerate(as_completed(running), start=1):
            done.result()
            yield number, len(found)


def configurations(
    shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> dict[tuple, Tensor]:
    """All configurations, "forward" or "backward" first, each with segments that choose it; none where the
    reference computes everything.
    """
    dims, facts = (shape.dim, shape.v_dim), device_of(device)
    which = chosen(options.implementation, dims, dtype, facts)
    found: dict[tuple, Tensor] = {}
    if which == "reference":
        return found
    from .gluon_launch import HEADS_FIRST, division, multiprocessors
    from .schedule import schedule_of

    units = multiprocessors(device)
    for make, length in ((neighbours, SHORT), (documents, LONG), (chunk, HEADS_FIRST)):
        split, number = 2, 1
        while split > 1 and (length == SHORT or options.visibility.reach >= length):
            segments = make(number, length)
            tokens = int(segments[:, 1].sum()), int((segments[:, 2] + segments[:, 3]).max())
            schedule = schedule_of(segments, *tokens, device, options.visibility)
            split, number = 1, 2 * number
            if which == "triton":
                forward, *backward = (
                    choose(one, dims, schedule.long, facts.tma)
                    for one in ("forward", "key_tiles", "query_tiles")
                )
            else:
                forward, backward = None, division(schedule, shape.q_heads, shape.kv_heads, units)[:3]
                split = backward[0]
            found.setdefault(("forward", forward), segments)
            found.setdefault(("backward", *backward), segments)
    return found


def documents(number: int, length: int) -> Tensor:
    """Segments of so many whole documents, a token longer, which no tile is."""
    begins = torch.arange(number, dtype=torch.int32) * (length + 1)
    lengths = torch.full_like(begins, length + 1)
    return torch.stack([begins, lengths, begins, lengths], dim=1)


def neighbours(number: int, length: int) -> Tensor:
    """Segments of three times so many whole documents, three of which share a tile."""
    return documents(3 * number, length // 3 - 1)


def chunk(number: int, length: int) -> Tensor:
    """The segment of the last few queries of one document, as long as so many of those."""
    return torch.tensor([[0, FEW, 0, number * length]], dtype=torch.int32)


def _forward(
    segments: Tensor, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v, _ = make_inputs(segments, shape, dtype, str(device))
    dispatch.forward(q, k, v, segments, options)


def _backward(
    segments: Tensor, shape: Shape, options: Options, dtype: torch.dtype, device: torch.device
) -> None:
    """With a gradient of the log-sum-exp, as models with sinks have one, and without."""
    q, k, v, out = make_inputs(segments, shape, dtype, str(device))
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    for dlse in (None, lse):
        dispatch.backward(out, dlse, Saved(q, k, v, out, lse), segments, options)
