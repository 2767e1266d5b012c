"""Serves the planned micro-batches of one rank, step by step.

While a step trains, a background thread plans the next one, reads its tokens and cuts out this rank's share.
A checkpoint has the planner's state after the step that was handed out last; it is the same on every rank, so
a job can resume on other degrees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from wlb_titan.arrays import Ints
from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.memory.mix import shares
from wlb_titan.packing.policy import PackingPolicy
from wlb_titan.packing.slices import cache_rows
from wlb_titan.plan import LENGTH, ROW, START, Flow, MicroBatch, Plan
from wlb_titan.runtime.inputs import Item
from wlb_titan.runtime.loss import total_weight, with_weights
from wlb_titan.runtime.pipeline.regroup import regrouped_items
from wlb_titan.summary import plan_figures


@dataclass(frozen=True)
class Step:
    """One rank's part of one optimizer step."""

    plan: Plan  # of the whole job
    source_figures: dict[str, float]  # the plan's, of each source of a mixture
    items: list[Item]
    """This rank's share of its micro-batches; if backward passes have their own, those of forward passes
    without labels, and then these."""

    labels: float  # of the whole job, or the sum of their weights; losses are divided by it
    own_labels: float  # the part of `labels` in `items`
    flops: float  # of the model, on the documents of the whole job
    state_after: dict[str, Any]  # of the planner
    digest: int  # of the plans up to this one (`Plan.digest`)
    own_digest: int  # and of what the data-parallel rank alone knows of them (`Plan.own_digest`)
    flow: Flow | None = None  # the order of this data-parallel rank's passes; None: that of the schedule
    lowered: Any = None  # the pipeline schedule of that order
    repeated: float | None = None  # share of this rank's layers that repeat something, where that is chosen

    def figures(self, job: Job) -> dict[str, Any]:
        plan = self.plan
        counts = {"tokens": plan.tokens, "labels": self.labels, "padding": plan.padding}
        return counts | plan_figures(plan, job) | self.source_figures


