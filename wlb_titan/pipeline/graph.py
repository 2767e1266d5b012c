"""The dependency graph of a pipeline's step: when each pass runs, and how long the step takes.

The method is SlimPack's (section 4.3). Vertices are actions: a pass of one micro-batch through one stage,
with its time. Edges say what waits for what:

    schedule    on a rank, each action for the one before it
    data        F of a stage for F of the stage before; B or I for that of the stage after, or on the last
                stage for its own F, or the last of those whose tokens it has; W for its own I

An action starts when all that it waits for has ended, and the step ends with its last action: the step is as
long as the graph's longest path. Data between ranks takes an additional delay. Two ranks, 1F1B, forward
passes of 1, 1 and 4 units and backward passes of twice that, in the orders 1 1 4, 4 1 1 and 1 4 1:

    >>> graph, seconds = PipelineGraph(PipelineShape("1F1B", 2), 3), np.array([1.0, 1, 4])
    >>> graph.step_times(seconds, 2 * seconds, np.array([[0, 1, 2], [2, 0, 1], [0, 2, 1]])).tolist()
    [30.0, 30.0, 27.0]

Every function works on k steps (or data-parallel ranks) at a time, along the last axis of its arrays, since
they have one graph and differ only in times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import PlanError
from wlb_titan.pipeline.schedule import PipelineShape, rank_actions
from wlb_titan.plan import Action


class PassTimes(NamedTuple):
    """How long passes take, all float64 (stages, micro-batches, k) in one unit, in the order of running."""

    forward: Floats
    inputs: Floats  # I; B takes as long as I and W
    weights: Floats  # W

    @classmethod
    def equal_stages(cls, forward: Floats, backward: Floats, shape: PipelineShape) -> PassTimes:
        """Equal stages, and halves of a backward pass for I and W; arguments are float64 (n, k), times of
        each micro-batch through all stages of a rank."""
        dims = (shape.stages, *forward.shape)
        half = np.broadcast_to(backward / (2 * shape.chunks), dims)
        return cls(np.broadcast_to(forward / shape.chunks, dims), half, half)

    def of(self, action: Action) -> Floats:
        kind, stage, place = action
        times: Floats
        if kind == "B":
            times = self.inputs[stage, place] + self.weights[stage, place]
        else:
            times = {"F": self.forward, "I": self.inputs, "W": self.weights}[kind][stage, place]
        return times


class PipelineGraph:
    """The actions of one step and what each of them waits for.

    Args:
        micro_batches: n, at least 1.
        actions: each rank's actions, in order; None for the schedule's.
        needed: for the place of a backward pass that of the last forward pass that it waits for on the last
            stage; None for its own.
    """

    def __init__(
        self,
        shape: PipelineShape,
        micro_batches: int,
        actions: Sequence[Sequence[Action]] | None = None,
        needed: Mapping[int, int] | None = None,
    ) -> None:
        self.shape = shape
        self._forward_needed = needed or {}
        self.actions: list[Action] = []  # of all ranks, each after all that it waits for
        self._waits: list[tuple[int, int, bool]] = []
        """Numbers (from 1; 0 is none) of the rank's previous action and of the action whose data is needed,
        and whether that data comes from another rank."""
        if actions is None:
            actions = [list(rank_actions(shape, micro_batches, rank)) for rank in range(shape.ranks)]
        self._sort(actions)

    def ends(self, times: PassTimes, delay: Floats | float = 0.0, earliest: Floats | float = 0.0) -> Floats:
        """float64 (actions, k), when every action ends; the step takes the largest of them.

        Args:
            delay: of data from one rank to the next: a number, or float64 (n, k) by micro-batch.
            earliest: when actions may begin: a number, or float64 (actions, k).
        """
        delays = np.broadcast_to(delay, times.forward.shape[1:])
        ends = np.zeros((len(self.actions) + 1, times.forward.shape[2]))
        ends[1:] = earliest
        for number, (action, (before, needed, crosses)) in enumerate(
            zip(self.actions, self._waits, strict=True), start=1
        ):
            ready = ends[needed] + delays[action.place] if crosses else ends[needed]
            np.maximum(ends[number], ready, out=ends[number])
            np.maximum(ends[number], ends[before], out=ends[number])
            ends[number] += times.of(action)
        return ends[1:]

    def slack(self, times: PassTimes) -> Floats:
        """float64 (actions, k), how much longer each action could last without a longer step."""
        ends = self.ends(times)
        latest = np.full_like(ends, ends.max(axis=0))
        for number in reversed(range(len(self.actions))):
            start = latest[number] - times.of(self.actions[number])
            for waited in self._waits[number][:2]:
                if waited:
                    np.minimum(latest[waited - 1], start, out=latest[waited - 1])
        return np.asarray(latest - ends)

    def step_times(self, forward: Floats, backward: Floats, orders: Ints) -> Floats:
        """float64 (k,), the step's time in several orders, with equal stages and free communication.

        Args:
            forward, backward: float64 (n,), times of each micro-batch through all stages of a rank.
            orders: int64 (k, n), permutations of the micro-batches.
        """
        times = PassTimes.equal_stages(forward[orders].T, backward[orders].T, self.shape)
        return np.asarray(self.ends(times).max(axis=0))

    def busy(self, times: PassTimes) -> Floats:
        """float64 (ranks, k), how long each rank computes; the rest of the step is its bubble."""
        result = np.zeros((self.shape.ranks, times.forward.shape[2]))
        for action in self.actions:
            result[self.shape.rank_of(action.stage)] += times.of(action)
        return result

    def _sort(self, waiting: Sequence[Sequence[Action]]) -> None:
        """Appends every action after all that it waits for."""
        numbers: dict[Action, int] = {}
        heads, last = [0] * len(waiting), [0] * len(waiting)
        blocked: dict[int, Action] = {}
        moved = True
        while moved:
            moved, blocked = False, {}
            for rank, actions in enumerate(waiting):
                while heads[rank] < len(actions):
                    action = actions[heads[rank]]
                    needed = self._needed(action, numbers)
                    if needed is None:
                        blocked[rank] = action
                        break
                    source = self.actions[needed - 1].stage if needed else action.stage
                    crosses = self.shape.rank_of(source) != rank
                    self.actions.append(action)
                    self._waits.append((last[rank], needed, crosses))
                    last[rank] = numbers[action] = len(self.actions)
                    heads[rank] += 1
                    moved = True
        if blocked:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in blocked.items())
            raise PlanError(
                f"The actions of the schedule {self.shape.schedule} wait for each other in a circle, so that "
                f"it would never end: {stuck}. Every action must come after those that it needs."
            )

    def _needed(self, action: Action, numbers: dict[Action, int]) -> int | None:
        """The number of the action whose data is needed: 0 for none, None if it has not run yet."""
        kind, stage, place = action
        if kind == "F":
            return 0 if stage == 0 else numbers.get(Action("F", stage - 1, place))
        if kind == "W":
            return numbers.get(Action("I", stage, place))
        if stage == self.shape.stages - 1:
            return numbers.get(Action("F", stage, self._forward_needed.get(place, place)))
        whole = numbers.get(Action("B", stage + 1, place))
        return whole if whole is not None else numbers.get(Action("I", stage + 1, place))
