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
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Ints
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import ARRIVAL, NOTHING, Waiting, arrived, delayed, restore, split
from wlb_titan.packing.bins import REMAINS, Bins
from wlb_titan.packing.policy import Packing, PackingJob, PackingPolicy
from wlb_titan.plan import LENGTH

PATIENCE = 4


class FixedGreedy(PackingPolicy):
    """Packs the documents of several global batches into micro-batches of the context window (Fixed-4D).

    The packs are sorted by work and dealt out N at a time, so that the packs of one step are alike. Documents
    arrive when their global batches are read, so the delay of the k-th step after that is k.

    Raises:
        PlanError: there are fewer than one global batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        free = (*PackingPolicy.Config.free, "cost_model")

        global_batches: Annotated[int, Interval(ge=1, le=4096)] = 1
        """Global batches that are packed together, the paper's packing window. More of them balance better
        and mix the order of the documents more."""

        former: ClassVar[Mapping[str, str]] = {"window": "global_batches"}

    variable_length = False
    balances = True

    def __init__(self, config: Config, stream: DocumentStream, job: PackingJob) -> None:
        if config.global_batches < 1:
            raise PlanError(
                f"global_batches is {config.global_batches}; it must be at least 1.",
                setting="packing.global_batches",
            )
        self._stream = stream
        self._micro_batches = job.micro_batches
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
        return Packing(packs, gap=self._gap)

    def _pack_window(self) -> None:
        """Fills `_ready` with the packs of the coming steps.

        Every pack gets a token to predict: the documents that have one are placed first, there are at least
        as many as packs, and each of the first finds an empty pack.
        """
        documents = self._read()
        lengths = documents[:, LENGTH]
        overdue = self._iteration - documents[:, ARRIVAL] >= PATIENCE * self._packs // self._micro_batches
        order = np.lexsort((-lengths, ~overdue, ~self._stream.has_label(documents)))
        documents, lengths = documents[order], lengths[order]
        assigned = Bins(self._packs, self._stream.window).place(lengths, lengths.astype(np.float64) ** 2)
        fits = assigned != REMAINS
        self._remained = documents[~fits]
        documents, assigned = documents[fits], assigned[fits]
        better, gap = self._improved(documents[:, LENGTH], assigned)
        labelled = better[self._stream.has_label(documents)]
        if np.bincount(labelled, minlength=self._packs).all():  # equation 1 would allow an empty pack
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
        """What was left, and as much of the stream as fills the packs, or gives each a token to predict."""
        window = self._stream.window
        budget = self._packs * window - int(self._remained[:, LENGTH].sum())
        read = [self._remained]
        labelled = int(self._stream.has_label(self._remained).sum())
        while budget > 0 or labelled < self._packs:
            pieces = self._stream.fill(min(window, budget) if budget > 0 else window)
            read.append(arrived(pieces, self._iteration))
            labelled += int(self._stream.has_label(pieces).sum())
            budget -= window
        return np.concatenate(read)

    @property
    def waiting(self) -> Ints:
        ready = [pack for step in self._ready for pack in step]
        return np.concatenate([self._remained, *ready])[:, LENGTH]

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self._iteration,
            "remained": self._remained.tolist(),
            "ready": [[pack.tolist() for pack in step] for step in self._ready],
            "gap": self._gap,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iteration = int(state["iteration"])
        self._remained = restore(state["remained"])
        self._ready = [[restore(pack) for pack in step] for step in state["ready"]]
        self._gap = state["gap"]
