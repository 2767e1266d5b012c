"""Predicted step times of orders of micro-batches, over those of the order in which they are packed.

Means of 100 draws of micro-batches with log-normal times (sigma 0.8), backward twice forward, on stages that
take equal times and without communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import show

from wlb_titan.pipeline.graph import PipelineGraph
from wlb_titan.pipeline.order import ORDERS, longest_first
from wlb_titan.pipeline.schedule import PipelineShape

CASES = [
    ("1F1B", 2, 1, 4),
    ("1F1B", 4, 1, 8),
    ("1F1B", 4, 1, 16),
    ("Interleaved1F1B", 4, 2, 8),
    ("ZBVZeroBubble", 4, 2, 8),
    ("GPipe", 4, 1, 8),
]
NAMES = ["longest first", "shortest first", "best"]
DRAWS = 100


def ratios() -> Iterator[dict[str, Any]]:
    for schedule, ranks, chunks, n in CASES:
        shape = PipelineShape(schedule, ranks, chunks)
        graph = PipelineGraph(shape, n)
        found = []
        for seed in range(DRAWS):
            forward = np.random.default_rng(seed).lognormal(0.0, 0.8, size=n)
            longest = longest_first(forward, 2 * forward)
            best = ORDERS.configure("best").make(shape).places(forward, 2 * forward)
            orders = np.stack([np.arange(n), longest, longest[::-1], best])
            times = graph.step_times(forward, 2 * forward, orders)
            found.append(times[1:] / times[0])
        means = dict(zip(NAMES, np.mean(found, axis=0), strict=True))
        yield {"case": f"{schedule}, {ranks} x {chunks}, {n}", **means}


if __name__ == "__main__":
    show({"schedule, ranks x chunks, n": "{case}", **{name: f"{{{name}:.3f}}" for name in NAMES}}, ratios())
