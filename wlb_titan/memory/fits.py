"""Memory at a step's peak, and what fits a device: the longest micro-batches, the most in flight."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from wlb_titan.errors import PlanError
from wlb_titan.layers.rates import Rates
from wlb_titan.memory.rank import GIB, PackSize, Passes, PipelineRank, RankMemory
from wlb_titan.memory.run import RunArrays, RunPacks
from wlb_titan.memory.slice_cache import CachedSlice
from wlb_titan.plan import Action

USABLE = 0.9  # share of memory that predictions may fill; the rest is for what they do not count

USABLE_IN_SLICES = 0.85
"""The share for sliced documents: packs of ever-changing lengths leave more fragments. Reserved and allocated
memory were 12 % apart on an H100, against 3 % without slices."""

LONGEST = 2  # context windows of a micro-batch at most, where the user sets no bound: as in WLB-LLM

SLICES = 16  # of `Fitting.document`


def usable_share(slices: bool) -> float:
    return USABLE_IN_SLICES if slices else USABLE


def fullest(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


def in_a_line(rank: RankMemory) -> str:
    head, *terms = rank.explain().splitlines()
    return f"{head}: {' + '.join(' '.join(term.split()) for term in terms)}"


@dataclass(frozen=True)
class Fitting:
    """Which of a job's steps fit a device."""

    rates: Rates
    slices: bool = False  # whether long documents are computed in slices, all of them in flight together
    sharers: int = 1  # data-parallel ranks that share every micro-batch
    regroups: bool = False  # whether backward passes have packs of their own, which compute layers again
    sparing: bool = False  # whether layers that may have a mix, and have none yet, keep least

    @property
    def usable(self) -> float:
        """Bytes of a device that predictions may fill."""
        return self.rates.cluster.memory * usable_share(self.slices)

    @cached_property
    def pipeline_ranks(self) -> tuple[PipelineRank, ...]:
        ranks = range(self.rates.shape.ranks)
        return tuple(PipelineRank(self.rates, number, regroups=self.regroups) for number in ranks)

    @property
    def room(self) -> str:
        return f"the {self.usable / GIB:.2f} GiB of a device that may be filled"

    def peak(self, passes: Passes) -> tuple[RankMemory, ...]:
        """The peak of each pipeline rank over a replica's step."""
        kind, peaks = -1 if self.sparing else None, []
        for start, packs in runs(self.rates, passes):
            arrays = [RunArrays(rank, packs, passes.flow, reduced=start > 0) for rank in self.pipeline_ranks]
            peaks.append([run.peak(run.counts(kind)) for run in arrays])
        return tuple(self.with_dimensions(fullest(of_rank)) for of_rank in zip(*peaks, strict=True))

    def with_dimensions(self, rank: RankMemory) -> RankMemory:
        """A rank's memory with that of the user's own dimensions."""
        for dimension in self.rates.degrees.own:
            rank = dimension.make().memory(self.rates, rank)
        return rank

    def document(self, tokens: int) -> tuple[RankMemory, ...]:
        """The peak of each pipeline rank with one document, all of its slices in flight: the step that holds
        most."""
        parts, shape, regroups = min(SLICES, tokens), self.rates.shape, self.regroups
        slices = [
            CachedSlice(start, stop - start, tokens)
            for start, stop in itertools.pairwise(tokens * part // parts for part in range(parts + 1))
        ]
        packs = [PackSize(slice_.length, slices=(slice_,)) for slice_ in slices] * (1 + regroups)
        flow = []
        for rank in range(shape.ranks):
            forward = [Action("F", stage, place) for stage in shape.stages_of(rank) for place in range(parts)]
            backward = [Action("B", stage, place + parts * regroups) for _, stage, place in reversed(forward)]
            flow.append((*forward, *backward))
        return self.peak(Passes(packs, tuple(flow)))

    @cached_property
    def least(self) -> Fitting:
        """The same where layers keep least, if the planner may choose."""
        return replace(self, sparing=self.rates.mixes)

    @cached_property
    def longest(self) -> int:
        """The default of L_max: the most tokens, a multiple of `divisor` from one window to two, of which a
        step of micro-batches is predicted to fit; two windows where memory is not known."""
        window, divisor = self.rates.window, self.rates.divisor
        shortest, most = -(-window // divisor), LONGEST * window // divisor
        longest = _most(self._fits, shortest, most) if self._fits(shortest) else shortest
        return longest * divisor

    @cached_property
    def windows_fit(self) -> bool:
        """Whether a step with one window a micro-batch fits, as far as is known."""
        return self.least._fits(-(-self.rates.window // self.rates.divisor))

    def _fits(self, parts: int) -> bool:
        """Whether micro-batches of `parts` times the divisor fit, as far as is known."""
        if not self.rates.memory_predicted:
            return True
        try:
            return fullest(self._alike(parts * self.rates.divisor)).total <= self.usable
        except PlanError:  # the schedule's order is not known
            return True

    def _alike(self, tokens: int) -> tuple[RankMemory, ...]:
        """The peak of each pipeline rank where all micro-batches have so many tokens."""
        lengths = [tokens] * self.rates.replica_micro_batches
        return self.peak(Passes.of(lengths, self.sharers))

    def check_window(self) -> None:
        """Refuses a job in which micro-batches of one context window do not fit or, if documents are sliced,
        a document of the window: all its slices are in flight when its backward pass starts."""
        window = self.rates.window
        what = "a document" if self.slices else "micro-batches"
        try:
            most = fullest(self.least.document(window) if self.slices else self.least._alike(window))
        except PlanError:  # the schedule's order is not known
            return
        if most.total > self.usable:
            save = "" if self.rates.mixes else "save more with activation_checkpoint, "
            raise PlanError(
                f"this cannot fit {self.room}; with {what} of {window:,} tokens the prediction is "
                f"{in_a_line(most)}. Raise a degree of parallelism, {save}or "
                "lower training.seq_len or training.local_batch_size.",
                setting="training.seq_len",
            )

    @cached_property
    def most_in_flight(self) -> int:
        """The most tokens in flight that are predicted to fit, if all were one document's."""
        self.check_window()
        window = self.rates.window
        return _most(self.least._document_fits, window, window * self.rates.replica_micro_batches)

    def _document_fits(self, tokens: int) -> bool:
        return fullest(self.document(tokens)).total <= self.usable


def runs(rates: Rates, passes: Passes) -> Iterator[tuple[int, RunPacks]]:
    """The runs through the pipeline of a replica's step: where they start, and their micro-batches."""
    packs = passes.packs
    length = len(packs) if passes.flow is not None or rates.per_run is None else rates.per_run
    for start in range(0, len(packs), length):
        yield start, RunPacks(rates, packs[start : start + length])


def _most(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number up to `most` that fits; `least` does."""
    if fits(most):
        return most
    return least + bisect_left(range(least + 1, most), True, key=lambda number: not fits(number))
