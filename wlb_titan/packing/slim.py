"""`slim`: long documents in slices, so that packs are many and alike and nothing waits (SlimPack, 4.1).

Documents arrive a global batch at a time, whole and in pieces of at most a context window. Phase 1 gives each
data-parallel rank documents of nearly the same work, phase 2 makes them into M MicroPacks (`micropacks.py`),
and PackFlow orders their passes (`packflow.py`). M is the same on all ranks and in all steps. `auto` tries
numbers on a logarithmic scale, on steps that it packs and runs ahead of time, and takes the fewest that come
within 1 % of the shortest step: short packs lose time that the model of work does not know.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing.arrivals import Arrivals, delayed
from wlb_titan.packing.micropacks import Placing, Solved, micropacks, place_greedily
from wlb_titan.packing.micropacks_milp import SolvedPlacing
from wlb_titan.packing.policy import Documents, Packing, PackingPolicy
from wlb_titan.packing.slices import MicroPack, PrefixWork, sliced_document
from wlb_titan.pipeline.packflow import SCHEDULES, Packs, Schedule, backward_order, forward_needed, packflow
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.plan import LENGTH, START, Action, Flow
from wlb_titan.settings import SlimSettings

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUMBERS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""MicroPacks that `auto` tries, relative to the context windows of a data-parallel rank in a step."""

SLACKS = (0, 2, 4)
"""Slack that `auto` tries with each."""

PassSeconds = Callable[[Packing], tuple[Floats, Floats]]
"""float64 (packs,), how long forward and backward passes take, in any unit."""

STEPS = 4  # that `auto` tries them on
WORSE = 1.01  # time of a step, relative to the shortest, that fewer MicroPacks may take


