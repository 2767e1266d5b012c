"""In which order a pipeline runs micro-batches of different sizes (docs/pipeline.md, "Order").

`best` looks for the shortest step of the schedule's dependency graph (`pipeline/graph.py`, with an example).
Communication is taken as free, and stages as equal.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError
from wlb_titan.pipeline.graph import PipelineGraph
from wlb_titan.pipeline.schedule import KNOWN, PipelineShape
from wlb_titan.plugins import Family, Plugin, PluginConfig, is_ours

ORDERS = Family(
    kind="order of micro-batches",
    key="order",
    group="wlb_titan.order",
    base="wlb_titan.pipeline.order:MicroBatchOrder",
    shipped={"as_packed": "wlb_titan.pipeline.order:AsPacked", "best": "wlb_titan.pipeline.order:Best"},
)

EXHAUSTIVE = 6  # most micro-batches for which all orders are tried, 720
BATCH = 64  # orders evaluated together in the search
BUDGET_SECONDS = 2e-3  # of a search, on an ordinary core
PASS_SECONDS = 5e-6  # time to evaluate one pass for BATCH orders: turns the budget into evaluations


class MicroBatchOrder(Plugin, ABC):
    """In which order a rank runs the micro-batches of a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[wlb.pipeline]: how micro-batches of different lengths go through the pipeline."""

        family = ORDERS

    for_all: ClassVar[bool] = False
    """Data-parallel ranks share one order, found for their mean; otherwise each has its own."""

    def __init__(self, config: Any, shape: PipelineShape) -> None:
        self._shape = shape

    @abstractmethod
    def places(self, forward: Floats, backward: Floats) -> Ints:
        """int64 (n,), the micro-batches in the order in which a rank runs them.

        Args:
            forward, backward: float64 (n,), times of each one through the rank, in one unit.
        """


class AsPacked(MicroBatchOrder):
    """As the packing policy made them, which is longest first for the policies that balance."""

    def places(self, forward: Floats, backward: Floats) -> Ints:
        return np.arange(len(forward))


class Best(MicroBatchOrder):
    """The order with the shortest predicted step, for the schedules whose dependency graph is known."""

    for_all = True

    def __init__(self, config: Any, shape: PipelineShape) -> None:
        super().__init__(config, shape)
        if shape.schedule not in KNOWN:
            raise PlanError(
                "The order 'best' is searched on the schedule's dependency graph, which is known only for "
                f"{', '.join(KNOWN)}, not for {shape.schedule}. Choose one of those schedules, or the order "
                "'as_packed'."
            )

    def places(self, forward: Floats, backward: Floats) -> Ints:
        n = len(forward)
        if self._shape.ranks == 1 or n < 2:
            return np.arange(n)
        graph = PipelineGraph(self._shape, n)
        if n <= EXHAUSTIVE:
            orders = np.array(list(itertools.permutations(range(n))))
            return np.asarray(orders[graph.step_times(forward, backward, orders).argmin()])
        longest = longest_first(forward, backward)
        starts = np.stack([np.arange(n), longest, longest[::-1], hill(longest)])
        return _search(graph, forward, backward, starts)


def arranged(
    order: MicroBatchOrder, run: int, assigned: list[list[int]], forward: Floats, backward: Floats
) -> list[list[int]]:
    """The packs of each data-parallel rank, in the order in which it runs them.

    Args:
        run: micro-batches that go through the pipeline together; a step may have several runs.
        assigned: numbers of each rank's packs, equally many.
        forward, backward: float64 (packs,), predicted times of their passes, in one unit.
    """
    count = len(assigned[0])
    assert count % run == 0, f"{count} micro-batches make no whole runs of {run}"  # `Pipeline.check`
    packs = np.array(assigned)
    for first in range(0, count, run):
        rows = packs[:, first : first + run]
        if order.for_all and len(rows) > 1:
            rows = np.stack([row[longest_first(forward[row], backward[row])] for row in rows])
            rows = rows[:, _places(order, forward[rows].mean(axis=0), backward[rows].mean(axis=0))]
        else:
            rows = np.stack([row[_places(order, forward[row], backward[row])] for row in rows])
        packs[:, first : first + run] = rows
    result: list[list[int]] = packs.tolist()
    return result


def _places(order: MicroBatchOrder, forward: Floats, backward: Floats) -> Ints:
    places = order.places(forward, backward)
    if not is_ours(type(order)) and sorted(places) != list(range(len(forward))):
        name = f"{type(order).__module__}:{type(order).__qualname__}"
        raise PlanError(
            f"{name} breaks the rule of orders (docs/extending.md): each of {len(forward)} micro-batches has "
            f"one place, and places() returns {places}."
        )
    return places


def longest_first(forward: Floats, backward: Floats) -> Ints:
    return np.argsort(-(forward + backward), kind="stable")


def hill(longest: Ints) -> Ints:
    """The longest in the middle, shorter ones towards both ends: 0 1 2 3, longest first, -> 2 0 1 3."""
    return np.concatenate([longest[::2][::-1], longest[1::2]])


def _search(graph: PipelineGraph, forward: Floats, backward: Floats, starts: Ints) -> Ints:
    """The best of `starts`, improved by random exchanges and moves."""
    times = graph.step_times(forward, backward, starts)
    best: Ints = starts[times.argmin()]
    shortest = times.min()
    random = np.random.default_rng(0)
    for _ in range(math.floor(BUDGET_SECONDS / (len(graph.actions) * PASS_SECONDS))):
        orders = best[_variations(len(best), random)]
        times = graph.step_times(forward, backward, orders)
        if times.min() < shortest:
            best, shortest = orders[times.argmin()], times.min()
    return best


def _variations(n: int, random: np.random.Generator) -> Ints:
    """int64 (BATCH, n): permutations that exchange two entries, or move one to before or behind another."""
    rows = np.arange(BATCH)
    first, second = random.integers(n, size=(2, BATCH))
    keys = np.tile(np.arange(n, dtype=np.float64), (BATCH, 1))
    keys[rows, first] = second
    exchanged = random.integers(2, size=BATCH).astype(bool)
    keys[rows[exchanged], second[exchanged]] = first[exchanged]
    keys[rows[~exchanged], first[~exchanged]] += random.choice([-0.5, 0.5], size=int((~exchanged).sum()))
    return np.argsort(keys, axis=1, kind="stable")
