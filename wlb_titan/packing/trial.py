"""How balanced a policy is on the documents at hand: its first steps, on a stream of its own."""

from __future__ import annotations

import numpy as np

from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import PackingPolicy
from wlb_titan.plan import LENGTH, imbalance_degree

STEPS = 32
WARM_UP = 8  # steps in which queues fill
MOST_MICRO_BATCHES = 64  # so that a trial takes less than half a second


def mean_imbalance(policy: PackingPolicy, cost_model: CostModel) -> float:
    """The mean over some of the policy's next steps."""
    degrees = []
    for _ in range(WARM_UP + STEPS):
        packs = policy.next().packs
        works = workload(cost_model, np.concatenate([pack[:, LENGTH] for pack in packs]))
        firsts = np.cumsum([0] + [len(pack) for pack in packs[:-1]])
        degrees.append(imbalance_degree(np.add.reduceat(works, firsts)))
    return float(np.mean(degrees[WARM_UP:]))


def imbalance_of_plain(stream: DocumentStream, micro_batches: int, cost_model: CostModel) -> float:
    """The mean imbalance of `plain` on these documents.

    Args:
        stream: left as it is; the trial reads another one from the beginning.
        micro_batches: N; at most 64 are tried. With more of them `plain` is worse, not better.
        cost_model: W_a + W_l.
    """
    plain = Plain(stream.anew(), micro_batches=min(micro_batches, MOST_MICRO_BATCHES), tail="carry")
    return mean_imbalance(plain, cost_model)
