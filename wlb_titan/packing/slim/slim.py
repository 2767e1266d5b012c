"""`slim`: long documents in slices, so that packs are many and alike and nothing waits (SlimPack, 4.1).

Documents arrive a global batch at a time, whole and in pieces of at most a context window. Phase 1 gives each
data-parallel rank documents of nearly the same work, of which ranks may share the heaviest (`dp_merge.py`),
phase 2 makes them into M MicroPacks (`micropacks.py`), and PackFlow orders their passes (`packflow.py`). M is
the same on all ranks, and in all steps that fit. `auto` tries numbers on a logarithmic scale, on steps that
it packs and runs ahead of time, and takes the fewest that fit and come within 1 % of the shortest step: short
packs lose time that the model of work does not know.

A document stays whole in memory until its last slice went back, and beside it what its packs hold besides. So
a step is predicted before it is given out, and one that does not fit is packed again with more packs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval
from numpy.typing import NDArray

from wlb_titan.cost.passes import MicroBatches, PassJob, pass_times
from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.memory.peak import GIB, Rank, RankMemory
from wlb_titan.packing.arrivals import Arrivals, delayed
from wlb_titan.packing.policy import CheckedJob, Pack, Packing, PackingJob, PackingPolicy
from wlb_titan.packing.slim.asymmetric import Line, asymmetric
from wlb_titan.packing.slim.dp_merge import Merge, Shares, best_shares, numbers_of_packs, shares
from wlb_titan.packing.slim.flow import dependencies, in_own_order, job_flow
from wlb_titan.packing.slim.memory import step_peak
from wlb_titan.packing.slim.micropacks import MOST_TRIED, Bins, Placing, micropacks, place_greedily
from wlb_titan.packing.slim.micropacks_milp import SolvedPlacing
from wlb_titan.packing.slim.regrouped import RegroupedRank, regrouped_times
from wlb_titan.packing.slim.slices import MicroPack, PrefixWork, Slice
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.pipeline.packflow import SCHEDULES, Schedule
from wlb_titan.plan import LENGTH, START, ByPass, Flow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUMBERS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""MicroPacks that `auto` tries, relative to the context windows of a data-parallel rank in a step."""

MORE = (1, 1.5, 2, 3, 4, 6, 8)
"""Times M MicroPacks of a step that does not fit with fewer."""

SLACKS = (0, 2, 4)
"""Slack that `auto` tries with each."""

MOST_MICROPACKS = 1 << 16

IN_FLIGHT = (1, 1.25, 1.5, 2, 3, 4)
"""Tokens in flight that `least` tries, in context windows."""

STEPS = 4  # that they are tried on
WORSE = 1.01  # time of a step, relative to the shortest, that fewer MicroPacks and tokens in flight may take

Timed = tuple[Packing, Floats, Floats]
"""A step's packs, and how long forward and backward passes of each take."""


