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
same for all, "length", "padding" and "workload" are a rank's own share. Under the asymmetric partition
"backward" has the micro-batches of backward passes, as "micro_batches" has those of forward passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

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
        place: place of the micro-batch in the order in which they run, from 0.
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
"""Of each pipeline rank what it runs, in order."""

T = TypeVar("T", covariant=True)
U = TypeVar("U")


class ByPass(NamedTuple, Generic[T]):
    """What belongs to the packs of forward and of backward passes; the same object where they are the same.

    Backward passes have packs of their own under the asymmetric partition.
    """

    forward: T
    backward: T

    @property
    def same(self) -> bool:
        """Whether both are the same packs."""
        return self.backward is self.forward

    @property
    def apart(self) -> tuple[T, ...]:
        """Both, or one where they are the same."""
        return (self.forward,) if self.same else tuple(self)

    def of(self, kind: str) -> T:
        """Those of a pass of this kind, as of `Action`."""
        return self.forward if kind == "F" else self.backward

    def each(self, make: Callable[..., U], *arguments: Any) -> ByPass[U]:
        """What is made of either, with these arguments besides; of the same packs it is made once."""
        forward = make(self.forward, *arguments)
        return ByPass(forward, forward if self.same else make(self.backward, *arguments))


class Slices(NamedTuple):
    """What other micro-batches have of the documents of one.

    Attributes:
        prefix: int64 (n,), tokens before each document's own, which its queries see too.
        cached: bool (n,), documents whose keys every context-parallel rank keeps, as any of them may have
            queries of another slice.
    """

    prefix: Ints
    cached: Bools

    @classmethod
    def of(cls, slices: Ints | None, lengths: Ints, one_pass: bool) -> Slices | None:
        """The slices by a micro-batch's `slices` and tokens; None where its documents are not sliced."""
        if slices is None:
            return None
        return cls(slices[:, PREFIX], (slices[:, TOTAL] > lengths) | one_pass)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The documents of one forward and backward pass, in the order in which they lie in the sequence.

    Several data-parallel ranks may share one (DP-Merge). Each then has an entry of its own with the same
    documents, and length, padding and workload are its share of them.

    Attributes:
        dp_rank: data-parallel rank that runs it.
        index: its place among that rank's micro-batches of the step, from 0.
        length: tokens, padding included; divisible by what context and tensor parallelism need.
        padding: tokens at the sequence's end that belong to no document.
        workload: predicted forward and backward work, in the cost model's unit.
        documents: int64 (n, 4), columns ID (position in the stream), START (first token of this piece
            within the document), LENGTH (tokens), DELAY (iterations since the piece arrived).
        sharding: name of the sharding chosen for it; None where a single rank has all of it.
        ranks: per context-parallel rank an int64 (m, 3), columns DOCUMENT (row of `documents`), OFFSET
            (first token within that piece), COUNT (tokens), in the order in which the rank holds them;
            what is left of the rank's length / context_parallel tokens is padding, at its end. Where
            data-parallel ranks share it, those of the first of them, then those of the second, ...
        slices: int64 (n, 2), of each row of `documents` PREFIX (tokens of the piece before it, which other
            micro-batches have) and TOTAL (tokens of the whole piece); None where documents are not sliced.
        merged: the data-parallel ranks that share it, `dp_rank` among them; empty where it is that rank's.
        one_pass: whether the other direction has other micro-batches, in which any document may be cut.
    """

    dp_rank: int
    index: int
    length: int
    padding: int
    workload: float
    documents: Ints
    sharding: str | None = None
    ranks: tuple[Ints, ...] | None = None
    slices: Ints | None = None
    merged: range = range(0)
    one_pass: bool = False

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
        """What other micro-batches have of its documents; None where they are not sliced."""
        return Slices.of(self.slices, self.documents[:, LENGTH], self.one_pass)

    @property
    def document_lengths(self) -> Ints:
        """int64 (k,), tokens of the documents that begin here, with their slices elsewhere."""
        if self.slices is None:
            return self.documents[:, LENGTH]
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
    backward: tuple[MicroBatch, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "backward", self.backward or self.micro_batches)

    @property
    def imbalance(self) -> float:
        """Largest over mean workload of the micro-batches (the imbalance degree of the paper's Table 2), of
        both passes together."""
        return imbalance_degree(*([m.workload for m in micro_batches] for micro_batches in self.by_pass))

    @property
    def by_pass(self) -> ByPass[tuple[MicroBatch, ...]]:
        """All micro-batches, of forward and of backward passes."""
        return ByPass(self.micro_batches, self.backward)

    @property
    def longest(self) -> int:
        """Tokens of the longest micro-batch, padding included."""
        return max(m.length for micro_batches in self.by_pass for m in micro_batches)

    @property
    def packs(self) -> tuple[MicroBatch, ...]:
        """The micro-batches without repetition: of one that ranks share only the first rank's."""
        return tuple(m for m in self.micro_batches if not m.merged or m.dp_rank == m.merged[0])

    @property
    def tokens(self) -> int:
        """Tokens of documents, padding left out."""
        return sum(micro_batch.length - micro_batch.padding for micro_batch in self.micro_batches)

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
        return sum(micro_batch.padding for micro_batch in self.micro_batches)

    @property
    def delay(self) -> float:
        """Iterations that a token waited, averaged over the step's tokens."""
        waited = sum(int(m.documents[:, LENGTH] @ m.documents[:, DELAY]) for m in self.packs)
        return waited / self.tokens

    @property
    def max_delay(self) -> int:
        """Iterations that the step's latest document waited."""
        return max(int(micro_batch.documents[:, DELAY].max()) for micro_batch in self.micro_batches)

    def of_rank(self, dp_rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one data-parallel rank, in the order in which it runs them."""
        return tuple(m for m in self.micro_batches if m.dp_rank == dp_rank)

    def replica(self, dp_rank: int) -> ByPass[tuple[MicroBatch, ...]]:
        """Those of its forward and of its backward passes."""
        return self.by_pass.each(lambda all_: tuple(m for m in all_ if m.dp_rank == dp_rank))

    def digest(self, before: int) -> int:
        """48 bits, which float64 holds exactly, that tell this plan and all before it from others.

        What not all ranks know is left out of it: how others divide their micro-batches.

        Args:
            before: digest of the plan before this one.
        """
        found = hashlib.blake2b(str(before).encode(), digest_size=6)
        for m in (m for of_pass in self.by_pass.apart for m in of_pass):
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
        if not self.by_pass.same:
            record["backward"] = [micro_batch.to_json() for micro_batch in self.backward]
        if self.flows is not None:
            record["order"] = [[[a.short() for a in rank] for rank in flow] for flow in self.flows]
        return record


def micro_batches_of(plans: Sequence[Plan]) -> ByPass[list[MicroBatch]]:
    """The micro-batches of several steps, one step after the other."""
    forward, backward = ([m for plan in plans for m in plan.by_pass[which]] for which in (0, 1))
    return ByPass(forward, forward if all(plan.by_pass.same for plan in plans) else backward)


def imbalance_degree(*passes: Sequence[float] | Floats) -> float:
    """max / mean; 1.0 is perfect balance. Of nothing at all it is 1.0 too.

    Args:
        passes: what one pass after the other takes of each micro-batch; both maxima and means add up.
    """
    values = [np.asarray(one, dtype=np.float64) for one in passes]
    mean = sum(float(one.mean()) for one in values if one.size)
    return sum(float(one.max()) for one in values if one.size) / mean if mean > 0 else 1.0
