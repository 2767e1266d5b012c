"""`plain`: the paper's data loader (Plain-4D, section 6.1). Documents in stream order fill one window after
another; nothing is balanced and nothing waits.

A document that a window's end cuts goes on in the next window as a new document. The paper drops its rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval

from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.packing.arrivals import next_window
from wlb_titan.packing.policy import MOST_TOKENS, Ask, Packing, PackingPolicy, drafts
from wlb_titan.plan import imbalance_degree


class Plain(PackingPolicy):
    """Documents fill windows of exactly `training.seq_len` tokens as they come (the paper's Plain-4D).

    Imbalance 1.14 to 1.45, delay 0, cut 10.3 % (docs/packing.md, as of all policies).
    """

    variable_length = False
    balances = False

    def __init__(self, config: Any, stream: DocumentStream, ask: Ask) -> None:
        self._stream = stream
        self._micro_batches = ask.micro_batches

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
MOST_MICRO_BATCHES = 64  # of a trial, which takes less than half a second; with more, `plain` is not better


def imbalances(config: PackingPolicy.Config, stream: DocumentStream, ask: Ask) -> tuple[float, float]:
    """The mean imbalance of a policy and that of `plain`, over STEPS steps of a trial, after WARM_UP others,
    on these documents, whose stream is left as it is."""
    few, works = ask.sample(MOST_MICRO_BATCHES), partial(workload, ask.cost_model)
    means = []
    for tried in (config, Plain.Config()):
        policy = tried.make(stream.from_start(), few)
        degrees = [imbalance_degree(policy.next().work(works)) for _ in range(WARM_UP + STEPS)]
        means.append(float(np.mean(degrees[WARM_UP:])))
    return means[0], means[1]
