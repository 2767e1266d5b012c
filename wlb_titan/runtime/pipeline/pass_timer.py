"""The time of each pass of a step on this rank, measured where the passes run.

On an accelerator by events in the stream, so that nothing waits for them until the step is over; on the CPU
by the clock. What a pass waits for *within* itself is part of its time: the collectives of FSDP, context and
tensor parallelism. What it waits for *before* it starts, the neighbour stage's tensors, is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wlb_titan.simulator.measured import Pass


class PassTimer:
    """Measures while it is on, and costs next to nothing while it is off.

    Attributes:
        on: whether passes are measured.
        first: number of the first micro-batch of the run at hand; a step may have several runs.
        clock: clock of passes on the CPU, in seconds.
        latest: the latest pass that began, measured or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self.clock: Callable[[], float] = time.perf_counter
        self.first = 0
        self.latest = "the beginning"
        self._device = device
        self._start: Any = None
        self._stream: torch.Stream | None = None
        self._passes: list[tuple[str, int, int, Any, Any]] = []

    def start(self) -> None:
        """Begins to measure, at time 0."""
        self.on = True
        self._passes = []
        if self._device.type != "cpu":
            self._stream = torch.accelerator.current_stream()
        self._start = self._mark()

    @contextmanager
    def time(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Measures what runs within; `micro_batch` counts from the run's first."""
        self.latest = f"{kind}{self.first + micro_batch} of stage {stage}"
        if not self.on:
            yield
            return
        begin = self._mark()
        yield
        self._passes.append((kind, stage, self.first + micro_batch, begin, self._mark()))

    def here(self) -> bool:
        """Whether it is on and what starts now would run where the passes do: on their stream."""
        return self.on and (self._stream is None or torch.accelerator.current_stream() == self._stream)

    def timed(self, function: Callable[..., Any], place: Callable[[], tuple[str, int, int]]) -> Any:
        """`function`, each call of which is measured; `place` says kind, stage and micro-batch of a call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.time(*place()):
                return function(*args, **kwargs)

        return call

    def stop(self) -> list[Pass]:
        """Ends measuring and waits for the accelerator; returns the passes in the order of their ends."""
        self.on = False
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        passes = [
            Pass(
                *(kind, stage, micro_batch, self._seconds(self._start, begin), self._seconds(begin, end)),
                end[1] - begin[1] if self._device.type == "cpu" else None,
            )
            for kind, stage, micro_batch, begin, end in self._passes
        ]
        self._passes = []
        return passes

    def _mark(self) -> Any:
        """A point in time: seconds and this thread's, or an event in the stream."""
        if self._device.type == "cpu":
            return self.clock(), time.thread_time()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return end[0] - begin[0] if self._device.type == "cpu" else begin.elapsed_time(end) / 1e3
