"""`plain`: the paper's data loader (Plain-4D, section 6.1). Documents in stream order fill one window after
another; nothing is balanced and nothing waits.

A document that a window's end cuts goes on in the next window as a new document. The paper drops its rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Interval

from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.arrivals import next_window
from wlb_titan.packing.policy import MOST_TOKENS, Packing, PackingPolicy, drafts
from wlb_titan.plan import imbalance_degree

if TYPE_CHECKING:
    from wlb_titan.job import Job


class Plain(PackingPolicy):
    """Documents fill windows of exactly `training.seq_len` tokens as they come (the paper's Plain-4D).

    Imbalance 1.14 to 1.45, delay 0, cut 10.3 % (docs/packing.md, as of all policies).
    """

    variable_length = False
    balances = False

    def __init__(self, config: Any, stream: DocumentStream, job: Job) -> None:
        self._stream = stream
        self._micro_batches = job.micro_batches

    def next(self) -> Packing:
        packs, lost = [], 0
        for _ in range(self._micro_batches):
            pieces, left_out = next_window(self._stream)
            lost += left_out
            packs.append(np.pad(pieces, ((0, 0), (0, 1))))  # DELAY is 0
        return Packing(drafts(packs), lost)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the stream's cursor is all there is

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Auto(Plain):
    """Whichever policy is predicted fastest on these documents; `plain` until it is chosen."""

    @dataclass(kw_only=True, slots=True)
    class Config(Plain.Config):
        max_length: Annotated[int, Interval(ge=2, le=2 * MOST_TOKENS)] | None = None
        """L_max of the policies that have one."""

    automatic = True


STEPS = 32
WARM_UP = 8  # steps before, in which queues fill
MOST_MICRO_BATCHES = 64  # of a trial, which so takes less than half a second


def for_trial(job: Job) -> Job:
    """The job with at most `MOST_MICRO_BATCHES`, equally many for each data-parallel rank: with more, `plain`
    is not better."""
    few = job.sample(MOST_MICRO_BATCHES)
    most = max(MOST_MICRO_BATCHES // few.replicas, 1) * few.replicas
    return replace(few, micro_batches=min(few.micro_batches, most), run=None)


def imbalances(config: PackingPolicy.Config, stream: DocumentStream, job: Job) -> tuple[float, float]:
    """The mean imbalance of a policy and that of `plain`, over STEPS steps of a trial, after WARM_UP others,
    on these documents, whose stream is left as it is."""
    few, works = for_trial(job), partial(workload, job.cost_model)
    means = []
    for tried in (config, Plain.Config()):
        policy = tried.make(stream.from_start(), few)
        degrees = [imbalance_degree(policy.next().work(works)) for _ in range(WARM_UP + STEPS)]
        means.append(float(np.mean(degrees[WARM_UP:])))
    return means[0], means[1]
