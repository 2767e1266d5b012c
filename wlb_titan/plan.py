"""The plan of one optimizer step: which documents each micro-batch of the whole job holds.

Every rank computes the same plan from the same lengths, so a plan is never communicated. As JSON
(`wlb-titan plan --output`) it is one object a line:

    {"iteration": 0, "plan_ms": 1.9, "imbalance": 1.008, "micro_batches": [
       {"dp_rank": 0, "index": 0, "length": 4096, "padding": 12, "workload": 1.7e15,
        "documents": [{"id": 17, "start": 0, "length": 4084, "delay": 0}],
        "sharding": "per_sequence", "ranks": [[[0, 0, 1024], [0, 3072, 1012]], ...]}]}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ID, START, LENGTH, DELAY = range(4)  # columns of MicroBatch.documents
DOCUMENT, OFFSET, COUNT = range(3)  # columns of MicroBatch.ranks[r]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The documents of one forward and backward pass, in the order in which they lie in the sequence.

    Attributes:
        dp_rank: data-parallel rank that runs it.
        index: its place among that rank's micro-batches of the step, from 0.
        length: tokens, padding included; divisible by what context and tensor parallelism need.
        padding: tokens at the sequence's end that belong to no document.
        workload: predicted forward and backward work, in the cost model's unit.
        documents: int64 (n, 4), columns ID (position in the stream), START (first token of this piece
            within the document), LENGTH (tokens), DELAY (iterations since the piece arrived).
        sharding: name of the sharding chosen for it; None without context parallelism.
        ranks: per context-parallel rank an int64 (m, 3), columns DOCUMENT (row of `documents`), OFFSET
            (first token within that piece), COUNT (tokens), in the order in which the rank holds them;
            what is left of the rank's length / context_parallel tokens is padding, at its end.
    """

    dp_rank: int
    index: int
    length: int
    padding: int
    workload: float
    documents: NDArray[np.int64]
    sharding: str | None = None
    ranks: tuple[NDArray[np.int64], ...] | None = None

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
        gap: of `fixed_solver`, how far its packing may be from the best, relatively; 0 is a proven optimum.
    """

    iteration: int
    micro_batches: tuple[MicroBatch, ...]
    plan_ms: float
    waiting_documents: int = 0
    waiting_tokens: int = 0
    lost_tokens: int = 0
    gap: float | None = None

    @property
    def imbalance(self) -> float:
        """Largest over mean workload of the micro-batches (the imbalance degree of the paper's Table 2)."""
        return imbalance_degree([micro_batch.workload for micro_batch in self.micro_batches])

    @property
    def tokens(self) -> int:
        """Tokens of documents, padding left out."""
        return sum(micro_batch.length - micro_batch.padding for micro_batch in self.micro_batches)

    @property
    def padding(self) -> int:
        """Tokens of padding in all micro-batches."""
        return sum(micro_batch.padding for micro_batch in self.micro_batches)

    @property
    def delay(self) -> float:
        """Iterations that a token waited, averaged over the step's tokens."""
        waited = sum(int(m.documents[:, LENGTH] @ m.documents[:, DELAY]) for m in self.micro_batches)
        return waited / self.tokens

    @property
    def max_delay(self) -> int:
        """Iterations that the step's latest document waited."""
        return max(int(micro_batch.documents[:, DELAY].max()) for micro_batch in self.micro_batches)

    def of_rank(self, dp_rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one data-parallel rank, in the order in which it runs them."""
        return tuple(m for m in self.micro_batches if m.dp_rank == dp_rank)

    def to_json(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "plan_ms": self.plan_ms,
            "imbalance": self.imbalance,
            "micro_batches": [micro_batch.to_json() for micro_batch in self.micro_batches],
        }


def imbalance_degree(workloads: Sequence[float] | NDArray[np.float64]) -> float:
    """max / mean; 1.0 is perfect balance. Of nothing at all it is 1.0 too."""
    values = np.asarray(workloads, dtype=np.float64)
    mean = values.mean() if values.size else 0.0
    return float(values.max() / mean) if mean > 0 else 1.0
