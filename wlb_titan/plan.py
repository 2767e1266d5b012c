"""The plan of one optimizer step: which documents each micro-batch of the whole job holds.

Every rank computes the same plan from the same lengths, so a plan is never communicated. As JSON
(`wlb-titan plan --output`) it is one object a line:

    {"iteration": 0, "plan_ms": 1.9, "imbalance": 1.008, "micro_batches": [
       {"dp_rank": 0, "index": 0, "length": 4096, "padding": 12, "workload": 1.7e15,
        "documents": [{"id": 17, "start": 0, "length": 4084, "delay": 0}],
        "sharding": "per_sequence", "ranks": [[[0, 0, 1024], [0, 3072, 1012]], ...]}]}

Where micro-batches are MicroPacks (policy `slim`) a document has "prefix" and "total" besides, and the plan
has "order", of each data-parallel rank and pipeline rank what it runs, pass, micro-batch and stage:
[[["F0.0", "F1.0", "B1.0", "B0.0"], ["F0.1", ...]], ...]. A micro-batch that data-parallel
ranks share stands there once for each of them, with "merged", these ranks: "documents" and "ranks" are the
same for all, "length", "padding" and "workload" are a rank's own share. One that runs in forward or in
backward passes only (the asymmetric partition) has "passes", "F" or "B".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from wlb_titan.arrays import Bools, Floats, Ints

ID, START, LENGTH, DELAY = range(4)  # columns of MicroBatch.documents
PREFIX, TOTAL = range(2)  # columns of MicroBatch.slices
DOCUMENT, OFFSET, COUNT = range(3)  # columns of MicroBatch.ranks[r]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: F forward, B whole backward, I gradient of the inputs, W gradient of the weights.
        stage: from 0 at the embedding.
        place: index of the micro-batch among those of its data-parallel rank.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    place: int

    def __str__(self) -> str:
        return f"{self.kind}{self.place} of stage {self.stage}"

    def short(self) -> str:
        """As plans in JSON have it: `F3.2` is the forward pass of micro-batch 3 through stage 2."""
        return f"{self.kind}{self.place}.{self.stage}"


Flow = tuple[tuple[Action, ...], ...]
"""What each pipeline rank runs, in order."""


class Slices(NamedTuple):
    """What other micro-batches have of the documents of one.

    Attributes:
        prefix: int64 (n,), tokens before each document's own, which its queries see too.
        cached: bool (n,), documents whose keys every context-parallel rank keeps, as any of them may have
            queries of another slice.
    """

    prefix: Ints
    cached: Bools


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The documents of one forward and backward pass, in the order in which they lie in the sequence.

    A packing policy hands it out as a draft of `documents`, where they are sliced `slices`, and who shares
    it. `Job.sized` adds length and padding, `Job.sharded` what each context-parallel rank holds, and the
    planner the rest. Memory, times and timelines are predicted of drafts as of whole plans.

    Several data-parallel ranks may share one (DP-Merge). Each then has an entry of its own with the same
    documents, and length, padding and workload are its share of them.

    Attributes:
        documents: int64 (n, 4), columns ID (position in the stream), START (first token of this piece
            within the document), LENGTH (tokens), DELAY (iterations since the piece arrived).
        slices: int64 (n, 2), for each row of `documents` PREFIX (tokens of the piece before it, which other
            micro-batches have) and TOTAL (tokens of the whole piece); None where documents are not sliced.
        merged: the data-parallel ranks that share it, `dp_rank` among them; empty where it is that rank's.
        passes: which passes it runs in: both, or F or B alone under the asymmetric partition, where those of
            backward passes hold the same tokens, otherwise divided.
        length: tokens, padding included; divisible by what context and tensor parallelism need.
        padding: tokens at the sequence's end that belong to no document.
        dp_rank: data-parallel rank that runs it.
        index: its place among that rank's micro-batches of the step, from 0.
        workload: predicted work of its passes, in the cost model's unit.
        sharding: name of the sharding chosen for it; None where a single rank has all of it.
        ranks: for each context-parallel rank an int64 (m, 3), columns DOCUMENT (row of `documents`), OFFSET
            (first token within that piece), COUNT (tokens), in the order in which the rank holds them;
            what is left of the rank's length / context_parallel tokens is padding, at its end. Where
            data-parallel ranks share it, those of the first of them, then those of the second, ...
    """

    documents: Ints
    slices: Ints | None = None
    merged: range = range(0)
    passes: Literal["FB", "F", "B"] = "FB"
    length: int = 0
    padding: int = 0
    dp_rank: int = 0
    index: int = 0
    workload: float = 0.0
    sharding: str | None = None
    ranks: tuple[Ints, ...] | None = None

    @property
    def lengths(self) -> Ints:
        """int64 (n,), tokens of each row of `documents`."""
        return self.documents[:, LENGTH]

    @property
    def sharers(self) -> int:
        """Data-parallel ranks that share it."""
        return len(self.merged) or 1

    @property
    def shared_length(self) -> int:
        """Tokens of all its sharers, padding included."""
        return self.length * self.sharers

    @property
    def prefix(self) -> Ints | None:
        """int64 (n,), tokens before each row of `documents` that its queries see too; None for none."""
        return None if self.slices is None else self.slices[:, PREFIX]

    @property
    def elsewhere(self) -> Slices | None:
        """What other micro-batches have of its documents; None where they are not sliced.

        Where the other direction has other micro-batches, any document may be cut there.
        """
        if self.slices is None:
            return None
        cut = (self.slices[:, TOTAL] > self.lengths) | (self.passes != "FB")
        return Slices(self.slices[:, PREFIX], cut)

    @property
    def document_lengths(self) -> Ints:
        """int64 (k,), tokens of the documents that begin here, with their slices elsewhere."""
        if self.slices is None:
            return self.lengths
        begins: Ints = self.slices[self.slices[:, PREFIX] == 0, TOTAL]
        return begins

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, as in the module's example."""
        record: dict[str, Any] = {
            "dp_rank": self.dp_rank,
            "index": self.index,
            "length": self.length,
            "padding": self.padding,
            "workload": self.workload,
            "documents": [
                {"id": id_, "start": start, "length": length, "delay": delay}
                for id_, start, length, delay in self.documents.tolist()
            ],
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
            record["ranks"] = [rank.tolist() for rank in self.ranks]
        return record


@dataclass(frozen=True, slots=True)
class Plan:
    """All micro-batches of one optimizer step, ordered by (dp_rank, index).

    Attributes:
        iteration: counts steps from 0.
        micro_batches: those of all data-parallel ranks.
        plan_ms: milliseconds that planning took.
        waiting_documents: pieces that had arrived and were left for later steps.
        waiting_tokens: tokens of these.
        lost_tokens: tokens that packing left out for good in this step (`tail = "drop"`).
        gap: how far a solver's packing may be from the best, relatively; 0 is a proven optimum.
        flows: what the pipeline ranks of each data-parallel rank run, in order, where the micro-batches are
            MicroPacks; None where the schedule's own order holds. A rank's entry is empty where it was not
            asked for.
        backward: micro-batches of backward passes, of the same tokens; their index is the place of B in
            `flows`. The same object as `micro_batches`, unless others are given; the `workload` of either is
            then that of its own pass.
    """

    iteration: int
    micro_batches: tuple[MicroBatch, ...]
    plan_ms: float
    waiting_documents: int = 0
    waiting_tokens: int = 0
    lost_tokens: int = 0
    gap: float | None = None
    flows: tuple[Flow, ...] | None = None

    @property
    def imbalance(self) -> float:
        """Largest over mean workload of the micro-batches (the imbalance degree of the paper's Table 2)."""
        return imbalance_by_pass(self.micro_batches, [m.workload for m in self.micro_batches])

    @property
    def longest(self) -> int:
        """Tokens of the longest micro-batch, padding included."""
        return max(m.length for m in self.micro_batches)

    @property
    def forward(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of forward passes, which hold each token of the step once."""
        return tuple(m for m in self.micro_batches if m.passes != "B")

    @property
    def packs(self) -> tuple[MicroBatch, ...]:
        """Those without repetition: of one that ranks share only the first rank's."""
        return tuple(m for m in self.forward if not m.merged or m.dp_rank == m.merged[0])

    @property
    def tokens(self) -> int:
        """Tokens of documents, padding left out."""
        return sum(micro_batch.length - micro_batch.padding for micro_batch in self.forward)

    @property
    def document_lengths(self) -> Ints:
        """int64 (n,), tokens of the pieces of documents that the step trains, slices put together."""
        return np.concatenate([micro_batch.document_lengths for micro_batch in self.packs])

    def cut_share(self, window: int) -> float:
        """Share of the tokens that lie in pieces which begin in mid-document, so that they do not see what is
        before them; documents longer than the window, which have to be cut, begin anew at its multiples."""
        pieces = np.concatenate([m.documents[:, [START, LENGTH]] for m in self.packs])
        before = [np.zeros(len(m.documents), int) if m.prefix is None else m.prefix for m in self.packs]
        cut = (pieces[:, 0] - np.concatenate(before)) % window > 0
        return float(pieces[cut, 1].sum() / self.tokens)

    @property
    def keys_per_token(self) -> float:
        """Keys that a token attends to, itself among them, averaged over the step's tokens; in a model with
        windows of attention only in its layers without."""
        d = self.document_lengths.astype(np.float64)
        return float((d * (d + 1)).sum() / (2 * d.sum()))

    @property
    def padding(self) -> int:
        """Tokens of padding in all micro-batches."""
        return sum(micro_batch.padding for micro_batch in self.forward)

    @property
    def delay(self) -> float:
        """Iterations that a token waited, averaged over the step's tokens."""
        waited = sum(int(m.lengths @ m.documents[:, DELAY]) for m in self.packs)
        return waited / self.tokens

    @property
    def max_delay(self) -> int:
        """Iterations that the step's latest document waited."""
        return max(int(micro_batch.documents[:, DELAY].max()) for micro_batch in self.micro_batches)

    def of_rank(self, dp_rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one data-parallel rank, by their index: the `place` of its actions."""
        return tuple(m for m in self.micro_batches if m.dp_rank == dp_rank)

    def digest(self, before: int) -> int:
        """48 bits, which float64 holds exactly, that tell this plan and all before it from others.

        What not all ranks know is left out of it: how others divide their micro-batches.

        Args:
            before: digest of the plan before this one.
        """
        found = hashlib.blake2b(str(before).encode(), digest_size=6)
        for m in self.micro_batches:
            found.update(str((m.dp_rank, m.index, m.length, m.padding, m.merged)).encode())
            found.update(m.documents.tobytes() + (b"" if m.slices is None else m.slices.tobytes()))
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
    """Largest over mean value of micro-batches; where passes have their own, maxima and means of both passes
    add up.

    Args:
        values: work or time of each of the micro-batches.
    """
    pairs = list(zip(micro_batches, values, strict=True))
    return imbalance_degree(*([value for m, value in pairs if kind in m.passes] for kind in "FB"))


def imbalance_degree(*passes: Sequence[float] | Floats) -> float:
    """max / mean; 1.0 is perfect balance. Of nothing at all it is 1.0 too.

    Args:
        passes: what one pass after the other takes of each micro-batch; both maxima and means add up.
    """
    values = [np.asarray(one, dtype=np.float64) for one in passes]
    mean = sum(float(one.mean()) for one in values if one.size)
    return sum(float(one.max()) for one in values if one.size) / mean if mean > 0 else 1.0
