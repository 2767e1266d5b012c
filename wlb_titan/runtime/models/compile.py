"""torch.compile for micro-batches whose lengths and documents change at every step.

torchtitan compiles each transformer block. The first length that a block meets is compiled as a constant, the
second with symbols for whatever changed, and that graph serves every further length. The documents of a
micro-batch are one tensor whose number of rows is a symbol from the start. What there are graphs of besides,
`allow_graphs` says.
"""

from __future__ import annotations

import torch

from wlb_titan.job import Job
from wlb_titan.runtime.compat import mark_unbacked


def allow_graphs(job: Job) -> None:
    """Lets compiled code have a graph for each set of collectives that a micro-batch may use.

    A micro-batch uses those that gather keys for which it has documents, and no others. torch gives up at its
    limit.
    """
    graphs = sum(2 ** (1 + len(shared.exchanging.moves)) for shared in job.merged.values())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)


def documents_vary(segments: torch.Tensor) -> torch.Tensor:
    """Marks a tensor (S, 4): compiled code takes its number of rows S as a variable, also if it is 1."""
    mark_unbacked(segments, 0)
    return segments
