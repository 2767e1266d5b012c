"""The plan of one optimizer step: which documents each micro-batch of the whole job holds.

Every rank computes the same plan from the same lengths, so a plan is never communicated. As JSON
(`wlb-titan plan --output`) it is one object a line:

    {"iteration": 0, "plan_ms": 1.9, "imbalance": 1.008, "micro_batches": [
       {"dp_rank": 0, "index": 0, "length": 4096, "padding": 12, "workload": 1.7e15,
        "documents": [{"id": 17, "start": 0, "length": 4084, "delay": 0, "row": 5}],
        "sharding": "per_sequence", "groups": 1, "ranks": [[[0, 0, 1024], [0, 3072, 1012]], ...]}]}

"id" is a document's place in the shuffled stream, "row" its number in the corpus or in the file of --lengths,
from 0. Where micro-batches are MicroPacks (policy `slim`) a document also has "prefix" and "total", and the
plan has "order": for each data-parallel rank and each of its pipeline ranks the passes that it runs, as pass,
micro-batch and stage: [[["F0.0", "F1.0", "B1.0", "B0.0"], ["F0.1", ...]], ...]. A micro-batch that
data-parallel ranks share is listed once for each of them, with these ranks as "merged": "documents" and
"ranks" are the same for all, "length", "padding" and "workload" are each rank's share. One that runs only
forward or only backward (the asymmetric partition) has "passes", "F" or "B".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints

ID, START, LENGTH, DELAY, ROW = range(5)  # columns of MicroBatch.documents
NAMES = "id", "start", "length", "delay", "row"  # of these in JSON
PREFIX, TOTAL = range(2)  # columns of MicroBatch.slices
DOCUMENT, OFFSET, COUNT = range(3)  # columns of MicroBatch.ranks[r]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["F", "B", "I", "W"]  # forward, whole backward, gradient of inputs, gradient of weights
    stage: int  # 0 has the embedding
    place: int  # the micro-batch's index on its data-parallel rank

    def __str__(self) -> str:
        return f"{self.kind}{self.place} of stage {self.stage}"

    def short(self) -> str:
        """`F3.2`, the forward pass of micro-batch 3 through stage 2, as plans in JSON write it."""
        return f"{self.kind}{self.place}.{self.stage}"


Flow = tuple[tuple[Action, ...], ...]  # the passes of each pipeline rank, in the order in which it runs them


class Slices(NamedTuple):
    """How the documents of a micro-batch continue in other micro-batches."""

    prefix: Ints
    """int64 (n,), tokens of each document that lie in earlier micro-batches and that its queries see."""

    cached: Bools
    """bool (n,), documents with slices elsewhere, whose keys every context-parallel rank keeps for them."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The documents of one forward and backward pass, in the order in which they lie in the sequence.

    A packing policy makes a draft: the first four fields. `Rates.sized` adds length and padding,
    `Rates.sharded` the sharding, and the planner ROW and the rest. Times and memory can be predicted from a
    draft too.

    Several data-parallel ranks may share one (DP-Merge). Each then has an entry of its own with the same
    documents, and with its share of length, padding and workload.
    """

    documents: Ints
    """int64 (n, 5), columns ID (position in the stream), START (first token of this piece within the
    document), LENGTH (tokens), DELAY (iterations since the piece arrived), ROW (of the corpus; not in a
    draft)."""

    slices: Ints | None = None
    """int64 (n, 2), for each row of `documents` PREFIX (tokens of the piece that lie in earlier
    micro-batches) and TOTAL (tokens of the whole piece); None where documents are not sliced."""

    merged: range = range(0)  # data-parallel ranks that share it, with dp_rank; empty if none do
    passes: Literal["FB", "F", "B"] = "FB"
    """Under the asymmetric partition a micro-batch runs forward only or backward only; the two kinds divide
    the same tokens differently."""

    length: int = 0  # tokens, padding included
    padding: int = 0  # tokens at the sequence's end that belong to no document
    dp_rank: int = 0
    index: int = 0  # among the micro-batches of dp_rank in the step
    workload: float = 0.0  # predicted work of its passes, in the cost model's unit
    sharding: str | None = None  # name of the sharding chosen; None where a single rank has all of it
    ranks: tuple[Ints, ...] | None = None
    """For each context-parallel rank an int64 (m, 3), columns DOCUMENT (row of `documents`), OFFSET (first
    token within that piece), COUNT (tokens), in the order in which the rank holds them; the rest of the
    rank's length / context_parallel tokens is padding. Where data-parallel ranks share it, the first one's
    context-parallel ranks come first, then the second one's, ..."""

    groups: int = 1  # of heads: the keys of one travel while another attends

    mix: Ints | None = None
    """int64 (stages, kinds), how many layers of a stage are recomputed in each way of `recompute.KINDS`;
    None: all in the job's way."""

    @property
    def lengths(self) -> Ints:
        return self.documents[:, LENGTH]

    @property
    def sharers(self) -> int:
        """How many data-parallel ranks share it."""
        return len(self.merged) or 1

    @property
    def shared_length(self) -> int:
        """Tokens of all its sharers, padding included."""
        return self.length * self.sharers

    @property
    def prefix(self) -> Ints | None:
        return None if self.slices is None else self.slices[:, PREFIX]

    @property
    def elsewhere(self) -> Slices | None:
        """How its documents continue in other micro-batches; None where they are not sliced."""
        if self.slices is None:
            return None
        # Where backward passes have micro-batches of their own, any document may be cut in the other pass.
        cut = (self.slices[:, TOTAL] > self.lengths) | (self.passes != "FB")
        return Slices(self.slices[:, PREFIX], cut)

    @property
    def document_lengths(self) -> Ints:
        """int64 (k,), whole tokens of the documents whose first slice is here."""
        if self.slices is None:
            return self.lengths
        totals: Ints = self.slices[self.slices[:, PREFIX] == 0, TOTAL]
        return totals

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, as in the module's example."""
        record: dict[str, Any] = {
            "dp_rank": self.dp_rank,
            "index": self.index,
            "length": self.length,
            "padding": self.padding,
            "workload": self.workload,
            "documents": [dict(zip(NAMES, row, strict=False)) for row in self.documents.tolist()],
        }
        if self.slices is not None:
            for document, (prefix, total) in zip(record["documents"], self.slices.tolist(), strict=True):
                document |= {"prefix": prefix, "total": total}
        if self.merged:
            record["merged"] = list(self.merged)
        if self.passes != "FB":
            record["passes"] = self.passes
        if self.ranks is not None:
            record["sharding"] = self.sharding
            record["groups"] = self.groups
            record["ranks"] = [rank.tolist() for rank in self.ranks]
        if self.mix is not None:
            record["recomputed"] = self.mix.tolist()
        return record


