"""torch.compile for micro-batches whose lengths and documents change at every step.

torchtitan compiles each transformer block. The first length that a block meets is compiled as a constant, the
second with symbols for whatever changed, and that graph serves every further length. The documents of a
micro-batch are one tensor whose number of rows is a symbol from the start.
"""

from __future__ import annotations

import torch

from wlb_titan.runtime.compat import mark_unbacked


def documents_vary(segments: torch.Tensor) -> torch.Tensor:
    """The same tensor, (S, 4), whose number of rows S compiled code takes as a variable, also if it is 1."""
    mark_unbacked(segments, 0)
    return segments
