"""Serves the planned micro-batches of one rank, step by step, on the host and then on the device.

While a step trains, a background thread plans the next one, reads its tokens and cuts out this rank's share,
with what its attention mask needs, in pinned memory if there is an accelerator. `Item.to` runs between two
micro-batches and only starts copies.

A checkpoint has the planner's state after the step that was handed out last; it is the same on every rank, so
a job can resume on other degrees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map, tree_map_only
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from wlb_titan.arrays import Ints
from wlb_titan.context.layout import segments_after, sequence_positions
from wlb_titan.context.strategy import ContextMask
from wlb_titan.corpus import Corpus
from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.memory.mix import kinds_of_layers, shares
from wlb_titan.packing.policy import PackingPolicy
from wlb_titan.packing.slices import cache_rows
from wlb_titan.packing.slim.asymmetric import token_moves
from wlb_titan.plan import LENGTH, ROW, START, Flow, MicroBatch, Plan
from wlb_titan.runtime.attention.kv_cache import BEFORE, HERE, NUMBER
from wlb_titan.runtime.attention.module import DocumentMask, documents_vary
from wlb_titan.runtime.loss import total_weight, with_weights
from wlb_titan.runtime.pipeline.regroup import REGROUPING
from wlb_titan.summary import plan_figures


@dataclass(frozen=True)
class Item:
    """A micro-batch of one rank on the host; l are the rank's tokens."""

    inputs: torch.Tensor  # int64 (1, l), token ids
    labels: torch.Tensor  # int64 (1, l), or (1, l, 2) as of `with_weights`
    positions: torch.Tensor  # int64 (1, l), from 0 in every document
    mask: DocumentMask
    others: dict[str, Any] = field(default_factory=dict)  # further arguments of a stage

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        job: Job,
        context_rank: int,
        tokens: Ints,
        labels: Ints,
        positions: Ints,
        rows: Ints | None = None,
    ) -> Item:
        """Cuts a context-parallel rank's share out of a micro-batch, with what its attention mask needs.

        Args:
            tokens, positions: int64 (L,), of all data-parallel ranks that share it.
            labels: int64 (L,), or (L, 2).
            rows: int64 (n, 4), prefixes of documents in slices, as of `kv_cache`; None if they are whole.
        """
        lengths, shards = micro_batch.lengths, micro_batch.ranks
        strategy = job.by_sharers[micro_batch.sharers].strategy
        mask = ContextMask.of_sequence(lengths)
        if strategy is not None and shards is not None:
            ahead = micro_batch.dp_rank - micro_batch.merged.start if micro_batch.merged else 0
            rank = ahead * job.degrees.context + context_rank  # among those of all sharers
            own = sequence_positions(shards, lengths, len(tokens))[rank]
            mask = strategy.mask(shards, lengths, len(tokens), rank, micro_batch.elsewhere)
            tokens, labels, positions = tokens[own], labels[own], positions[own]
        segments = mask.segments
        if rows is not None:
            rows = rows_of_keys(rows, mask.keys)
            segments = segments_after(segments, mask.keys[:, 1], rows[:, BEFORE])
        return cls(
            *(on_host(values).unsqueeze(0) for values in (tokens, labels, positions)),
            DocumentMask(
                segments=documents_vary(torch.from_numpy(segments)),
                exchange=tree_map_only(np.ndarray, on_host, mask.exchange),
                rows=None if rows is None else documents_vary(torch.from_numpy(rows)),
                sharers=micro_batch.sharers,
                groups=micro_batch.groups,
                kinds=() if micro_batch.mix is None else kinds_of_layers(micro_batch.mix),
            ),
        )

    def to(
        self, device: torch.device, cache: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Starts the copies to the device; segments and rows stay on the host. `cache` is the number of the
        step's `KeyValueCache`. Returns inputs, labels, and other arguments of the model or a stage."""
        inputs, labels, exchange, others = tree_map(
            lambda part: part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part,
            (self.inputs, self.labels, self.mask.exchange, {"positions": self.positions, **self.others}),
        )
        mask = replace(self.mask, exchange=exchange, cache=cache)
        return inputs, labels, {**others, "attention_masks": mask}


def rows_of_keys(rows: Ints, keys: Ints) -> Ints:
    """The rows of the documents whose keys a rank has, in order; `keys` as of `ContextMask`."""
    number, tokens = keys.T
    result = rows[number]
    result[number < 0] = 0
    result[number < 0, NUMBER] = -1
    result[:, HERE] = tokens
    return result


def grouped(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Micro-batches that go through the model together: those of a pipeline run, or a single one."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def on_host(values: Ints) -> torch.Tensor:
    """Pins the values, if there is an accelerator, so that copies to it do not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


def regrouped_items(
    items: Sequence[Item], packs: Sequence[MicroBatch], tensor_ranks: int, rank: int
) -> list[Item]:
    """The items of `packs`, with `TokenMoves` in those of backward passes, and no labels in the others. Rows
    of these moves are tensors, int64 (R,)."""
    on_ranks = token_moves(packs, tensor_ranks, rank)
    moves = (m._replace(sent=on_host(m.sent), places=on_host(m.places)) for m in on_ranks)
    return [
        replace(item, others={REGROUPING: next(moves)})
        if pack.passes == "B"
        else replace(item, labels=item.labels[:, :0])
        for item, pack in zip(items, packs, strict=True)
    ]


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
        rank: int = 0
        """The global rank whose share of micro-batches, stages and hidden states is served."""

        loss_weight: str = "token"

        def to_dict(self) -> dict[str, Any]:
            return {}  # in torchtitan's logs, which have the user's sections

    def __init__(self, config: Config, **parts: Any):
        self.corpus, self._job = config.corpus, config.job
        self._place = config.job.degrees.grid.place(config.rank)
        self._dp_rank = config.job.degrees.replica_at(self._place)
        self._by_document = config.loss_weight == "conversation"
        self.plan: Plan | None = None  # of the step being served
        self.count = len(config.documents.lengths)
        self._planner = config.job.planner(config.documents)
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
        plan = self._planner.next([self._dp_rank], [self._place["pp"]])
        self._digest = plan.digest(self._digest)
        self._own_digest = plan.own_digest(self._dp_rank, self._own_digest)
        flow = None if plan.flows is None else plan.flows[self._dp_rank]
        own = plan.of_rank(self._dp_rank)
        rows = [None] * len(own) if own[0].slices is None else cache_rows(own)
        items = [self._item(m, cached) for m, cached in zip(own, rows, strict=True)]
        if self._job.packing.regroups:
            ranks = self._job.degrees.tensor if self._job.memory.sequence_parallel else 1
            rank = self._place["cp"] * ranks + self._place["tp"] % ranks
            items = regrouped_items(items, own, ranks, rank)
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
        stages = [*self._job.shape.stages_of(self._place["pp"])]
        mixes = [m.mix[stages] for m in micro_batches if m.mix is not None]
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
        return Item.of(micro_batch, self._job, self._place["cp"], tokens, labels, positions, cached)
