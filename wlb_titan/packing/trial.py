"""A trial of a policy on the documents at hand: how balanced its first steps are, on a stream of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.plain import Plain
from wlb_titan.packing.policy import PackingPolicy
from wlb_titan.plan import imbalance_degree

if TYPE_CHECKING:
    from wlb_titan.job import Job

STEPS = 32
WARM_UP = 8  # steps in which queues fill
MOST_MICRO_BATCHES = 64  # so that a trial takes less than half a second


def mean_imbalance(policy: PackingPolicy, cost_model: CostModel) -> float:
    """The mean over some of the policy's next steps."""
    degrees = []
    for _ in range(WARM_UP + STEPS):
        works = policy.next().work(partial(workload, cost_model))
        degrees.append(imbalance_degree(works))
    return float(np.mean(degrees[WARM_UP:]))


def imbalance_of_plain(stream: DocumentStream, job: Job) -> float:
    """The mean imbalance of `plain` on these documents.

    Args:
        stream: left as it is; the trial reads another one from the beginning.
        job: at most 64 of its micro-batches are tried. With more of them `plain` is worse, not better.
    """
    few = replace(job, micro_batches=min(job.micro_batches, MOST_MICRO_BATCHES))
    return mean_imbalance(Plain(Plain.Config(), stream.anew(), few), job.cost_model)
