"""The trainer of a rehearsal: one rank for real, on the device at hand, in a group of its own."""

from __future__ import annotations

import bisect
import dataclasses
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wlb_titan.errors import UserError
from wlb_titan.memory.rank import GIB
from wlb_titan.runtime.compat import ranks_of_group
from wlb_titan.runtime.data.dataloader import Step
from wlb_titan.runtime.lone.group import ANSWER, start_lone_group
from wlb_titan.runtime.lone.trainer import LoneTrainer, lone_config
from wlb_titan.runtime.memory import check_planned_memory
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.measured import Pass

STEP = "step"
"""The kind that the whole step has among the passes of a timer."""


class RehearsalTrainer(LoneTrainer):
    """One rank of a job, built as the job builds it, with weights made up.

    Args:
        config: of the job. Checkpoints and files are switched off in a copy.
        memory: bytes that the rank may take.
    """

    def __init__(self, config: Trainer.Config, *, rank: int, world_size: int, memory: int) -> None:
        self._memory = memory
        changed = lone_config(config)
        changed = dataclasses.replace(changed, metrics=dataclasses.replace(changed.metrics, log_freq=1))
        super().__init__(changed, rank=rank, world_size=world_size)
        self._traffic.timer, self._traffic.wait = self.timer, self._wait
        # On the CPU all runs in this thread: its own time has nothing in it of what others do there.
        self.timer.clock = time.thread_time
        self._values: list[torch.Tensor] = []
        self._waits: list[float] = []

    def start_group(self) -> None:
        """One that answers at once with finite data."""
        self._traffic = start_lone_group(self._rank, self._world_size)

    def run(self, first: int, warm_up: int, steps: int, seconds: float) -> Iterator[dict[str, Any]]:
        """Runs steps of the plan.

        Args:
            first: first step that counts, from 1; the plans before it and the warm-up's are left out.
            warm_up: steps before it that are run and not counted.
            steps: that count.
            seconds: after which no further step begins.

        Yields:
            What `wlb-titan rehearse --output` writes of a rank, after each step that counts.

        Raises:
            UserError: a step is predicted not to fit, or did not; its values are not finite; or the time was
                over before a step was counted.
        """
        begin = time.perf_counter()
        planned = self._steps(first - warm_up)
        for _ in range(warm_up):
            self._step(next(planned))
        self._traffic.clear()
        results: list[dict[str, Any]] = []
        for _ in range(steps):
            if time.perf_counter() - begin > seconds and results:
                return
            step = next(planned)
            results.append(self._step(step))
            if len(results) == 1:
                collectives = self._collectives(self._traffic.collectives)
                predicted = self._predicted(step.plan)
            yield {
                **self._facts(),
                "device": self._device_name(),
                "first": first,
                "steps": results,
                **predicted,
                "collectives": collectives,
                "seconds": time.perf_counter() - begin,
            }

    def _step(self, planned: Step) -> dict[str, Any]:
        """Runs and measures one step."""
        self.step += 1
        self.gc_handler.run(self.step)
        prediction = check_planned_memory(self.job, planned.plan, self._replica, self._stage, self._memory)
        on_cpu = self.device.type == "cpu"
        if not on_cpu:
            torch.accelerator.reset_peak_memory_stats()
        self._values = []
        self._waits = []
        self.timer.start()
        try:
            with self.timer.time(STEP, 0, 0):
                self.train_step(iter([planned]))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            raise UserError(
                f"Step {planned.plan.iteration + 1} does not fit {self._memory / GIB:.2f} GiB: it ran out of "
                f"memory, and the prediction is {prediction or 'not known'}."
            ) from error
        passes, seconds, optimizer = without_answers(self.timer.stop(), self._waits)
        if not all(bool(value.isfinite().all()) for value in self._values):
            raise UserError(
                f"Step {planned.plan.iteration + 1} has values that are not finite, on weights and data that "
                "are made up. Their times say nothing; is the model's initialisation sound?"
            )
        return {
            "iteration": planned.plan.iteration,
            "lengths": [m.length for m in planned.plan.of_rank(self._replica)],
            "passes": passes,
            "optimizer": optimizer,
            "seconds": seconds,
            "peak_gib": _peak(on_cpu) / GIB,
        }

    def report(self, step: Step, loss: torch.Tensor, grad_norm: torch.Tensor, *_: Any) -> None:
        """Keeps what has to be finite; nothing waits for it."""
        self._values = [loss.detach(), grad_norm.detach()]

    def _wait(self, kind: str, group: str, bytes_: int) -> None:
        """Keeps the seconds that the job waits for a collective; on a CPU waits as long, since a core that
        has waited is slower at first."""
        exposed = self._exposed(kind, group)
        seconds = exposed * self._seconds(kind, group, bytes_) if exposed else 0.0
        self._waits.append(seconds)
        if self.device.type == "cpu":
            time.sleep(seconds)

    def _exposed(self, kind: str, group: str) -> float:
        """The share of a collective's seconds that is waited for where it is asked for: of tensor parallelism
        what does not hide under products. Others hide behind passes or are predicted, unless nothing runs
        behind passes; what stages send is in the pipeline's graph."""
        if self._axes.get(group) == "tp":
            return 1 - self.job.tensor_overlap
        return float(not self.job.overlap and kind not in ("send", "receive"))

    def _seconds(self, kind: str, group: str, bytes_: int) -> float:
        """Seconds of a collective, as the cluster file has it."""
        ranks = ranks_of_group(group)
        if len(ranks) == 1:
            return 0.0
        link = self.job.cluster.link(len(ranks), ranks[1] - ranks[0])
        return link.collective(bytes_ * (2 if kind == "all-reduce" else 1), len(ranks))

    def _device_name(self) -> str:
        if self.device.type == "cpu":
            return f"CPU, {torch.get_num_threads()} thread"
        return torch.cuda.get_device_name(self.device)


