"""The rules of packing policies and shardings (docs/extending.md), to which classes of others are held.

A policy that loses documents or trains some twice looks better balanced than it is, and nothing else sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.context.strategy import ContextStrategy
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.policies import Policies
from wlb_titan.packing.policy import Packing, PackingPolicy
from wlb_titan.plan import COUNT, DOCUMENT, ID, LENGTH, OFFSET, START, MicroBatch
from wlb_titan.plugins import is_ours

STEPS = 20
"""From the first on; as many show what queues do."""


class Rules:
    """Follows what a policy makes of a stream, from its start."""

    def __init__(self, stream: DocumentStream, job: Policies) -> None:
        self._stream, self._job = stream, job
        self._packed: list[Ints] = []  # int64 (n, 3) each, columns ID, START, LENGTH
        self._lost = 0

    def check(self, policy: PackingPolicy, packing: Packing) -> None:
        """Raises PlanError for the packs of the next step."""
        if not is_ours(type(policy)) and (problem := self._problem(policy, packing)):
            raise broken(policy, "packing policies", problem)

    def _problem(self, policy: PackingPolicy, packing: Packing) -> str:
        job, stream = self._job, self._stream
        if not isinstance(packing, Packing):
            return f"next() returns a Packing, and not {packing!r}"
        if packing.assigned is None and len(packing.packs) != job.micro_batches:
            return f"a step has {job.micro_batches} micro-batches, and not {len(packing.packs)}"
        if packing.assigned is not None:
            sharers = {number: pack.sharers for number, pack in enumerate(packing.packs)}
            if len(packing.assigned) != job.replicas or Counter(chain(*packing.assigned)) != sharers:
                return "`assigned` gives each micro-batch to a data-parallel rank, or to those that share it"
        for number, pack in enumerate(packing.packs):
            documents, tokens = pack.documents, int(pack.documents[:, LENGTH].sum())
            if not policy.slices and tokens > (longest := job.longest_micro_batch * pack.sharers):
                return f"micro-batch {number} has {tokens:,} tokens, and at most {longest:,} are allowed"
            labelled = policy.slices or stream.has_label(documents).any()  # MicroPacks may lie between labels
            if tokens < job.degrees.context * pack.sharers or not labelled:
                return f"micro-batch {number} has no token for each context-parallel rank, or none to predict"
            if pack.passes != "B":
                self._packed.append(documents[:, : LENGTH + 1])
        self._lost += packing.lost_tokens
        return miscounted(stream, self._packed, policy.waiting, self._lost)

    def check_sharding(self, placed: MicroBatch) -> None:
        """Raises PlanError for a division over context-parallel ranks."""
        strategy = self._job.shared(placed.sharers).strategy
        if strategy is None or is_ours(type(strategy)):
            return
        ranks, share = placed.ranks or (), placed.shared_length // strategy.ranks
        runs = np.concatenate([np.empty((0, 3), dtype=np.int64), *ranks])
        runs = runs[np.lexsort((runs[:, OFFSET], runs[:, DOCUMENT]))]
        begins = np.cumsum(placed.lengths) - placed.lengths
        inside = (runs[:, DOCUMENT] >= 0) & (runs[:, DOCUMENT] < len(begins))
        starts = begins[runs[inside, DOCUMENT]] + runs[inside, OFFSET]
        stops = np.cumsum(runs[:, COUNT])
        if (
            not inside.all()
            or not np.array_equal(starts, stops - runs[:, COUNT])
            or stops[-1:] != placed.lengths.sum()
        ):
            raise broken(strategy, "shardings", "every token of a micro-batch lies on one rank")
        if len(ranks) != strategy.ranks or max(int(rank[:, COUNT].sum()) for rank in ranks) > share:
            raise broken(
                strategy, "shardings", f"each of {strategy.ranks} ranks has {share:,} tokens at most"
            )


def miscounted(stream: DocumentStream, packed: Sequence[Ints], waiting: Ints, lost: int) -> str:
    """What is wrong with the tokens of all steps together, and of those that wait.

    Args:
        packed: int64 (n, 3) each, columns ID, START, LENGTH.
    """
    now = stream.state_dict()
    pieces = np.concatenate([*packed, waiting[:, : LENGTH + 1], now["first"]])
    pieces = pieces[np.lexsort((pieces[:, START], pieces[:, ID]))]
    ids, starts, ends = pieces[:, ID], pieces[:, START], pieces[:, START] + pieces[:, LENGTH]
    read = stream.lengths_of(np.arange(now["document"] + 1))
    read[-1] = now["offset"]
    if ((ids < 0) | (ids >= len(read)) | (starts < 0) | (ends <= starts)).any():
        return "a piece has the id of a document that was read, a start from 0 on, and at least a token"
    if (beyond := ends > read[ids]).any():
        return f"a piece of document {ids[beyond][0]} goes past its end, or past what was read of it"
    if (again := (ids[1:] == ids[:-1]) & (starts[1:] < ends[:-1])).any():
        return f"tokens of document {ids[1:][again][0]} are there twice"
    if missing := int(read.sum() - pieces[:, LENGTH].sum()) - lost:
        return f"{missing:,} tokens that were read are neither packed, waiting nor counted as lost"
    return ""


def broken(plugin: PackingPolicy | ContextStrategy, kind: str, rule: str) -> PlanError:
    name = f"{type(plugin).__module__}:{type(plugin).__qualname__}"
    return PlanError(f"{name} breaks a rule of {kind} (docs/extending.md): {rule}.")
