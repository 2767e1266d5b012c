"""Which lengths micro-batches may have: any that parallelism can divide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtitan.components.loss import ChunkedLossWrapper

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def length_divisor(config: Trainer.Config) -> int:
    """What the length of a micro-batch must divide by.

    Every context-parallel rank holds the same number of tokens, in two chunks; sequence parallelism and the
    chunked loss divide those tokens further.
    """
    cp = config.parallelism.context_parallel_degree
    tp = config.parallelism.tensor_parallel_degree if config.parallelism.enable_sequence_parallel else 1
    chunks = config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1
    return math.lcm(config.wlb.packing.length_multiple, 2 * cp if cp > 1 else 1, cp * tp, cp * chunks)
