"""Chooses the settings of `slim` that are `auto`, by simulating the first steps.

MicroPacks, and then slack, are the least with which steps fit and take at most `WORSE` times as long as with
the best that fit. If `tokens_in_flight` is "least" they are the fewest with which steps take at most `WORSE`
times as long again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from wlb_titan.errors import PlanError
from wlb_titan.packing.policy import Pack
from wlb_titan.packing.slim.flow import Flows, Timed
from wlb_titan.packing.slim.packer import Packer

if TYPE_CHECKING:
    from wlb_titan.job import Job

NUMBERS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""MicroPacks to try, relative to the context windows of a data-parallel rank in a step."""

SLACKS = (0, 2, 4)
IN_FLIGHT = (1, 1.25, 1.5, 2, 3, 4)  # tokens in flight, in context windows
STEPS = 4  # simulated for each choice
WORSE = 1.01  # how much longer than the shortest a step may take


def numbers_tried(windows: int, stages: int) -> list[int]:
    """MicroPacks that `auto` tries; `windows` are the context windows of a rank in a step."""
    fewest = max(windows, stages)
    return sorted({max(fewest, round(windows * factor)) for factor in NUMBERS})


class Trials:
    """Some steps, packed into each of `numbers` packs and ordered with each of `slacks`, both rising."""

    def __init__(
        self,
        batches: Sequence[Pack],
        packer: Packer,
        flows: Flows,
        job: Job,
        numbers: Sequence[int],
        slacks: Sequence[int],
    ) -> None:
        self._flows, self._job = flows, job
        self._tried: dict[int, list[Timed]] = {}
        self._seconds: dict[tuple[int, int], float] = {}
        for count in numbers:
            pack = packer.packed if self._tried else packer.at_most
            try:
                packings = [pack(batch, count) for batch in batches]
            except PlanError:  # the documents have too few tokens
                break
            self._tried[count] = [flows.timed(packing) for packing in packings]
            for slack in slacks:
                self._seconds[count, slack] = flows.seconds(self._tried[count], slack)
        self.micropacks, self.slack = self._best_that_fits()

    def _best_that_fits(self) -> tuple[int, int]:
        """MicroPacks and slack; if steps do not fit with any, most packs and least slack."""
        seconds = self._seconds

        @cache
        def fits(choice: tuple[int, int]) -> bool:
            count, slack = choice
            steps = self._tried[count]
            peaks = (self._flows.peak(step[0], self._flows.of(step, slack).flow) for step in steps)
            return all(peak is None or peak.total <= self._job.fitting.usable for peak in peaks)

        best = next((choice for choice in sorted(seconds, key=seconds.__getitem__) if fits(choice)), None)
        if best is None:
            return max(seconds, key=lambda choice: (choice[0], -choice[1]))
        return next(choice for choice in seconds if seconds[choice] <= WORSE * seconds[best] and fits(choice))

    def least_in_flight(self, window: int) -> float | None:
        """The fewest tokens in flight with which steps take hardly longer than without that limit."""
        most, chosen = self._flows.limit, (self.micropacks, self.slack)
        for windows in IN_FLIGHT:
            limit = windows * window
            if most is not None and limit >= most:
                break
            self._flows.limit = limit
            seconds = self._flows.seconds(self._tried[self.micropacks], self.slack)
            if seconds <= WORSE * self._seconds[chosen]:
                return limit
        return most
