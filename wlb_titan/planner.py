"""The planner: from the lengths of a corpus to one `Plan` a step, the same on every rank.

Lengths, settings and state determine the plan, so nothing is communicated.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.bins import balanced, in_order
from wlb_titan.documents import Documents
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.layers.groups import grouped
from wlb_titan.packing import PackingPolicy, rules
from wlb_titan.packing.policies import Policies
from wlb_titan.packing.predicted import with_mixes
from wlb_titan.pipeline.order import arranged
from wlb_titan.plan import ID, LENGTH, ROW, START, MicroBatch, Plan
from wlb_titan.plugins import is_ours

STATE_VERSION = 4
STREAM_FACTS = "corpus_fingerprint", "documents", "mixture", "seed", "context_window"
PACKING_FACTS = "packing_policy", "micro_batches"


@dataclass(frozen=True, kw_only=True)
class PlannerState:
    """What a checkpoint holds of the plans, as JSON by these names: all that the coming ones depend on beside
    documents and job (docs/packing.md). It is the same on every rank, and nothing in it follows from degrees
    or devices."""

    corpus_fingerprint: str  # this and the next four make the stream of tokens (STREAM_FACTS)
    documents: int
    mixture: list[list[Any]]
    seed: int | None
    context_window: int
    packing_policy: str  # `packing` is for this policy and number of micro-batches (PACKING_FACTS)
    micro_batches: int
    iteration: int  # steps planned so far
    stream: Mapping[str, Any]  # the cursor, and pieces that were given back
    waiting: Ints  # int64 (n, 4), as of `PackingPolicy.waiting`; not written to later
    packing: Mapping[str, Any]  # the policy's own
    version: int = STATE_VERSION


class Planner:
    """Plans a job's steps one after the other."""

    def __init__(self, documents: Documents, job: Policies) -> None:
        self._stream = DocumentStream(documents.mixture(), job.window)
        packing = job.packing
        if packing.owner.endless and len(documents.lengths) < job.micro_batches:
            raise PlanError(
                f"The corpus has too few documents for the {job.micro_batches} micro-batches of one step: "
                f"{len(documents.lengths)}. Use a larger corpus or fewer micro-batches.",
                setting="corpus.path",
            )
        self.policy: PackingPolicy = packing.make(self._stream, job.ask)
        self.fixed_length = not self.policy.variable_length
        if self.fixed_length and job.window % job.divisor:
            raise PlanError(
                f"Policy {packing.name!r} makes micro-batches of exactly the context window, {job.window} "
                f"tokens, but they must be a multiple of {job.divisor} to be shared by context- and "
                "tensor-parallel ranks.",
                setting="training.seq_len",
            )
        self._job = job
        self._order = job.order.make(job.shape) if job.degrees.pipeline > 1 else None
        self._documents = documents
        self.iteration = 0  # steps planned so far
        ours = is_ours(job.packing.owner) and is_ours(job.context.owner)
        self._rules = None if ours else rules.Rules(self._stream, job)

    def hold_to_rules(self) -> None:
        """Plans some steps where a policy or sharding is not the project's; those that break a rule end in a
        PlanError, here as in `next`."""
        while self._rules is not None:
            self.next()

    def left(self, end: int) -> int:
        """Tokens that are still to come of the documents with ids below `end`."""
        waiting = self.policy.waiting
        return self._stream.left(end) + int(waiting[waiting[:, ID] < end, LENGTH].sum())

    def source_figures(self, plan: Plan) -> dict[str, float]:
        """For each source of a mixture the tokens that the plan trains, and the epochs read so far."""
        mixture = self._stream.mixture
        if not mixture.sources[0].name:
            return {}
        sources = mixture.sources_of(plan.documents[:, ROW])
        tokens = np.bincount(sources, plan.documents[:, LENGTH], len(mixture.sources)).astype(np.int64)
        epochs = mixture.epochs(self._stream.next_document)
        return {
            f"{figure}/{source.name}": value
            for figure, values in (("tokens", tokens.tolist()), ("epoch", epochs))
            for source, value in zip(mixture.sources, values, strict=True)
        }

    def labels(self, plan: Plan, *, by_document: bool = False) -> float:
        """How many labels a step has; the sum of its losses is divided by it.

        A token's label is the next token of its document, if that is learned. With `by_document` a label
        counts as one over the labels of its document, so that all documents weigh the same.
        """
        rows, starts, lengths = plan.documents[:, [ROW, START, LENGTH]].T
        stops = np.minimum(starts + lengths + 1, self._documents.lengths[rows])
        labels = self._documents.learned(rows, starts + 1, stops)
        if not by_document:
            return int(labels.sum())
        return float((labels / np.maximum(self.labels_of(rows), 1)).sum())

    def labels_of(self, rows: Ints) -> Ints:
        """int64 (n,), labels of the whole documents in these rows of the corpus."""
        return self._documents.learned(rows, np.ones_like(rows), self._documents.lengths[rows])

    def next(
        self, sharded: Collection[int] | None = None, pipeline_ranks: Collection[int] | None = None
    ) -> Plan:
        """The plan of the next step.

        Args:
            sharded: data-parallel ranks whose micro-batches get `ranks` and a `mix`, and whose passes get an
                order, None for all. To leave the others out saves a large job most of the time.
            pipeline_ranks: for whose stages the mix is chosen, None for all.
        """
        begin = time.perf_counter()
        sharded = range(self._job.replicas) if sharded is None else sharded
        packing = self.policy.next()
        if self._rules is not None:
            self._rules.check(self.policy, packing)
        forward, backward = packing.pass_work(self._job.cost_model)
        workloads = forward + backward
        if packing.assigned is not None:
            assigned = packing.assigned
        elif self.policy.balances:
            assigned = balanced(workloads, self._job.replicas)
        else:
            assigned = in_order(self._job.micro_batches, self._job.replicas)
        if self._order is not None and packing.assigned is None:
            run = self._job.per_run or self._job.replica_micro_batches
            assigned = arranged(self._order, run, assigned, forward, backward)
        drafts = self._with_rows(packing.packs)
        waiting = self.policy.waiting
        flows = self.policy.flows(packing, sharded)
        mixing = range(self._job.shape.ranks) if pipeline_ranks is None else pipeline_ranks
        least = self._job.window if self.fixed_length else 0
        micro_batches: list[MicroBatch] = []
        for dp_rank, packs in enumerate(assigned):
            of_rank = [
                self._job.sized(drafts[pack], dp_rank, least, index=index, workload=float(workloads[pack]))
                for index, pack in enumerate(packs)
            ]
            if dp_rank in sharded:
                of_rank = grouped(self._job, self._job.sharded(of_rank))
                if self._rules is not None:
                    for micro_batch in of_rank:
                        self._rules.check_sharding(micro_batch)
                if self._job.mixes:
                    flow = flows[dp_rank] if flows else None
                    of_rank = with_mixes(self._job.fitting, of_rank, flow, mixing)
            micro_batches += of_rank
        plan = Plan(
            iteration=self.iteration,
            micro_batches=tuple(micro_batches),
            plan_ms=(time.perf_counter() - begin) * 1e3,
            waiting_documents=len(waiting),
            waiting_tokens=int(waiting[:, LENGTH].sum()),
            lost_tokens=packing.lost_tokens,
            gap=packing.gap,
            flows=flows,
        )
        self.iteration += 1
        if self.iteration == rules.STEPS:
            self._rules = None
        return plan

    def state_dict(self) -> dict[str, Any]:
        """`PlannerState` by its names; JSON may turn arrays into lists."""
        mixture, job = self._stream.mixture, self._job
        state = PlannerState(
            corpus_fingerprint=self._documents.fingerprint,
            documents=mixture.documents,
            mixture=mixture.facts(),
            seed=mixture.seed,
            context_window=job.window,
            packing_policy=job.packing.name,
            micro_batches=job.micro_batches,
            iteration=self.iteration,
            stream=self._stream.state_dict(),
            waiting=self.policy.waiting,
            packing=self.policy.state_dict(),
        )
        return vars(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken, before the first step."""
        if (version := state.get("version")) != STATE_VERSION:
            raise PlanError(
                f"The saved planner state has version {version}, and this wlb_titan reads version "
                f"{STATE_VERSION}. Continue with the version that wrote it, or start in another dump folder."
            )
        saved, here = PlannerState(**state), self.state_dict()
        for fact in STREAM_FACTS:
            if state[fact] != here[fact]:
                raise PlanError(
                    f"The saved planner state cannot be continued: its {fact.replace('_', ' ')} is "
                    f"{state[fact]!r}, and this job's is {here[fact]!r}, which makes another stream of "
                    "tokens. Use the setting that wrote the checkpoint, or start in another dump folder."
                )
        self.iteration, self._rules = saved.iteration, None
        self._stream.load_state_dict(saved.stream)
        waiting = np.array(saved.waiting, dtype=np.int64).reshape(-1, 4)
        if all(state[fact] == here[fact] for fact in PACKING_FACTS):
            self.policy.load_state_dict({**saved.packing, "waiting": waiting})
        else:
            self._stream.give_back(waiting[:, : LENGTH + 1])

    def _with_rows(self, drafts: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The drafts with the column ROW: a step's documents are looked up together, and only here."""
        documents = np.concatenate([draft.documents for draft in drafts])
        rows, _ = self._stream.mixture.read(documents[:, ID])
        ends = np.cumsum([len(draft.documents) for draft in drafts])
        parts = np.split(np.column_stack([documents, rows]), ends[:-1])
        return [replace(draft, documents=part) for draft, part in zip(drafts, parts, strict=True)]