def without_answers(measured: Sequence[Pass], waits: Sequence[float]) -> tuple[list[Pass], float, float]:
    """What a step's passes take without the answers of the rank's group.

    Args:
        measured: passes, answers and the step.
        waits: seconds that a pass waits for each answer in the job.

    Returns:
        Passes, in pieces; and seconds of the step with all that it waits for, and of what comes behind its
        last pass, clipping and optimizer, with what is waited for outside passes.
    """
    answers = list(zip((one for one in measured if one.kind == ANSWER), waits, strict=True))
    starts = [one.start for one, _ in answers]

    def within(start: float, end: float) -> list[tuple[Pass, float]]:
        return answers[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]

    def pieces(start: float, end: float) -> list[float]:
        between = [one for one, _ in within(start, end)]
        begins = [start, *(one.start + one.seconds for one in between)]
        ends = [*(one.start for one in between), end]
        return [end - begin for begin, end in zip(begins, ends, strict=True)]

    passes = []
    for one in measured:
        if one.kind not in (ANSWER, STEP):
            place = one.start, one.start + one.seconds
            own, waited = pieces(*place), sum(wait for _, wait in within(*place))
            passes.append(one._replace(seconds=sum(own), pieces=own, waited=waited))
    (step,) = (one for one in measured if one.kind == STEP)
    end = step.start + step.seconds
    last = max((one.start + one.seconds for one in measured if one.kind not in (ANSWER, STEP)), default=end)
    outside = sum(waits) - sum(one.waited or 0.0 for one in passes)
    return passes, sum(pieces(step.start, end)) + sum(waits), sum(pieces(last, end)) + outside


def _out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate; on the CPU its error has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _peak(on_cpu: bool) -> int:
    """Peak bytes: on an accelerator those allocated in the step, on a CPU those resident since the start."""
    if on_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak: int = torch.accelerator.max_memory_allocated()
    return peak
