"""`slim`: long documents in slices, so that packs are many and alike and nothing waits (SlimPack, section
4.1).

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
from wlb_titan.packing.micropacks import Placing, micropacks, place_greedily
from wlb_titan.packing.micropacks_milp import SolvedPlacing
from wlb_titan.packing.policy import Documents, Packing, PackingPolicy
from wlb_titan.packing.slices import MicroPack, PrefixWork, sliced_document
from wlb_titan.pipeline.packflow import SCHEDULES, Packs, Schedule, packflow
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
    ) -> None:
        _check(settings, pipeline)
        self._pass_seconds = pass_seconds or self._work
        self._stream, self._pipeline, self._settings = stream, pipeline, settings
        self._arrivals = Arrivals(stream, micro_batches=micro_batches)
        self._windows = -(-micro_batches // data_parallel)
        self._data_parallel = data_parallel
        self._cost_model = cost_model
        self._prefix_work = PrefixWork(cost_model, stream.window, grain)
        self._solved = SolvedPlacing(settings.time_limit, settings.gap) if settings.solver == "milp" else None
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
        assert packing.assigned is not None and packing.slices is not None
        if self._pipeline.ranks == 1:
            slices = packing.slices
            sliced = [
                [sliced_document(packing.packs[i], slices[i]) for i in packs] for packs in packing.assigned
            ]
            return (one_after_the_other(sliced),) * self._data_parallel
        return tuple(
            self._flow(packing, packs, forward, backward, self.slack).flow if dp_rank in (None, rank) else ()
            for rank, packs in enumerate(packing.assigned)
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

    def _flow(
        self, packing: Packing, packs: list[int], forward: Floats, backward: Floats, slack: int
    ) -> Schedule:
        assert packing.slices is not None
        tokens = np.array([float(packing.packs[pack][:, LENGTH].sum()) for pack in packs])
        sliced = [sliced_document(packing.packs[pack], packing.slices[pack]) for pack in packs]
        return packflow(
            Packs.of(forward[packs], backward[packs], tokens, sliced),
            self._pipeline,
            slack=slack,
            limit=self._settings.tokens_in_flight,
        )

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
                seconds = sum(self._seconds(batch, count, slacks) for batch in batches)
            except PlanError:  # the documents have too few tokens for so many
                if not found:
                    raise
                break
            found |= {(count, slack): float(of) for slack, of in zip(slacks, seconds, strict=True)}
        shortest = min(found.values())
        return next(choice for choice, seconds in found.items() if seconds <= WORSE * shortest)

    def _seconds(self, batch: Documents, count: int, slacks: tuple[int, ...]) -> Floats:
        """float64 (slacks,), how long a step takes whose slowest data-parallel rank is waited for."""
        packing = self._pack(batch, count, place_greedily)
        assert packing.assigned is not None
        forward, backward = self._pass_seconds(packing)
        return np.array(
            [
                max(
                    self._flow(packing, packs, forward, backward, slack).seconds for packs in packing.assigned
                )
                for slack in slacks
            ]
        )

    def _work(self, packing: Packing) -> tuple[Floats, Floats]:
        return packing.work(self._cost_model.forward), packing.work(self._cost_model.backward)


def one_after_the_other(sliced: Sequence[Sequence[int]]) -> Flow:
    """The order without a pipeline, one for all data-parallel ranks.

    FSDP gathers in every pass and reduces in every backward pass, so that all ranks must run forward and
    backward passes at the same places. Where the documents of one rank begin and end within those of another,
    all of them go forward before they go backward.

    Example: packs with slices of 7, 7, none, none on one rank and of 8, 8, 8, none on another run as F0 F1 F2
    B2 B1 B0 F3 B3 on both.

    Args:
        sliced: of each rank and pack the document of which it has a slice, -1 where it has none.
    """
    actions: list[Action] = []
    begin, count = 0, len(sliced[0])
    for end in range(1, count + 1):
        if end < count and any(rank[end - 1] == rank[end] >= 0 for rank in sliced):
            continue
        actions += [Action("F", 0, place) for place in range(begin, end)]
        actions += [Action("B", 0, place) for place in reversed(range(begin, end))]
        begin = end
    return (tuple(actions),)


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


def _check(settings: SlimSettings, pipeline: PipelineShape) -> None:
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
