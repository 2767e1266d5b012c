"""The packing of validation: every document once, whole and balanced, and none waits.

Documents above the context window are cut at its multiples. After the last step the first comes again. Few
documents are filled up with pieces of one token, a document's last, which has no label: so many that no
micro-batch has fewer tokens than the context-parallel ranks that share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from wlb_titan.balancing import balance
from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream, Pieces
from wlb_titan.packing.policies import Policies
from wlb_titan.packing.policy import Ask, Pack, Packing, PackingPolicy, drafts
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.plan import LENGTH, START

P = TypeVar("P", bound=Policies)


class Once(PackingPolicy):
    """Micro-batches of at most the context window, equally many on every rank and in every step."""

    variable_length = True
    balances = True
    endless = False

    def __init__(self, config: Any, stream: DocumentStream, ask: Ask) -> None:
        longest = stream.window // ask.divisor * ask.divisor
        pieces = DocumentStream(stream.mixture, longest).arrive(stream.mixture.tokens)
        pieces = pieces[np.argsort(-pieces[:, START] - pieces[:, LENGTH], kind="stable")]
        last = pieces[:1].copy()
        last[:, START] += last[:, LENGTH] - 1
        last[:, LENGTH] = 1
        pieces = np.concatenate([pieces, np.repeat(last, -len(pieces) % ask.micro_batches, axis=0)])
        plan = balance(
            pieces[:, LENGTH],
            ranks=ask.micro_batches,
            tokens_per_rank=longest,
            cost=lambda lengths: workload(ask.cost_model, lengths),
        )

        def filled(pack: Pieces) -> Pack:
            lacking = max(ask.context - int(pack[:, LENGTH].sum()), 0)
            return np.pad(np.concatenate([pack, np.repeat(last, lacking, axis=0)]), ((0, 0), (0, 1)))

        packs = [[filled(pieces[pack]) for pack in row] for row in plan.micro_batches]
        self._steps: list[list[Pack]] = [list(step) for step in zip(*packs, strict=True)]
        self.steps = len(self._steps)
        self._next = 0

    def next(self) -> Packing:
        packs = self._steps[self._next % self.steps]
        self._next += 1
        return Packing(drafts(packs))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


def validating(job: P) -> P:
    """The job as it validates: a step is one micro-batch of each data-parallel rank, or one run through its
    pipeline."""
    micro_batches = job.degrees.data * (job.per_run or 1)
    order = ORDERS.configure("as_packed")
    return replace(job, packing=Once.Config(), order=order, micro_batches=micro_batches)
