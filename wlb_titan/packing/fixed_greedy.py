"""`fixed_greedy`, on which `fixed_solver` improves: fixed-length packing, the baseline of section 3.2.

The documents of several global batches, cut at the ends of context windows as a plain loader cuts them, are
packed anew into as many micro-batches of at most the context window, so that the largest sum of squared
lengths, the attention work, is as small as possible (equation 1). Micro-batches are padded up to the window,
so all have one shape.

Nothing is cut once more, so a few short documents fit nowhere; they are left for the next packing, which then
takes so many tokens less from the stream. After `PATIENCE` packings they come first, so that none is left out
for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Ints
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import (
    ARRIVAL,
    NOTHING,
    Waiting,
    arrived,
    delayed,
    fills,
    leading_first,
    split,
    topped_up,
)
from wlb_titan.packing.bins import REMAINS, Bins
from wlb_titan.packing.policy import Packing, PackingPolicy, drafts
from wlb_titan.plan import LENGTH

if TYPE_CHECKING:
    from wlb_titan.job import Job

PATIENCE = 4


class FixedGreedy(PackingPolicy):
    """Packs the documents of several global batches into micro-batches of the context window (Fixed-4D).

    The packs are sorted by work and dealt out N at a time, so that the packs of one step are alike. The paper
    does not say which packs share a step, but its imbalance of 1.22, 1.11 and 1.08 over 2, 4 and 8 global
    batches (Table 2) needs this: on our lengths it is 1.23, 1.12 and 1.06, and dealt in the order of the
    stream 1.35, 1.32 and 1.31. The price is that heavy steps come before light ones. Documents arrive when
    their global batches are read, so the delay of the k-th step after that is k.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        global_batches: Annotated[int, Interval(ge=1, le=4096)] = 1
        """Global batches that are packed together, the paper's packing window. More of them balance better
        and mix the order of the documents more."""

        former: ClassVar[Mapping[str, str]] = {"window": "global_batches"}

    variable_length = False
    balances = True

    def __init__(self, config: Config, stream: DocumentStream, job: Job) -> None:
        if config.global_batches < 1:
            raise PlanError(
                f"global_batches is {config.global_batches}; it must be at least 1.",
                setting="packing.global_batches",
            )
        self._stream = stream
        self._micro_batches, self._least = job.micro_batches, job.degrees.context
        self._packs = job.micro_batches * config.global_batches
        self._iteration = 0
        self._remained: Waiting = NOTHING
        self._ready: list[list[Waiting]] = []  # the packs of the window's coming steps
        self._gap: float | None = None

    def next(self) -> Packing:
        if not self._ready:
            self._pack_window()
        packs = [delayed(pack, self._iteration) for pack in self._ready.pop(0)]
        self._iteration += 1
        return Packing(drafts(packs), gap=self._gap)

    def _pack_window(self) -> None:
        """Fills `_ready` with the packs of the coming steps."""
        documents = self._read()
        tokens, lengths = self._stream.labelled(documents), documents[:, LENGTH]
        overdue = self._iteration - documents[:, ARRIVAL] >= PATIENCE * self._packs // self._micro_batches
        order = np.lexsort((-lengths, ~overdue, tokens == 0))
        order = leading_first(order, tokens >= self._least, self._packs)
        documents, lengths, tokens = documents[order], lengths[order], tokens[order]
        assigned = Bins(self._packs, self._stream.window).place(lengths, lengths.astype(np.float64) ** 2)
        fits = assigned != REMAINS
        self._remained = documents[~fits]
        documents, tokens = documents[fits], tokens[fits]
        assigned = topped_up(assigned[fits], tokens, self._packs, self._least)
        better, gap = self._improved(documents[:, LENGTH], assigned)
        if np.bincount(better, tokens, self._packs).min() >= self._least:  # of which equation 1 says nothing
            assigned, self._gap = better, gap
        packs = split(documents, assigned, self._packs)
        work = np.bincount(assigned, documents[:, LENGTH].astype(np.float64) ** 2, self._packs)
        order = np.argsort(-work, kind="stable")
        self._ready = [
            [packs[pack] for pack in order[first : first + self._micro_batches]]
            for first in range(0, self._packs, self._micro_batches)
        ]

    def _improved(self, lengths: Ints, assigned: Ints) -> tuple[Ints, float | None]:
        """A better packing, and how far it may be from the best; the greedy one as it is."""
        return assigned, None

    def _read(self) -> Waiting:
        """What was left, and as much of the stream as fills the packs, or is enough for all of them."""
        window = self._stream.window
        budget = self._packs * window - int(self._remained[:, LENGTH].sum())
        read = [self._remained]
        while budget > 0 or fills(self._stream.labelled(np.concatenate(read)), self._least) < self._packs:
            pieces = self._stream.fill(min(window, budget) if budget > 0 else window)
            read.append(arrived(pieces, self._iteration))
            budget -= window
        return np.concatenate(read)

    @property
    def waiting(self) -> Waiting:
        return np.concatenate([pack for step in self._ready for pack in step] + [self._remained])

    def state_dict(self) -> dict[str, Any]:
        packs = [[len(pack) for pack in step] for step in self._ready]
        return {"iteration": self._iteration, "packs": packs, "gap": self._gap}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iteration, self._gap = int(state["iteration"]), state["gap"]
        ends = np.cumsum([length for step in state["packs"] for length in step], dtype=np.int64)
        *packs, self._remained = np.split(state["waiting"], ends)
        ready = iter(packs)
        self._ready = [[next(ready) for _ in step] for step in state["packs"]]
