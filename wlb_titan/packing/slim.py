"""`slim`: long documents in slices, so that packs are many and alike and nothing waits (SlimPack, 4.1).

Documents arrive a global batch at a time, whole and in pieces of at most a context window. Phase 1 gives each
data-parallel rank documents of nearly the same work, phase 2 makes them into M MicroPacks (`micropacks.py`),
and PackFlow orders their passes (`packflow.py`). M is the same on all ranks and in all steps. `auto` tries
numbers on a logarithmic scale, on steps that it packs and runs ahead of time, and takes the fewest that come
within 1 % of the shortest step: short packs lose time that the model of work does not know.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval
from numpy.typing import NDArray

from wlb_titan.cost.workload import workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import Arrivals, delayed
from wlb_titan.packing.asymmetric import Line, asymmetric, last_needed
from wlb_titan.packing.micropacks import MOST_TRIED, Bins, Placing, micropacks, place_greedily
from wlb_titan.packing.micropacks_milp import SolvedPlacing
from wlb_titan.packing.policy import Pack, Packing, PackingJob, PackingPolicy
from wlb_titan.packing.slices import MicroPack, PrefixWork, sliced_document
from wlb_titan.pipeline.packflow import SCHEDULES, Packs, Schedule, backward_order, forward_needed, packflow
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import LENGTH, START, Action, Flow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUMBERS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""MicroPacks that `auto` tries, relative to the context windows of a data-parallel rank in a step."""

SLACKS = (0, 2, 4)
"""Slack that `auto` tries with each."""

MOST_MICROPACKS = 1 << 16