@dataclass(frozen=True)
class Plan:
    """All micro-batches of one optimizer step, ordered by (dp_rank, index)."""

    iteration: int  # counts steps from 0
    micro_batches: tuple[MicroBatch, ...]
    plan_ms: float  # milliseconds that planning took
    waiting_documents: int = 0  # pieces that had arrived and were left for later steps
    waiting_tokens: int = 0
    lost_tokens: int = 0  # left out for good in this step, so that each window has a token to predict
    gap: float | None = None  # how far a solver's packing may be from the best, relatively; 0 is optimal
    flows: tuple[Flow, ...] | None = None
    """The order of each data-parallel rank's passes, empty if not asked for; None leaves it to the
    schedule."""

    @property
    def imbalance(self) -> float:
        """Largest over mean workload of the micro-batches (the imbalance degree of the paper's Table 2)."""
        return imbalance_by_pass(self.micro_batches, [m.workload for m in self.micro_batches])

    @property
    def longest(self) -> int:
        return max(m.length for m in self.micro_batches)

    @property
    def forward(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of forward passes, which hold each token of the step once."""
        return tuple(m for m in self.micro_batches if m.passes != "B")

    @cached_property
    def packs(self) -> tuple[MicroBatch, ...]:
        """Those of forward passes without repetition: one that ranks share counts once."""
        return tuple(m for m in self.forward if not m.merged or m.dp_rank == m.merged[0])

    @cached_property
    def documents(self) -> Ints:
        """int64 (n, 5), the documents of all packs, columns as in `MicroBatch.documents`."""
        return np.concatenate([pack.documents for pack in self.packs])

    @property
    def tokens(self) -> int:
        """Tokens of documents, padding left out."""
        return sum(micro_batch.length - micro_batch.padding for micro_batch in self.forward)

    @property
    def document_lengths(self) -> Ints:
        """int64 (n,), tokens of the documents that the step trains, slices put together."""
        return np.concatenate([micro_batch.document_lengths for micro_batch in self.packs])

    def cut_share(self, window: int) -> float:
        """Share of the tokens in pieces that begin in mid-document and so do not see what precedes them.

        Documents longer than the window have to be cut: a piece that begins at a multiple of the window does
        not count.
        """
        before = [np.zeros(len(m.documents), int) if m.prefix is None else m.prefix for m in self.packs]
        cut = (self.documents[:, START] - np.concatenate(before)) % window > 0
        return float(self.documents[cut, LENGTH].sum() / self.tokens)

    @property
    def keys_per_token(self) -> float:
        """Keys that a token attends to, itself included, on average; sliding windows are not considered."""
        d = self.document_lengths.astype(np.float64)
        return float((d * (d + 1)).sum() / (2 * d.sum()))

    @property
    def padding(self) -> int:
        return sum(micro_batch.padding for micro_batch in self.forward)

    @property
    def delay(self) -> float:
        """Iterations that a token of the step waited, on average."""
        return int(self.documents[:, LENGTH] @ self.documents[:, DELAY]) / self.tokens

    @property
    def max_delay(self) -> int:
        return int(self.documents[:, DELAY].max())

    def of_rank(self, dp_rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one data-parallel rank, indexed by the `place` of its actions."""
        return tuple(m for m in self.micro_batches if m.dp_rank == dp_rank)

    def digest(self, before: int) -> int:
        """48 bits, which float64 holds exactly, that identify this plan and, by the digest `before` it, all
        earlier ones. Left out is what a rank knows only of its own micro-batches."""
        found = hashlib.blake2b(str(before).encode(), digest_size=6)
        for m in self.micro_batches:
            found.update(str((m.dp_rank, m.index, m.length, m.padding, m.merged)).encode())
            found.update(m.documents.tobytes() + (b"" if m.slices is None else m.slices.tobytes()))
        return int(found.hexdigest(), 16)

    def own_digest(self, dp_rank: int, before: int) -> int:
        """The same of shardings, recomputation and order of the passes of one data-parallel rank."""
        found = hashlib.blake2b(str((before, self.flows and self.flows[dp_rank])).encode(), digest_size=6)
        for m in self.of_rank(dp_rank):
            found.update(str((m.sharding, m.groups, m.mix is not None and m.mix.tolist())).encode())
            found.update(b"".join(held.tobytes() for held in m.ranks or ()))
        return int(found.hexdigest(), 16)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "iteration": self.iteration,
            "plan_ms": self.plan_ms,
            "imbalance": self.imbalance,
            "micro_batches": [micro_batch.to_json() for micro_batch in self.micro_batches],
        }
        if self.flows is not None:
            record["order"] = [[[a.short() for a in rank] for rank in flow] for flow in self.flows]
        return record


def imbalance_by_pass(micro_batches: Sequence[MicroBatch], values: Sequence[float]) -> float:
    """`imbalance_degree` of each micro-batch's work or time, by pass where passes have their own."""
    pairs = list(zip(micro_batches, values, strict=True))
    return imbalance_degree(*([value for m, value in pairs if kind in m.passes] for kind in "FB"))


def imbalance_degree(*passes: Sequence[float] | Floats) -> float:
    """max / mean, 1.0 for perfect balance or no work; maxima and means of several passes add up."""
    values = [np.asarray(one, dtype=np.float64) for one in passes]
    mean = sum(float(one.mean()) for one in values if one.size)
    return sum(float(one.max()) for one in values if one.size) / mean if mean > 0 else 1.0