class Slim(PackingPolicy):
    """Packs every global batch as it arrives into `micropacks` packs for each data-parallel rank.

    Args:
        stream: documents.
        micro_batches: N, context windows of a global batch.
        data_parallel: degree.
        cost_model: W_a + W_l.
        grain: tokens that slices are cut at multiples of.
        pipeline: that each data-parallel rank's packs go through.
        settings: [wlb.packing.slim].
        pass_seconds: predicts how long packs take, for `auto`; None takes their work, to which short packs
            lose nothing.
        place: the solver of `solver = "milp"`; None is a `SolvedPlacing` of its own.

    Attributes:
        micropacks: M.
        slack: packs in flight beyond what 1F1B needs.

    Raises:
        PlanError: the schedule cannot run slices, or there are fewer MicroPacks than stages.
    """

    fixed_length = False
    balances = False

    def __init__(
        self,
        stream: DocumentStream,
        *,
        micro_batches: int,
        data_parallel: int,
        cost_model: CostModel,
        grain: int,
        pipeline: PipelineShape,
        settings: SlimSettings,
        pass_seconds: PassSeconds | None = None,
        place: Solved | None = None,
    ) -> None:
        check_slim(settings, pipeline)
        self._pass_seconds = pass_seconds or self._work
        self._stream, self._pipeline, self._settings = stream, pipeline, settings
        self._arrivals = Arrivals(stream, micro_batches=micro_batches)
        self._windows = -(-micro_batches // data_parallel)
        self._data_parallel = data_parallel
        self._cost_model = cost_model
        self._prefix_work = PrefixWork(cost_model, stream.window, grain)
        self._solved: Solved | None = None
        if settings.solver == "milp":
            self._solved = place or SolvedPlacing(settings.time_limit, settings.gap)
        self.micropacks, self.slack = self._chosen(Arrivals(stream.anew(), micro_batches=micro_batches))

    def next(self) -> Packing:
        iteration = self._arrivals.iteration
        batch = delayed(self._arrivals.next(labelled=0, left=0), iteration)
        if self._solved is not None:
            self._solved.forget()
        packing = self._pack(batch, self.micropacks, self._solved or place_greedily)
        return packing if self._solved is None else replace(packing, gap=self._solved.gap)

    def order(
        self, packing: Packing, forward: Floats, backward: Floats, dp_rank: int | None
    ) -> tuple[Flow, ...]:
        assert packing.assigned is not None
        flow = self._flow(packing, forward, backward, self.slack).flow
        orders = [backward_order(sliced) for sliced in _sliced(packing)]
        return tuple(
            in_own_order(flow, order) if dp_rank in (None, rank) else () for rank, order in enumerate(orders)
        )

    def state_dict(self) -> dict[str, Any]:
        return self._arrivals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._arrivals.load_state_dict(state)

    def _pack(self, batch: Documents, count: int, place: Placing) -> Packing:
        works = workload(self._cost_model, batch[:, LENGTH])
        packs, slices = [], []
        for share in by_work(works, self._data_parallel):
            documents = batch[share]
            for pack in micropacks(documents[:, LENGTH], works[share], self._prefix_work, count, place):
                rows, sliced = _rows(documents, pack)
                packs.append(rows)
                slices.append(sliced)
        numbers = np.arange(len(packs)).reshape(self._data_parallel, count)
        return Packing(packs, slices=slices, assigned=numbers.tolist())

    def _flow(self, packing: Packing, forward: Floats, backward: Floats, slack: int) -> Schedule:
        """The order of all data-parallel ranks: which kind of pass runs when, as the slowest of them needs.

        FSDP's ranks meet in collectives in forward and in backward passes (all without a pipeline, those of
        the head with one), so they have to run the same kinds of passes at the same places. Backward passes
        are numbered here in the order in which they run, whatever packs these are on a rank. Tokens in flight
        are the mean over the ranks.
        """
        ranks = np.array(packing.assigned)
        sliced = _sliced(packing)
        orders = np.array([backward_order(own) for own in sliced])
        needed = np.array([forward_needed(own) for own in sliced])
        tokens = np.array([pack[:, LENGTH].sum() for pack in packing.packs], dtype=np.float64)[ranks]

        def ran(values: NDArray[Any]) -> NDArray[Any]:
            most: NDArray[Any] = np.take_along_axis(values, orders, axis=1).max(axis=0)
            return most

        packs = Packs(
            forward=forward[ranks].max(axis=0),
            backward=ran(backward[ranks]),
            tokens=tokens.mean(axis=0),
            freed=np.take_along_axis(tokens, orders, axis=1).mean(axis=0),
            order=range(ranks.shape[1]),
            needed=ran(needed).tolist(),
        )
        limit = self._settings.tokens_in_flight
        return packflow(packs, self._pipeline, slack=slack, limit=limit)

    def _chosen(self, arrivals: Arrivals) -> tuple[int, int]:
        """MicroPacks and slack: as set, or the fewest and least that are within `WORSE` of the best."""
        number, slack = self._settings.micropacks, self._settings.slack
        slacks: tuple[int, ...] = SLACKS if slack == "auto" else (slack,)
        numbers = [] if number == "auto" else [number]
        if number == "auto":
            fewest = max(self._windows, self._pipeline.stages)
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

    def _seconds(self, batch: Documents, count: int, slacks: tuple[int, ...]) -> Floats:
        """float64 (slacks,), how long a step takes whose slowest data-parallel rank is waited for."""
        packing = self._pack(batch, count, place_greedily)
        assert packing.assigned is not None
        forward, backward = self._pass_seconds(packing)
        return np.array([self._flow(packing, forward, backward, slack).seconds for slack in slacks])

    def _work(self, packing: Packing) -> tuple[Floats, Floats]:
        return packing.work(self._cost_model.forward), packing.work(self._cost_model.backward)


def in_own_order(flow: Flow, order: Sequence[int]) -> Flow:
    """A flow whose backward passes are numbered as they run, with the packs that they are on one rank."""
    return tuple(
        tuple(a if a.kind == "F" else Action("B", a.stage, order[a.place]) for a in actions)
        for actions in flow
    )


def _sliced(packing: Packing) -> list[list[int]]:
    """Of each data-parallel rank's packs the document of which they have a slice, -1 where they have none."""
    assert packing.assigned is not None and packing.slices is not None
    slices = packing.slices
    return [[sliced_document(packing.packs[i], slices[i]) for i in packs] for packs in packing.assigned]


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


def _rows(documents: Documents, pack: MicroPack) -> tuple[Documents, Ints]:
    """A pack's rows of documents and slices."""
    which, starts, stops = np.array(pack, dtype=np.int64).T
    rows = documents[which]
    slices = np.stack([starts, rows[:, LENGTH]], axis=1)
    rows[:, START] += starts
    rows[:, LENGTH] = stops - starts
    return rows, slices


def check_slim(settings: SlimSettings, pipeline: PipelineShape) -> None:
    """Checks what can be checked without documents.

    Raises:
        PlanError: the schedule cannot run slices, there are fewer MicroPacks than stages, or a number is out
            of range.
    """
    if pipeline.ranks > 1 and pipeline.schedule not in SCHEDULES:
        raise PlanError(
            f"Slices go through a pipeline under {' and '.join(SCHEDULES)}, and the schedule is "
            f"{pipeline.schedule}, in whose order a document's backward passes would not go from its end to "
            "its begin. Set pipeline_parallel_schedule to one of them, or another packing policy."
        )
    if settings.slack != "auto" and settings.slack < 0:
        raise PlanError(f"wlb.packing.slim.slack is {settings.slack} MicroPacks; it must not be negative.")
    if settings.tokens_in_flight is not None and settings.tokens_in_flight < 1:
        raise PlanError(
            f"wlb.packing.slim.tokens_in_flight is {settings.tokens_in_flight}; it must be at least 1."
        )
    number = settings.micropacks
    if number != "auto" and number < pipeline.stages:
        raise PlanError(
            f"wlb.packing.slim.micropacks is {number}, fewer than the {pipeline.stages} pipeline stages: "
            f'some would never be busy together. Set it to at least {pipeline.stages}, or "auto".'
        )
