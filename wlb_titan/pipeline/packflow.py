"""PackFlow: in which order the ranks of a pipeline run MicroPacks (SlimPack, section 4.2; docs/slimpack.md).

Forward passes run in the order of the packs, backward passes first in first out between documents and last in
first out between the slices of one, as a document's last slice is the first that can go backward. Two ranks,
packs 0, 1 and 2 are slices of one document, 3 and 4 hold whole ones:

    rank 0: F0 F1 F2 F3 B2 F4 B1 B0 B3 B4        rank 1: F0 F1 F2 B2 F3 B1 F4 B0 B3 B4

With several stages on a rank, packs go through them in rounds of as many packs as there are ranks, as in
Interleaved1F1B. So a rank has two lists, of forward and of backward passes. To merge them the step is
simulated: the pass that can begin first runs; if both can, forward and backward passes alternate. Before the
k-th backward pass at most this many forward passes are done:

    max(those that it waits for, those that the first waits for + k) + warm-up + slack

where the warm-up is that of 1F1B; without a pipeline it is just those that it waits for. Tokens in flight
have a limit too, but a forward pass that the next backward pass waits for always runs, so there is no
deadlock. Times are predicted, stages are taken as equal and communication as free; every rank of the job
finds the same order.
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


@dataclass(frozen=True, slots=True)
class Packs:
    """The n MicroPacks of a data-parallel rank, float64 (n,); backward passes in the order of running.

    Times are those through all stages of one rank, in any unit.
    """

    forward: Floats  # times of forward passes
    tokens: Floats  # that forward passes put in flight
    backward: Floats  # times of backward passes
    freed: Floats  # tokens that backward passes take out of flight
    needed: Sequence[int]  # the last forward pass that each backward pass waits for; never falls


@dataclass(frozen=True, slots=True)
class PackOrder:
    """An order of passes, and the time that it takes."""

    flow: Flow  # the `place` of a backward pass counts backward passes
    seconds: float  # of the step, in the unit of the passes' times


def packflow(packs: Packs, shape: PipelineShape, *, slack: int = 0, limit: float | None = None) -> PackOrder:
    """The order of passes that the module describes.

    Args:
        slack: packs in flight beyond what 1F1B needs.
        limit: most tokens in flight on a rank.
    """
    return _Run(packs, shape, slack, limit).schedule()


class _Run:
    """The simulation of a step."""

    def __init__(self, packs: Packs, shape: PipelineShape, slack: int, limit: float | None) -> None:
        ranks, chunks = shape.ranks, shape.chunks
        self._shape = shape
        self._limit = np.inf if limit is None else limit
        # By kind of pass and place: times, and tokens put in flight.
        self._seconds = {"F": (packs.forward / chunks).tolist(), "B": (packs.backward / chunks).tolist()}
        self._tokens = {"F": (packs.tokens / chunks).tolist(), "B": (-packs.freed / chunks).tolist()}
        self._needed = packs.needed
        # The passes of each rank, in rounds: (which of its stages, place).
        self._passes = {
            "F": _rounds(len(packs.forward), ranks, range(chunks)),
            "B": _rounds(len(packs.backward), ranks, range(chunks - 1, -1, -1)),
        }
        number = {run: k for k, run in enumerate(self._passes["F"])}
        waits = (number[chunks - 1, self._needed[place]] + 1 for _, place in self._passes["B"])
        self._waits = list(itertools.accumulate(waits, max))
        """For each backward pass, how many forward passes of its rank must be over."""
        self._warm_up = [(2 if chunks > 1 else 1) * (ranks - 1 - r) + slack * chunks for r in range(ranks)]
        self._ends: dict[str, list[list[float]]] = {k: [[] for _ in range(shape.stages)] for k in "FB"}
        self._free = [0.0] * ranks  # when each rank is free
        self._live = [0.0] * ranks  # tokens in flight
        self._done = {"F": [0] * ranks, "B": [0] * ranks}
        self._actions: list[list[Action]] = [[] for _ in range(ranks)]

    def schedule(self) -> PackOrder:
        ranks = range(self._shape.ranks)
        nexts = [self._next(rank) for rank in ranks]
        for _ in range(sum(map(len, self._passes.values())) * len(ranks)):
            rank = min(ranks, key=lambda rank: nexts[rank][0])
            for changed in self._run(rank, *nexts[rank]):
                nexts[changed] = self._next(changed)
        return PackOrder(tuple(map(tuple, self._actions)), max(self._free))

    def _next(self, rank: int) -> tuple[float, Kind]:
        """When the rank can start a pass, and which kind; infinite while it waits for another rank."""
        forward, backward = self._forward_start(rank), self._backward_start(rank)
        alternates = bool(self._actions[rank]) and self._actions[rank][-1].kind == "B"
        if forward < backward or (forward == backward and alternates):
            return forward, "F"
        return backward, "B"

    def _forward_start(self, rank: int) -> float:
        done, back = self._done["F"][rank], self._done["B"][rank]
        if done == len(self._passes["F"]):
            return np.inf
        chunk, place = self._passes["F"][done]
        if back < len(self._passes["B"]) and done >= self._waits[back]:
            # A rank without a pipeline has no bubble to fill, and would only use more memory.
            ahead = self._waits[0] + back if self._shape.ranks > 1 else 0
            if done >= max(self._waits[back], ahead) + self._warm_up[rank]:
                return np.inf
            if self._live[rank] + self._tokens["F"][place] > self._limit:
                return np.inf
        stage = chunk * self._shape.ranks + rank
        if stage == 0:
            return self._free[rank]
        ready = self._ends["F"][stage - 1]
        return max(ready[place], self._free[rank]) if place < len(ready) else np.inf

    def _backward_start(self, rank: int) -> float:
        done = self._done["B"][rank]
        if done == len(self._passes["B"]):
            return np.inf
        chunk, place = self._passes["B"][done]
        stage = chunk * self._shape.ranks + rank
        if stage == self._shape.stages - 1:
            ready, place = self._ends["F"][stage], self._needed[place]
        else:
            ready = self._ends["B"][stage + 1]
        return max(ready[place], self._free[rank]) if place < len(ready) else np.inf

    def _run(self, rank: int, start: float, kind: Kind) -> set[int]:
        """Runs a pass; returns the ranks whose next pass may have changed."""
        assert start < np.inf, "every rank waits for another"
        chunk, place = self._passes[kind][self._done[kind][rank]]
        stage = chunk * self._shape.ranks + rank
        self._free[rank] = start + self._seconds[kind][place]
        self._live[rank] += self._tokens[kind][place]
        self._actions[rank].append(Action(kind, stage, place))
        self._done[kind][rank] += 1
        self._ends[kind][stage].append(self._free[rank])
        return {rank, (stage + (1 if kind == "F" else -1)) % self._shape.ranks}


def _rounds(n: int, size: int, chunks: Iterable[int]) -> list[tuple[int, int]]:
    """(chunk, place) in rounds: `size` places through every chunk, then the next places."""
    return [
        (chunk, place)
        for first in range(0, n, size)
        for chunk in chunks
        for place in range(first, min(first + size, n))
    ]
