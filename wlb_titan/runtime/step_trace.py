"""Measured steps: times of passes and, every `trace_every` steps, a trace, bubble and imbalance of all ranks.

A traced step starts with a barrier, so that all ranks count from one moment, and ends with a gather of the
passes to the rank that reports. Other steps cost nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger, warn_once

from wlb_titan.arrays import Floats
from wlb_titan.job import Job
from wlb_titan.plan import Plan, imbalance_by_pass
from wlb_titan.runs import COMPUTED, TRACES, mostly, write_trace
from wlb_titan.simulator import calibrate
from wlb_titan.simulator.measured import BESIDE, FLOPS, NAMES, Pass, bubble, step_parts
from wlb_titan.simulator.replicas import facts_of


class PassTimer:
    """Measures while it is on: with events in the stream, for which nothing waits until the step is over, or
    on the CPU with the clock. A pass's time includes its collectives (FSDP, context and tensor parallelism),
    but not the wait for a neighbour stage's tensors."""

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self.clock: Callable[[], float] = time.perf_counter  # of passes on the CPU
        self.first = 0  # micro-batch of the current run, set by the trainer: a step may have several runs
        self.latest = "the beginning"  # the latest pass that started, measured or not
        self._device = device
        self._start: Any = None
        self.kept: Any = None  # the end of what was kept last
        self._stream: torch.Stream | None = None
        self._passes: list[tuple[str, int, int, Any, Any, float | None]] = []

    def start(self) -> None:
        self.on = True
        if self._device.type != "cpu":
            self._stream = torch.accelerator.current_stream()
        self._start = self.kept = self.mark()

    @contextmanager
    def time(self, kind: str, stage: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """Measures a pass, or what is `BESIDE` them; `micro_batch` counts from the run's first."""
        if kind not in BESIDE:
            self.latest = f"{kind}{self.first + micro_batch} of stage {stage}"
        if not self.on:
            yield
            return
        begin = self.mark()
        yield
        self.keep(kind, begin, stage, self.first + micro_batch)

    def keep(
        self, kind: str, begin: Any, stage: int = 0, micro_batch: int = 0, waited: float | None = None
    ) -> None:
        """Keeps a pass from a mark until now; `micro_batch` counts from the step's first."""
        self.kept = self.mark()
        self._passes.append((kind, stage, micro_batch, begin, self.kept, waited))

    def measures_this_stream(self) -> bool:
        """Whether it is on and the current stream is that of the passes."""
        return self.on and (self._stream is None or torch.accelerator.current_stream() == self._stream)

    def stop(self) -> list[Pass]:
        """Ends measuring, waits for the accelerator and returns the passes in the order of their ends."""
        self.on = False
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        kept, self._passes = self._passes, []
        return [
            Pass(
                *(kind, stage, micro_batch, self._seconds(self._start, begin), self._seconds(begin, end)),
                waited=waited,
                facts={COMPUTED: end[1] - begin[1]} if self._device.type == "cpu" else {},
            )
            for kind, stage, micro_batch, begin, end, waited in kept
        ]

    def mark(self) -> Any:
        """A point in time: seconds and this thread's, or an event in the stream."""
        if self._device.type == "cpu":
            return self.clock(), time.thread_time()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return end[0] - begin[0] if self._device.type == "cpu" else begin.elapsed_time(end) / 1e3


class StepTrace:
    """Measures every `every`-th step of the run in a folder; rank `writer` writes traces/step-N.json."""

    def __init__(self, timer: PassTimer, every: int, run: str, writer: int) -> None:
        self._timer, self._every, self._run, self._writer = timer, every, run, writer
        self.folder = os.path.join(run, TRACES)
        self.told = False  # how far predictions are off
        self._warm = self._measuring = False
        self._slow: list[dict[str, float]] = []  # of each traced step
        self._named: set[str] = set()

    def begin(self, step: int) -> None:
        """Starts to measure if this step is due. Call it on every rank."""
        if self._every > 0 and step % self._every == 0:
            dist.barrier()
            self._measuring = True
            self._timer.start()

    def end(self, step: int, plan: Plan, job: Job) -> dict[str, Any]:
        """Returns the figures of a measured step, on the writer alone. Call it on every rank."""
        if not self._measuring:
            return {}
        self._measuring = False
        self._timer.keep("rest", self._timer.kept)
        told = _told(self._timer.stop(), plan, job)
        is_writer = dist.get_rank() == self._writer
        ranks: list[list[Pass]] | None = [[]] * dist.get_world_size() if is_writer else None
        dist.gather_object(told, ranks, dst=self._writer)
        if ranks is None:
            return {}
        told = list(chain.from_iterable(ranks))
        passes = [p for p in told if p.kind in NAMES]
        last = max(p.end for p in passes)  # until then others wait in their optimizers for that rank
        begins = [min(max(p.start, last), p.end) if p.kind == "optimizer" else p.start for p in told]
        told = [replace(p, start=s, seconds=p.end - s) for p, s in zip(told, begins, strict=True)]
        try:
            write_trace(told, os.path.join(self.folder, f"step-{step}.json"))
        except OSError as error:
            said = f"Traces cannot be written to {self.folder}: {error.strerror}. Training continues."
            warn_once(logger, said)
        figures: dict[str, Any] = {"measured_imbalance": measured_imbalance(passes, plan)}
        figures["part_seconds"] = step_parts(told)
        figures |= self._beside_predictions(passes, calibrate.as_predicted(job))
        if job.degrees.pipeline > 1:
            figures["bubble"] = bubble(passes)
        return figures

    def _beside_predictions(self, passes: Sequence[Pass], factors: Floats) -> dict[str, Any]:
        """Names slow ranks, and says once, after the first traced step, how far predictions are off."""
        known, took = calibrate.measurements(passes)
        ratio = took[known.any(axis=1)].sum() / (known @ [*factors, 1.0]).sum()
        if self._warm and not self.told and abs(ratio - 1) > calibrate.DIFFERS:
            self.told = True
            logger.info(
                f"Passes take {ratio:.2f}x of what is predicted, and packing follows predictions. "
                f"`wlb-titan profile --from {self._run} --output FILE` fits them to this run."
            )
        self._warm = True
        slow = calibrate.slow_ranks(passes, factors)
        self._slow.append(slow)
        often = mostly(self._slow) if len(self._slow) > 2 else []  # of fewer steps that says little
        for name in set(often) & slow.keys() - self._named:
            self._named.add(name)
            logger.warning(f"{name} takes {slow[name]:.2f}x of what equal work takes elsewhere, most times.")
        return {"slow_ranks": slow}

    def close(self) -> None:
        """Says once, at the end, what ranks took that were slow now and then."""
        noise = [over for step in self._slow for name, over in step.items() if name not in self._named]
        if noise:
            span = " to ".join(dict.fromkeys(f"{over:.2f}x" for over in (min(noise), max(noise))))
            what = f"took {span} of what equal work takes elsewhere: the machine's noise."
            logger.info(f"In some of {len(self._slow)} traced steps a rank, not always the same, {what}")


def _told(passes: Sequence[Pass], plan: Plan, job: Job) -> list[Pass]:
    """This rank's passes with its place in the job, and the facts of each."""
    number, degrees = dist.get_rank(), job.degrees
    place = degrees.grid.place(number)
    along = [d.axis for d in degrees.dimensions if d.degree > 1 and not d.borrows and d.divides != "data"]
    dp, rank = degrees.replica_at(place), " ".join(f"{axis} {place[axis]}" for axis in along) or "rank"
    micro_batches = plan.of_rank(dp)
    whole = {
        calibrate.JOB: calibrate.fingerprint(job),
        calibrate.RANK: f"rank {number} on {socket.gethostname()}",
    }
    parts = iter(calibrate.pass_parts(job, micro_batches, [p for p in passes if p.kind in NAMES]).tolist())
    told = []
    of_step: dict[str, Any] = {"tokens": plan.tokens, FLOPS: job.model.flops(plan.document_lengths)}
    for one in passes:
        facts = of_step
        if one.kind in NAMES:
            facts = {**facts_of(micro_batches[one.micro_batch]), **one.facts, calibrate.PARTS: next(parts)}
        told.append(replace(one, replica=f"dp {dp}", rank=rank, facts=facts | whole))
    return told


def measured_imbalance(passes: Sequence[Pass], plan: Plan) -> float:
    """Largest over mean time of the job's micro-batches, like the predicted `imbalance` of a plan. A time is
    the sum over all ranks that share the micro-batch."""
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for pass_ in passes:
        seconds[pass_.replica, pass_.micro_batch] += pass_.seconds
    packs = plan.micro_batches
    return imbalance_by_pass(packs, [seconds[f"dp {m.dp_rank}", m.index] for m in packs])