STEPS = 4  # that `auto` tries them on
WORSE = 1.01  # time of a step, relative to the shortest, that fewer MicroPacks may take


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
            *("cost_model", "micropacks", "slack", "tokens_in_flight", "solver", "time_limit", "gap"),
            "asymmetric",
        )

        micropacks: Annotated[int, Interval(ge=1, le=MOST_MICROPACKS)] | Literal["auto"] = "auto"
        """MicroPacks of a data-parallel rank in a step. More of them leave a smaller bubble and are shorter.
        `auto` tries several on the first documents and takes the fewest that are predicted to come within 1 %
        of the shortest step."""

        slack: Annotated[int, Interval(ge=0, le=MOST_MICROPACKS)] | Literal["auto"] = "auto"
        """MicroPacks that a pipeline rank may have in flight beyond what 1F1B needs: uneven stages then wait
        less for each other. `auto` tries some with each number of MicroPacks."""

        tokens_in_flight: Annotated[int, Ge(1)] | None = None
        """Most tokens that a pipeline rank may have in flight, whatever `slack` says; but always as many as
        one document has. "none" is what is predicted to fit the device's memory."""

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

        def check(self, pipeline: PipelineShape) -> None:
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

    candidate = False  # of what short passes lose in kernels the simulator knows little
    variable_length = True
    balances = False
    slices = True

    def __init__(self, config: Config, stream: DocumentStream, job: PackingJob) -> None:
        self._config, self._job = config, job
        self._arrivals = Arrivals(stream, micro_batches=job.micro_batches)
        self._windows = -(-job.micro_batches // job.data_parallel)
        self._prefix_work = PrefixWork(job.cost_model, stream.window, job.divisor)
        self._lines = (
            Line(job.cost_model.forward, stream.window, job.divisor),
            Line(job.cost_model.recomputed, stream.window, job.divisor),
        )
        self._limit = job.in_flight()
        self._solve: SolvedPlacing | None = None
        self._gap: float | None = None
        if config.solver == "milp":
            self._solve = SolvedPlacing(config.time_limit / (job.data_parallel * MOST_TRIED), config.gap)
        self.micropacks, self.slack = self._chosen(Arrivals(stream.anew(), micro_batches=job.micro_batches))

    def next(self) -> Packing:
        iteration = self._arrivals.iteration
        batch = delayed(self._arrivals.next(labelled=0, left=0), iteration)
        if self._solve is None:
            return self._pack(batch, self.micropacks, place_greedily)
        self._gap = 0.0
        packing = self._pack(batch, self.micropacks, self._solved)
        return replace(packing, gap=self._gap)

    def order(
        self, packing: Packing, forward: Floats, backward: Floats, dp_rank: int | None
    ) -> tuple[Flow, ...]:
        assert packing.assigned is not None
        flow = self._flow(packing, forward, backward, self.slack).flow
        orders, _ = _dependencies(packing)
        return tuple(
            in_own_order(flow, order) if dp_rank in (None, rank) else () for rank, order in enumerate(orders)
        )

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
        works = workload(self._job.cost_model, batch[:, LENGTH])
        if self._config.asymmetric:
            return self._pack_asymmetric(batch, works, count)
        packs, slices = [], []
        for share in by_work(works, self._job.data_parallel):
            documents = batch[share]
            for pack in micropacks(documents[:, LENGTH], works[share], self._prefix_work, count, place):
                rows, sliced = _rows(documents, pack)
                packs.append(rows)
                slices.append(sliced)
        numbers = np.arange(len(packs)).reshape(self._job.data_parallel, count)
        return Packing(packs, slices=slices, assigned=numbers.tolist())

    def _pack_asymmetric(self, batch: Pack, works: Floats, count: int) -> Packing:
        passes: list[list[tuple[Pack, Ints]]] = [[], []]
        for share in by_work(works, self._job.data_parallel):
            documents = batch[share]
            cut = asymmetric(documents[:, LENGTH], works[share], self._lines, count)
            for all_, own in zip(passes, cut, strict=True):
                all_.extend(_rows(documents, pack) for pack in own)
        numbers = np.arange(len(passes[0])).reshape(self._job.data_parallel, count).tolist()
        forward, backward = (
            Packing([rows for rows, _ in all_], slices=[own for _, own in all_], assigned=numbers)
            for all_ in passes
        )
        return replace(forward, backward=backward)

    def _flow(self, packing: Packing, forward: Floats, backward: Floats, slack: int) -> Schedule:
        """The order of all data-parallel ranks: which kind of pass runs when, as the slowest of them needs.

        FSDP's ranks meet in collectives in forward and in backward passes (all without a pipeline, those of
        the head with one), so they have to run the same kinds of passes at the same places. Backward passes
        are numbered here in the order in which they run, whatever packs these are on a rank. Tokens in flight
        are the mean over the ranks.
        """
        ranks = np.array(packing.assigned)
        orders, needed = map(np.array, _dependencies(packing))
        tokens, freed = (
            np.array([pack[:, LENGTH].sum() for pack in one.packs], dtype=np.float64)[ranks]
            for one in (packing, packing.backward or packing)
        )

        def ran(values: NDArray[Any]) -> NDArray[Any]:
            most: NDArray[Any] = np.take_along_axis(values, orders, axis=1).max(axis=0)
            return most

        packs = Packs(
            forward=forward[ranks].max(axis=0),
            backward=ran(backward[ranks]),
            tokens=tokens.mean(axis=0),
            freed=np.take_along_axis(freed, orders, axis=1).mean(axis=0),
            order=range(ranks.shape[1]),
            needed=ran(needed).tolist(),
        )
        return packflow(packs, self._job.pipeline, slack=slack, limit=self._limit)

    def _chosen(self, arrivals: Arrivals) -> tuple[int, int]:
        """MicroPacks and slack: as set, or the fewest and least that are within `WORSE` of the best."""
        number, slack = self._config.micropacks, self._config.slack
        slacks: tuple[int, ...] = SLACKS if slack == "auto" else (slack,)
        numbers = [] if number == "auto" else [number]
        if number == "auto":
            fewest = max(self._windows, self._job.pipeline.stages)
            numbers = sorted({max(fewest, round(self._windows * factor)) for factor in NUMBERS})
        if len(numbers) == len(slacks) == 1:
            return numbers[0], slacks[0]
        batches = [delayed(arrivals.next(labelled=0, left=0), step) for step in range(STEPS)]
        found: dict[tuple[int, int], float] = {}
        for count in numbers:
            try:
                seconds = np.sum([self._seconds(batch, count, slacks) for batch in batches], axis=0)
            except PlanError:  # the documents have too few tokens for so many
                if not found:
                    raise
                break
            found |= {(count, slack): float(seconds[i]) for i, slack in enumerate(slacks)}
        shortest = min(found.values())
        return next(choice for choice, seconds in found.items() if seconds <= WORSE * shortest)

    def _seconds(self, batch: Pack, count: int, slacks: tuple[int, ...]) -> Floats:
        """float64 (slacks,), how long a step takes whose slowest data-parallel rank is waited for."""
        packing = self._pack(batch, count, place_greedily)
        assert packing.assigned is not None
        predict = self._job.pass_seconds
        forward, backward = predict(packing) if predict else packing.pass_work(self._job.cost_model)
        return np.array([self._flow(packing, forward, backward, slack).seconds for slack in slacks])


def in_own_order(flow: Flow, order: Sequence[int]) -> Flow:
    """A flow whose backward passes are numbered as they run, with the packs that they are on one rank."""
    return tuple(
        tuple(a if a.kind == "F" else Action("B", a.stage, order[a.place]) for a in actions)
        for actions in flow
    )


def _dependencies(packing: Packing) -> tuple[list[list[int]], list[list[int]]]:
    """Of each data-parallel rank the order of its backward passes, and the forward pass that each waits
    for."""
    assert packing.assigned is not None
    if packing.backward is not None:
        needed = [last_needed(packing.parts(own), packing.backward.parts(own)) for own in packing.assigned]
        return [list(range(len(own))) for own in packing.assigned], needed
    sliced = [[sliced_document(*part) for part in packing.parts(own)] for own in packing.assigned]
    return [backward_order(own) for own in sliced], [forward_needed(own) for own in sliced]


def by_work(works: Floats, ranks: int) -> list[Ints]:
    """Phase 1: the documents of each data-parallel rank, heaviest first to the least loaded.

    Example: works 5, 1, 4, 2 on 2 ranks give [0, 1] and [2, 3], 6 each.

    Args:
        works: float64 (n,), at least one document a rank.
        ranks: data-parallel degree.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for document in np.argsort(-works, kind="stable").tolist():
        load, rank = least[0]
        shares[rank].append(document)
        heapq.heapreplace(least, (load + float(works[document]), rank))
    return [np.array(share, dtype=np.int64) for share in shares]


def _rows(documents: Pack, pack: MicroPack) -> tuple[Pack, Ints]:
    """A pack's rows of documents and slices."""
    which, starts, stops = np.array(pack, dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    return rows, slices
