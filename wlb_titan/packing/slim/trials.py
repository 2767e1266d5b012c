"""Trials of what settings of `slim` leave open, on the first steps, packed and run ahead of time.

MicroPacks and slack are the fewest and least with which steps fit and take at most `WORSE` times as long as
with the best that fit; tokens in flight, where `least` is asked for, the fewest with which they take at most
so much longer again.
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
"""MicroPacks that are tried, relative to the context windows of a data-parallel rank in a step."""

SLACKS = (0, 2, 4)
"""Slack that is tried with each."""

IN_FLIGHT = (1, 1.25, 1.5, 2, 3, 4)
"""Tokens in flight that `least` tries, in context windows."""

STEPS = 4  # that they are tried on
WORSE = 1.01  # time of a step, relative to the shortest, that fewer MicroPacks and tokens in flight may take


def numbers_tried(windows: int, stages: int) -> list[int]:
    """MicroPacks that `auto` tries, by context windows of a rank in a step and pipeline stages."""
    fewest = max(windows, stages)
    return sorted({max(fewest, round(windows * factor)) for factor in NUMBERS})


class Trials:
    """Some steps, each packed into the numbers of packs that are tried.

    Args:
        batches: documents of each step.
        numbers, slacks: that are tried, rising.

    Attributes:
        micropacks, slack: what was chosen.
    """

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
            except PlanError:  # the documents have too few tokens for so many
                break
            self._tried[count] = [flows.timed(packing) for packing in packings]
            for slack in slacks:
                self._seconds[count, slack] = flows.seconds(self._tried[count], slack)
        self.micropacks, self.slack = self._best_that_fits()

    def _best_that_fits(self) -> tuple[int, int]:
        """The first numbers of packs and slack with which steps fit and take hardly longer than with the
        best; if they fit with none, most packs and least slack."""
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
        """The fewest tokens in flight with which steps take hardly longer than with what was chosen."""
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