class PlannedDataLoader(BaseDataLoader):
    """Iterates over the steps of a corpus packed by the planner.

    Positions start from 0 in every document. A label is the next token of the same document, even across a
    cut, if the corpus' mask lets it be learned. Padding, which has no labels, lies at a sequence's end.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Filled in by the trainer from the other sections."""

        corpus: Corpus
        documents: Documents
        """Those of the corpus that are planned."""

        job: Job
        context_rank: int = 0
        """Whose share of each micro-batch is served."""

        pipeline_ranks: Sequence[int] | None = None
        """For whose stages it is planned what layers recompute; None: for all."""

        tensor_rank: tuple[int, int] = (0, 1)
        """The tensor-parallel rank where hidden states are divided among them, and how many do so."""

        loss_weight: str = "token"
        alone: bool = False
        """Whether the other ranks are not there, and a solver is asked here."""

        def to_dict(self) -> dict[str, Any]:
            return {}  # in torchtitan's logs, which have the user's sections

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **kwargs: Any):
        assert dp_world_size == config.job.degrees.data
        self.corpus = config.corpus
        self.plan: Plan | None = None  # of the step being served
        self._context_rank, self._tensor_rank = config.context_rank, config.tensor_rank
        self._pipeline_ranks = config.pipeline_ranks
        self._job = config.job
        self._by_document = config.loss_weight == "conversation"
        self._dp_rank = dp_rank
        self.count = len(config.documents.lengths)
        planned = config.job
        if planned.packing.planning_seconds and not config.alone:
            planned = replace(planned, on_one_rank=SharedAnswer())
        self._planner = planned.planner(config.documents)
        self._state = self._planner.state_dict()
        self._digest = self._own_digest = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")

    def __iter__(self) -> Iterator[Step]:
        return self.steps()

    def steps(self, lower: Callable[[Flow], Any] | None = None) -> Iterator[Step]:
        """The steps; `lower`, which makes a schedule of an order of passes, runs in the planner's thread."""
        ahead = self._thread.submit(self._prepare, lower)
        while True:
            step = ahead.result()
            ahead: Future[Step] = self._thread.submit(self._prepare, lower)
            self.plan, self._state = step.plan, step.state_after
            yield step

    @property
    def policy(self) -> PackingPolicy:
        return self._planner.policy

    def close(self) -> None:
        """Waits for the plan that is being made."""
        self._thread.shutdown()

    def state_dict(self) -> dict[str, Any]:
        return {"planner": json.dumps(self._state, default=np.ndarray.tolist)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the step of the state. Call it before iterating."""
        self._planner.load_state_dict(json.loads(state_dict["planner"]))
        self._state = self._planner.state_dict()

    def _prepare(self, lower: Callable[[Flow], Any] | None) -> Step:
        plan = self._planner.next([self._dp_rank], self._pipeline_ranks)
        self._digest = plan.digest(self._digest)
        self._own_digest = plan.own_digest(self._dp_rank, self._own_digest)
        flow = None if plan.flows is None else plan.flows[self._dp_rank]
        own = plan.of_rank(self._dp_rank)
        rows = [None] * len(own) if own[0].slices is None else cache_rows(own)
        items = [self._item(m, cached) for m, cached in zip(own, rows, strict=True)]
        if self._job.packing.regroups:
            rank, ranks = self._tensor_rank
            items = regrouped_items(items, own, ranks, self._context_rank * ranks + rank)
        return Step(
            plan=plan,
            source_figures=self._planner.source_figures(plan),
            items=items,
            labels=self._planner.labels(plan, by_document=self._by_document),
            own_labels=sum(total_weight(item.labels) for item in items),
            flops=self._job.model.flops(plan.document_lengths),
            state_after=self._planner.state_dict(),
            digest=self._digest,
            own_digest=self._own_digest,
            flow=flow,
            lowered=None if flow is None or lower is None else lower(flow),
            repeated=self._repeated(own),
        )

    def _repeated(self, micro_batches: Sequence[MicroBatch]) -> float | None:
        stages = [s for rank in self._pipeline_ranks or () for s in self._job.shape.stages_of(rank)]
        mixes = [m.mix[stages] for m in micro_batches if m.mix is not None and stages]
        return 1 - shares(mixes)["none"] if mixes else None

    def _item(self, micro_batch: MicroBatch, cached: Ints | None) -> Item:
        size, offset = micro_batch.shared_length, 0
        tokens, positions = np.zeros((2, size), dtype=np.int64)
        labels, weights = np.full(size, IGNORE_INDEX), np.zeros(size)
        rows, starts, lengths = micro_batch.documents[:, [ROW, START, LENGTH]].T
        totals = self.corpus.lengths[rows]
        labels_of = self._planner.labels_of(rows) if self._by_document else np.ones_like(rows)
        prefix = np.zeros_like(rows) if micro_batch.prefix is None else micro_batch.prefix
        columns = rows, totals, labels_of, starts, lengths, prefix
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        for row, total, of_document, start, length, before in pieces:
            read = self.corpus.tokens(row, start, min(length + 1, total - start))
            self.corpus.check_ids(row, read, self._job.model.vocabulary)
            tokens[offset : offset + length] = read[:length]
            positions[offset : offset + length] = np.arange(before, before + length)
            end = offset + len(read) - 1
            learned = self.corpus.learned(row, start, len(read))[1:]
            labels[offset:end] = np.where(learned, read[1:].astype(np.int64), IGNORE_INDEX)
            weights[offset:end] = learned / max(of_document, 1)
            offset += length
        if self._by_document:
            labels = with_weights(labels, weights)
        return Item.of(micro_batch, self._job, self._context_rank, tokens, labels, positions, cached)


class SharedAnswer:
    """One answer for all ranks: a solver stopped by its time limit finds different packings on each.

    The thread that plans ahead asks on rank 0, and tells the others over a process group that nothing else
    uses. All ranks make and call these in the same order.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def __call__(self, ask: Callable[[], Any]) -> Any:
        """Rank 0's `ask()` on every rank."""
        answer = [ask() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(answer, src=0, group=self._group)
        return answer[0]


class Tokenizer(HuggingFaceTokenizer):
    """torchtitan's, without chat templates, whose `{% generation %}` it cannot compile. Conversations were
    rendered when the corpus was prepared."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        pass

    def set_chat_template(self, template: str) -> None:
        """Does nothing."""
