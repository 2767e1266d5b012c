"""The packing of validation: every document once, whole and balanced, and none waits.

Documents above the context window are cut at its multiples. After the last step the first comes again. Few
documents are filled up with pieces of one token, a document's last, which has no label: so many that no
micro-batch has fewer tokens than the context-parallel ranks that share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb_titan.balancing import balance
from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream, Pieces
from wlb_titan.packing.policy import Pack, Packing, PackingPolicy, drafts
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.plan import LENGTH, START

if TYPE_CHECKING:
    from wlb_titan.job import Job

BLOCK = 1 << 20  # documents cut at a time


class Once(PackingPolicy):
    """Micro-batches of at most the context window, equally many on every rank and in every step."""

    variable_length = True
    balances = True
    endless = False

    def __init__(self, config: Any, stream: DocumentStream, job: Job) -> None:
        self._job = job
        longest = stream.window // job.divisor * job.divisor
        pieces = _pieces(stream, longest)
        last = pieces[:1].copy()
        last[:, START] += last[:, LENGTH] - 1
        last[:, LENGTH] = 1
        pieces = np.concatenate([pieces, np.repeat(last, -len(pieces) % job.micro_batches, axis=0)])
        plan = balance(
            pieces[:, LENGTH],
            ranks=job.micro_batches,
            tokens_per_rank=longest,
            cost=lambda lengths: workload(job.cost_model, lengths),
        )

        def filled(pack: Pieces) -> Pack:
            lacking = max(job.degrees.context - int(pack[:, LENGTH].sum()), 0)
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


def validating(job: Job) -> Job:
    """The job as it validates: a step is one micro-batch of each data-parallel rank, or one run through its
    pipeline."""
    micro_batches = job.degrees.data * (job.run or 1)
    order = ORDERS.configure("as_packed")
    return replace(job, packing=Once.Config(), order=order, micro_batches=micro_batches)


def _pieces(stream: DocumentStream, longest: int) -> Pieces:
    """All documents in pieces of at most `longest` tokens; the first piece ends its document."""
    parts = []
    for first in range(0, stream.mixture.documents, BLOCK):
        ids = np.arange(first, min(first + BLOCK, stream.mixture.documents))
        lengths = stream.lengths_of(ids)
        counts = -(-lengths // longest)
        documents = np.repeat(np.arange(len(ids)), counts)
        starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
        sizes = np.minimum(lengths[documents] - starts, longest)
        parts.append(np.stack([ids[documents], starts, sizes], axis=1))
    pieces = np.concatenate(parts)
    return pieces[np.argsort(-pieces[:, START] - pieces[:, LENGTH], kind="stable")]
