"""PackFlow: in which order the ranks of a pipeline run MicroPacks (SlimPack, section 4.2).

1F1B over MicroPacks: forward passes in the order of the packs, backward passes first in first out between
documents and last in first out between the slices of one, so that the backward pass of a document begins when
the forward pass of its last slice is over. Two ranks, packs 0, 1 and 2 slices of one document, 3 and 4 whole:

    rank 0: F0 F1 F2 F3 B2 F4 B1 B0 B3 B4        rank 1: F0 F1 F2 B2 F3 B1 F4 B0 B3 B4

With several stages a rank, packs go through a rank's stages in rounds of as many as there are ranks, as in
Interleaved1F1B. A rank so has two lists, of forward and of backward passes, and the step is run ahead of time
to find how they go into each other: the pass that can begin first runs, and where both can, the one of the
other kind than the pass before. Before the k-th backward pass at most this many forward passes are done:

    max(those that it waits for, those that the first waits for + k) + warm-up + slack

where the warm-up is that of 1F1B, and just those that it waits for without a pipeline. Nor may the tokens in
flight exceed a limit; but a forward pass that the next backward pass waits for always runs, so that no order
waits for itself. With equal packs and no slack this is 1F1B or Interleaved1F1B, action for action in time,
whatever the slices. Times are predicted, stages take equal ones, and communication is free; every rank of the
job finds the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import Action, Flow

Kind = Literal["F", "B"]
FLOW_SCHEDULES = ("1F1B", "Interleaved1F1B")
"""The schedules whose place PackFlow takes: of one and of several stages a rank. Both put stage s on rank
s mod ranks, which `runtime.pipeline.build.PackFlowSchedule` relies on."""


@dataclass(frozen=True, slots=True)
class Packs:
    """The n MicroPacks of a data-parallel rank, as the order of passes sees them.

    Attributes:
        forward: float64 (n,), time of each pack's forward pass through all stages of one rank, in any unit.
        tokens: float64 (n,), that a forward pass puts in flight.
        backward: float64 (n,), time of the backward passes, in the order of running.
        freed: float64 (n,), that these take out of flight.
        needed: the last forward pass that each of them waits for; never falls.
    """

    forward: Floats
    tokens: Floats
    backward: Floats
    freed: Floats
    needed: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackOrder:
    """An order of passes, and what it comes to.

    Attributes:
        flow: what each pipeline rank runs; the `place` of a backward pass is its place in their order.
        seconds: time of the step, in the unit of the passes' times.
    """

    flow: Flow
    seconds: float


def packflow(packs: Packs, shape: PipelineShape, *, slack: int = 0, limit: float | None = None) -> PackOrder:
    """The order of passes, by running them as the module says.

    Args:
        shape: the pipeline; its schedule's name is not looked at.
        slack: packs in flight beyond the need.
        limit: tokens that a rank may have in flight; None for no limit.
    """
    return _Run(packs, shape, slack, limit).schedule()


def backward_order(sliced: Sequence[int]) -> list[int]:
    """The order of backward passes: first in first out between documents, last in first out within one.

    Example: packs 0, 1 and 2 with slices of document 7, pack 3 with none, 4 and 5 with slices of document 9
    run backward as 2 1 0 3 5 4.

    Args:
        sliced: the document of which each pack has a slice, in the order of forward passes, -1 where
            it has none. The packs of a document follow one another.
    """
    order: list[int] = []
    for document, group in itertools.groupby(range(len(sliced)), sliced.__getitem__):
        packs = list(group)
        order.extend(packs if document < 0 else reversed(packs))
    return order


def forward_needed(sliced: Sequence[int]) -> list[int]:
    """The forward pass that each pack's backward pass waits for: the last one with its document's
    slices.

    Example: packs with slices of the documents 7, 7, 7, none wait for 2, 2, 2 and 3.
    """
    last = {document: pack for pack, document in enumerate(sliced)}
    return [pack if document < 0 else last[document] for pack, document in enumerate(sliced)]


class _Run:
    """A step under way: per stage the passes done, per rank the time and what is in flight."""

    def __init__(self, packs: Packs, shape: PipelineShape, slack: int, limit: float | None) -> None:
        ranks, chunks = shape.ranks, shape.chunks
        self._shape = shape
        self._limit = np.inf if limit is None else limit
        self._forward = (packs.forward / chunks).tolist()
        self._backward = (packs.backward / chunks).tolist()
        self._tokens = (packs.tokens / chunks).tolist()
        self._freed = (packs.freed / chunks).tolist()
        self._needed = packs.needed
        # What each rank runs: (which of its stages, place), in the order of its rounds.
        self._forwards = _rounds(len(packs.forward), ranks, range(chunks))
        self._backwards = _rounds(len(packs.backward), ranks, range(chunks - 1, -1, -1))
        number = {run: k for k, run in enumerate(self._forwards)}
        waits = (number[chunks - 1, self._needed[place]] + 1 for _, place in self._backwards)
        self._waits = list(itertools.accumulate(waits, max))
        """For each backward pass, the forward passes of its rank that must be over."""
        self._ahead = [(2 if chunks > 1 else 1) * (ranks - 1 - r) + slack * chunks for r in range(ranks)]
        self._ends: dict[str, list[list[float]]] = {k: [[] for _ in range(shape.stages)] for k in "FB"}
        self._free = [0.0] * ranks
        self._live = [0.0] * ranks
        self._done = {"F": [0] * ranks, "B": [0] * ranks}
        self._actions: list[list[Action]] = [[] for _ in range(ranks)]

    def schedule(self) -> PackOrder:
        ranks = range(self._shape.ranks)
        nexts = [self._next(rank) for rank in ranks]
        for _ in range((len(self._forwards) + len(self._backwards)) * len(ranks)):
            rank = min(ranks, key=lambda rank: nexts[rank][0])
            for changed in self._run(rank, *nexts[rank]):
                nexts[changed] = self._next(changed)
        return PackOrder(tuple(map(tuple, self._actions)), max(self._free))

    def _next(self, rank: int) -> tuple[float, Kind]:
        """When the rank can begin a pass, and which: at infinity where it waits for another rank."""
        forward, backward = self._forward_begin(rank), self._backward_begin(rank)
        alternates = bool(self._actions[rank]) and self._actions[rank][-1].kind == "B"
        if forward < backward or (forward == backward and alternates):
            return forward, "F"
        return backward, "B"

    def _forward_begin(self, rank: int) -> float:
        done, back = self._done["F"][rank], self._done["B"][rank]
        if done == len(self._forwards):
            return np.inf
        chunk, place = self._forwards[done]
        if back < len(self._backwards) and done >= self._waits[back]:
            # Alone, a rank has nothing to hide, and would only hold more.
            ahead = self._waits[0] + back if self._shape.ranks > 1 else 0
            if done >= max(self._waits[back], ahead) + self._ahead[rank]:
                return np.inf
            if self._live[rank] + self._tokens[place] > self._limit:
                return np.inf
        stage = chunk * self._shape.ranks + rank
        if stage == 0:
            return self._free[rank]
        ready = self._ends["F"][stage - 1]
        return max(ready[place], self._free[rank]) if place < len(ready) else np.inf

    def _backward_begin(self, rank: int) -> float:
        done = self._done["B"][rank]
        if done == len(self._backwards):
            return np.inf
        chunk, place = self._backwards[done]
        stage = chunk * self._shape.ranks + rank
        if stage == self._shape.stages - 1:
            ready, place = self._ends["F"][stage], self._needed[place]
        else:
            ready = self._ends["B"][stage + 1]
        return max(ready[place], self._free[rank]) if place < len(ready) else np.inf

    def _run(self, rank: int, begin: float, kind: Kind) -> set[int]:
        """Runs a pass; returns the ranks for which something changed."""
        assert begin < np.inf, "every rank waits for another"
        chunk, place = (self._forwards if kind == "F" else self._backwards)[self._done[kind][rank]]
        stage = chunk * self._shape.ranks + rank
        if kind == "F":
            end = begin + self._forward[place]
            self._live[rank] += self._tokens[place]
            self._actions[rank].append(Action("F", stage, place))
            neighbour = stage + 1
        else:
            end = begin + self._backward[place]
            self._live[rank] -= self._freed[place]
            self._actions[rank].append(Action("B", stage, place))
            neighbour = stage - 1
        self._done[kind][rank] += 1
        self._ends[kind][stage].append(end)
        self._free[rank] = end
        return {rank, neighbour % self._shape.ranks}


def _rounds(n: int, each: int, chunks: Iterable[int]) -> list[tuple[int, int]]:
    """(chunk, place) in rounds: `each` places through every chunk, then the next places."""
    return [
        (chunk, place)
        for first in range(0, n, each)
        for chunk in chunks
        for place in range(first, min(first + each, n))
    ]
