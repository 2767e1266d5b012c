"""Which lengths micro-batches may have.

Parallelism needs a divisor. Beyond it lengths are kept few, since each new one costs time: DTensor works out
the sharding of every operation anew, which takes seconds on meshes of three axes (benchmarks/new_lengths.py),
and a compiled model is compiled anew. Padding to a multiple costs half of it a micro-batch on average, in the
linear layers only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtitan.components.loss import ChunkedLossWrapper

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer

LENGTHS_PER_WINDOW = 64
"""Lengths up to the context window that micro-batches may have, if the user does not say it."""

COMPILED_LENGTHS_PER_WINDOW = 16
"""The same with torch.compile."""


def length_divisor(config: Trainer.Config) -> int:
    """What the length of a micro-batch must divide by.

    Every context-parallel rank holds the same number of tokens, in two chunks; sequence parallelism and the
    chunked loss divide those tokens further.
    """
    multiple = config.wlb.packing.length_multiple
    cp = config.parallelism.context_parallel_degree
    tp = config.parallelism.tensor_parallel_degree if config.parallelism.enable_sequence_parallel else 1
    chunks = config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1
    divisor = math.lcm(multiple or 1, 2 * cp if cp > 1 else 1, cp * tp, cp * chunks)
    if multiple is not None:
        return divisor
    lengths = COMPILED_LENGTHS_PER_WINDOW if config.compile.enable else LENGTHS_PER_WINDOW
    return coarser(divisor, config.training.seq_len, lengths)


def coarser(divisor: int, window: int, most: int) -> int:
    """A multiple of `divisor` that leaves at most `most` lengths up to the context window.

    It divides the window, too, if `divisor` does; otherwise `divisor` comes back as it is.
    """
    for lengths in range(most, 0, -1):
        if window % (divisor * lengths) == 0:
            return window // lengths
    return divisor