class Slim(PackingPolicy):
    """Packs every global batch as it arrives into `micropacks` packs for each data-parallel rank.

    Attributes:
        micropacks: M.
        slack: packs in flight beyond what 1F1B needs.

    Raises:
        PlanError: memory does not hold a document of the context window, or there are too few tokens.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PackingPolicy.Config):
        free = (
            *PackingPolicy.Config.free,
            *("cost_model", "micropacks", "slack", "tokens_in_flight", "dp_merge", "solver", "time_limit"),
            *("gap", "asymmetric"),
        )

        micropacks: Annotated[int, Interval(ge=1, le=MOST_MICROPACKS)] | Literal["auto"] = "auto"
        """MicroPacks of a data-parallel rank in a step. More of them leave a smaller bubble and are shorter.
        `auto` tries several on the first documents and takes the fewest that are predicted to come within 1 %
        of the shortest step."""

        slack: Annotated[int, Interval(ge=0, le=MOST_MICROPACKS)] | Literal["auto"] = "auto"
        """MicroPacks that a pipeline rank may have in flight beyond what 1F1B needs: uneven stages then wait
        less for each other. `auto` tries some with each number of MicroPacks."""

        tokens_in_flight: Annotated[int, Ge(1)] | Literal["least"] | None = None
        """Most tokens that a pipeline rank may have in flight, whatever `slack` says; but always as many as
        one document has. "none" is what is predicted to fit the device's memory, "least" the fewest with
        which steps are predicted to take at most 1 % longer."""

        dp_merge: bool | Literal["auto"] = "auto"
        """Whether several data-parallel ranks share a document of more work than one of them should have in
        a step, as context parallelism does. `auto` does so in the steps that are predicted to get shorter,
        "true" in all that have such a document. Not with `ulysses` and `ulysses_gather`."""

        solver: Literal["greedy", "milp"] = "greedy"
        """What puts short documents beside slices: longest processing time first, or HiGHS, which is seldom
        more than 1 % better and takes as long as `time_limit` says."""

        time_limit: Annotated[float, Interval(gt=0, le=86400)] = 1.0
        """Seconds that the solver may take for a step. A solver that is stopped by the clock finds something
        else the next time, so a run cannot be repeated exactly."""

        gap: Annotated[float, Interval(ge=0, lt=1)] = 0.001
        """Relative gap between solution and bound at which the solver stops."""

        asymmetric: bool = False
        """Whether backward passes have MicroPacks of their own, of equal work in backward passes. They
        compute layers again, in place of full activation checkpointing, which has to be set: choose it
        where that is needed anyway."""

        @property
        def planning_seconds(self) -> float:
            return self.time_limit if self.solver == "milp" else 0.0

        @property
        def merges(self) -> bool | Literal["auto"]:
            return False if self.asymmetric else self.dp_merge

        @property
        def regroups(self) -> bool:
            return self.asymmetric

        @property
        def rank_memory(self) -> type[Rank]:
            return RegroupedRank if self.asymmetric else Rank

        def pass_times(self, job: PassJob, packs: ByPass[MicroBatches]) -> PassTimes:
            return regrouped_times(job, packs) if self.asymmetric else pass_times(job, packs.forward)

        @property
        def most_in_flight(self) -> int | None:
            return self.tokens_in_flight if isinstance(self.tokens_in_flight, int) else None

        def check(self, job: CheckedJob) -> None:
            pipeline = job.shape
            if pipeline.ranks > 1 and pipeline.schedule not in SCHEDULES:
                raise PlanError(
                    f"Slices go through a pipeline under {' and '.join(SCHEDULES)}, and the schedule is "
                    f"{pipeline.schedule}, in whose order a document's backward passes would not go from its "
                    "end to its begin. Set pipeline_parallel_schedule to one of them, or another policy.",
                    setting="parallelism.pipeline_parallel_schedule",
                )
            if self.micropacks != "auto" and self.micropacks < pipeline.stages:
                raise PlanError(
                    f"{self.micropacks} MicroPacks are fewer than the {pipeline.stages} pipeline stages, of "
                    f"which some would never be busy together. Set it to at least {pipeline.stages}, or to "
                    '"auto".',
                    setting="packing.micropacks",
                )
            if self.asymmetric and pipeline.ranks == 1:
                raise PlanError(
                    "MicroPacks of their own for backward passes shrink a pipeline's bubble, and there is no "
                    "pipeline. Leave it out, or raise parallelism.pipeline_parallel_degree.",
                    setting="packing.asymmetric",
                )
            if self.asymmetric and self.solver != "greedy":
                raise PlanError(
                    "The asymmetric partition cuts one line of documents, and has nothing to solve. Leave "
                    "the solver out.",
                    setting="packing.solver",
                )
            if self.asymmetric and self.dp_merge is True:
                raise PlanError(
                    "Documents that data-parallel ranks share have packs of their own, and under the "
                    'asymmetric partition all documents lie in one line. Set dp_merge to "auto" or false, or '
                    "leave asymmetric out.",
                    setting="packing.dp_merge",
                )
            if self.asymmetric and job.memory.checkpointing != "full":
                raise PlanError(
                    "Where backward passes have MicroPacks of their own they compute the forward pass again, "
                    f"which beside {job.memory.checkpointing} checkpointing costs more than it gains. "
                    "It is for jobs that need full checkpointing anyway, whose place it takes: set "
                    'activation_checkpoint.class to "FullAC", or leave it out.',
                    setting="packing.asymmetric",
                )
            if self.merges is True and job.strategy is not None and not job.strategy.merges:
                raise PlanError(
                    "Data-parallel ranks cannot share a document under the sharding policy "
                    f"{job.sharding.name}, which exchanges tokens for heads among context-parallel ranks "
                    "and would need a head for each of the ranks that share. Set wlb.sharding.policy to one "
                    'that gathers keys, such as per_document, or dp_merge to "auto" or false.',
                    setting="packing.dp_merge",
                )

    candidate = False  # of what short passes lose in kernels the simulator knows little
    variable_length = True
    balances = False
    slices = True

    def __init__(self, config: Config, stream: DocumentStream, job: PackingJob) -> None:
        self._config, self._job = config, job
        self._arrivals = Arrivals(stream, micro_batches=job.micro_batches)
        self._window = stream.window
        self._windows = -(-job.micro_batches // job.data_parallel)
        self._prefix_work = {1: PrefixWork(job.cost_model, stream.window, job.divisor)}
        """By how many data-parallel ranks share a pack, as that decides on what lengths are rounded to."""
        for size, merging in job.merging.items():
            self._prefix_work[size] = PrefixWork(job.cost_model, stream.window, merging.divisor)
        self._held = {1: 1.0} | {size: merging.held for size, merging in job.merging.items()}
        self._limit: float | None = job.in_flight()
        self._solve: SolvedPlacing | None = None
        self._gap: float | None = None
        self._order: Flow = ()  # of the step that `next` gave last
        if config.solver == "milp":
            self._solve = SolvedPlacing(config.time_limit / (job.data_parallel * MOST_TRIED), config.gap)
        self._try(Arrivals(stream.anew(), micro_batches=job.micro_batches))

    def next(self) -> Packing:
        iteration = self._arrivals.iteration
        batch = delayed(self._arrivals.next(labelled=0, left=0), iteration)
        if self._solve is None:
            return self._fitting(batch, place_greedily)
        self._gap = 0.0
        packing = self._fitting(batch, self._solved)
        return replace(packing, gap=self._gap)

    def _fitting(self, batch: Pack, place: Placing) -> Packing:
        """The packs of a step that fits memory, M of a rank or as many more as it takes; and the order of
        their passes.

        Raises:
            PlanError: it fits with no number of packs; with the arithmetic of the one that needs least.
        """
        least: RankMemory | None = None
        for count in dict.fromkeys(round(self.micropacks * times) for times in MORE):
            try:
                packing = self._pack(batch, count, place)
            except PlanError:
                if least is None:
                    raise
                break  # the documents have too few tokens for so many
            works = packing.pass_work(self._job.cost_model)
            self._order = self._flow(packing, *works, self.slack, self._limit).flow
            peak = step_peak(packing, self._order, self._job)
            if peak is None or peak.total <= self._job.usable:
                return packing
            if least is None or peak.total < least.total:
                least = peak
        assert least is not None
        raise PlanError(
            f"Step {self._arrivals.iteration} does not fit the {self._job.usable / GIB:.1f} GiB of a device "
            f"that may be filled, with {self.micropacks} MicroPacks of a rank or with more. It needs at "
            f"least:\n{least.explain()}\nRaise a degree of parallelism, save more with activation "
            "checkpointing, or shorten the context window.",
            setting="packing.micropacks",
        )

    def order(
        self, packing: Packing, forward: Floats, backward: Floats, ranks: Collection[int]
    ) -> tuple[Flow, ...]:
        flow, (orders, _) = self._order, dependencies(packing)
        return tuple(in_own_order(flow, order) if rank in ranks else () for rank, order in enumerate(orders))

    def state_dict(self) -> dict[str, Any]:
        return self._arrivals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state)

    def _solved(self, bins: Bins, works: Floats) -> Ints | None:
        """The solver's placing, which is one rank's for all."""
        assert self._solve is not None and self._gap is not None
        solve = self._solve

        def ask() -> Floats:
            placed, gap = solve(bins, works)
            return np.append(gap, np.empty(0) if placed is None else placed)

        gap, *placed = self._job.on_one_rank(ask).tolist()
        self._gap = max(self._gap, gap)
        return np.array(placed, dtype=np.int64) if len(placed) == len(works) else None

    def _pack(self, batch: Pack, count: int, place: Placing) -> Packing:
        """Phases 1 and 2."""
        works = workload(self._job.cost_model, batch[:, LENGTH])
        found = shares(works, self._job.data_parallel)
        if self._config.asymmetric:
            return self._pack_asymmetric(batch, works, found, count)
        merged = best_shares(works, self._job.data_parallel) if self._job.merging else None
        if merged is not None:
            found, packing = self._better(batch, works, merged, found, count)
            if place is place_greedily:
                return packing
        return self._packed(batch, works, found, count, place)

    def _better(
        self, batch: Pack, works: Floats, merged: Shares, whole: Shares, count: int
    ) -> tuple[Shares, Packing]:
        """Merged documents where ranks can share them, and are predicted to take less time so where that is
        asked; and their packs, placed greedily."""
        try:
            sharing = self._packed(batch, works, merged, count, place_greedily)
        except PlanError:
            return whole, self._packed(batch, works, whole, count, place_greedily)
        if self._config.dp_merge is True:
            return merged, sharing
        alone = self._packed(batch, works, whole, count, place_greedily)
        merging, not_merging = (
            self._seconds([(one, *self._pass_seconds(one))], 0, self._limit) for one in (sharing, alone)
        )
        return (merged, sharing) if merging < not_merging else (whole, alone)

    def _packed(self, batch: Pack, works: Floats, found: Shares, count: int, place: Placing) -> Packing:
        """Phase 2: packs of merged documents, and behind them those of each rank's own."""
        packs: list[Pack] = []
        slices: list[Ints] = []
        assigned: list[list[int]] = [[] for _ in found.own]

        def add(documents: Pack, pack: MicroPack, ranks: Sequence[int]) -> None:
            for rank in ranks:
                assigned[rank].append(len(packs))
            rows, sliced = _rows(documents, pack)
            packs.append(rows)
            slices.append(sliced)

        for merge, pack in self._merged(batch, works, found, count):
            add(batch, pack, merge.ranks)
        for rank, own in enumerate(found.own):
            documents, room = batch[own], count - len(assigned[rank])
            if room:
                for pack in micropacks(documents[:, LENGTH], works[own], self._prefix_work[1], room, place):
                    add(documents, pack, [rank])
        return Packing(packs, slices=slices, assigned=assigned)

    def _merged(
        self, batch: Pack, works: Floats, found: Shares, count: int
    ) -> Iterator[tuple[Merge, MicroPack]]:
        """The packs of merged documents, each a slice of equal work."""
        tables = [self._prefix_work[len(merge.ranks)] for merge in found.merges]
        lengths = [int(batch[merge.document, LENGTH]) for merge in found.merges]
        # The last slice is about half as long as the mean one, and each rank must get something of it.
        most = [max(length // (2 * table.grain), 1) for length, table in zip(lengths, tables, strict=True)]
        numbers = numbers_of_packs(works, most, found, count)
        for merge, length, table, number in zip(found.merges, lengths, tables, numbers, strict=True):
            cuts = table.cuts(length, np.full(number, works[merge.document] / number))
            for start, stop in itertools.pairwise(cuts):
                yield merge, [Slice(merge.document, start, stop)]

    @cached_property
    def _lines(self) -> tuple[Line, Line]:
        """How a line of documents is cut for forward and for backward passes."""
        model, divisor = self._job.cost_model, self._job.divisor
        return Line(model.forward, self._window, divisor), Line(model.recomputed, self._window, divisor)

    def _pack_asymmetric(self, batch: Pack, works: Floats, found: Shares, count: int) -> Packing:
        passes: list[list[tuple[Pack, Ints]]] = [[], []]
        for own in found.own:
            documents = batch[own]
            cut = asymmetric(documents[:, LENGTH], works[own], self._lines, count)
            for all_, packs in zip(passes, cut, strict=True):
                all_.extend(_rows(documents, pack) for pack in packs)
        numbers = np.arange(len(passes[0])).reshape(self._job.data_parallel, count).tolist()
        forward, backward = (
            Packing(
                [rows for rows, _ in all_],
                slices=[own for _, own in all_],
                assigned=numbers,
                one_pass=True,
            )
            for all_ in passes
        )
        return replace(forward, regrouped=backward)

    def _flow(
        self, packing: Packing, forward: Floats, backward: Floats, slack: int, limit: float | None
    ) -> Schedule:
        return job_flow(packing, forward, backward, self._job.pipeline, self._held, slack=slack, limit=limit)

    def _try(self, arrivals: Arrivals) -> None:
        """Settles what the settings leave open, by packing some steps and running them ahead of time.

        MicroPacks and slack are the fewest and least with which they fit and take at most `WORSE` times as
        long as with the best that fit; tokens in flight, where `least` is asked for, the fewest with which
        they take at most so much longer again.
        """
        number, slack = self._config.micropacks, self._config.slack
        slacks: tuple[int, ...] = SLACKS if slack == "auto" else (slack,)
        numbers = [] if number == "auto" else [number]
        if number == "auto":
            fewest = max(self._windows, self._job.pipeline.stages)
            numbers = sorted({max(fewest, round(self._windows * factor)) for factor in NUMBERS})
        least = self._config.tokens_in_flight == "least"
        if len(numbers) == len(slacks) == 1 and not least:
            self.micropacks, self.slack = numbers[0], slacks[0]
            return
        batches = [delayed(arrivals.next(labelled=0, left=0), step) for step in range(STEPS)]
        tried: dict[int, list[Timed]] = {}
        found: dict[tuple[int, int], float] = {}
        for count in numbers:
            try:
                packings = [self._pack(batch, count, place_greedily) for batch in batches]
            except PlanError:  # the documents have too few tokens for so many
                if not found:
                    raise
                break
            tried[count] = [(packing, *self._pass_seconds(packing)) for packing in packings]
            for slack in slacks:
                found[count, slack] = self._seconds(tried[count], slack, self._limit)
        chosen = self._best_that_fits(found, tried)
        self.micropacks, self.slack = chosen
        if least:
            self._limit = self._leanest(tried[self.micropacks], WORSE * found[chosen])

    def _best_that_fits(
        self, found: Mapping[tuple[int, int], float], tried: Mapping[int, Sequence[Timed]]
    ) -> tuple[int, int]:
        """The first numbers of packs and slack with which steps fit and take hardly longer than with the
        best; if they fit with none, most packs and least slack."""

        @cache
        def fits(choice: tuple[int, int]) -> bool:
            count, slack = choice
            flows = ((step[0], self._flow(*step, slack, self._limit).flow) for step in tried[count])
            peaks = (step_peak(packing, flow, self._job) for packing, flow in flows)
            return all(peak is None or peak.total <= self._job.usable for peak in peaks)

        best = next((choice for choice in sorted(found, key=found.__getitem__) if fits(choice)), None)
        if best is None:
            return max(found, key=lambda choice: (choice[0], -choice[1]))
        return next(choice for choice in found if found[choice] <= WORSE * found[best] and fits(choice))

    def _leanest(self, steps: Sequence[Timed], seconds: float) -> float | None:
        """The fewest tokens in flight with which steps take no longer than so long."""
        for windows in IN_FLIGHT:
            limit = windows * self._window
            if self._limit is not None and limit >= self._limit:
                break
            if self._seconds(steps, self.slack, limit) <= seconds:
                return limit
        return self._limit

    def _seconds(self, steps: Sequence[Timed], slack: int, limit: float | None) -> float:
        """How long steps take whose slowest data-parallel rank is waited for."""
        return sum(self._flow(*step, slack, limit).seconds for step in steps)

    def _pass_seconds(self, packing: Packing) -> tuple[Floats, Floats]:
        predict = self._job.pass_seconds
        return predict(packing) if predict else packing.pass_work(self._job.cost_model)


def _rows(documents: Pack, pack: MicroPack) -> tuple[Pack, Ints]:
    """A pack's rows of documents and slices."""
    which, starts, stops = np.array(pack, dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    return rows, slices
