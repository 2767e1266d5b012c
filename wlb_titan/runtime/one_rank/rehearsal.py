"""One rank of a job for real, on the device at hand: whole planned steps, of which every pass is measured.

Model, data, kernels and schedule are the job's own; weights are made up, and so is what other ranks would
send. What comes back from a collective has the shape, type and device that the real one's would, and finite
values: this rank's own data in the place of another rank's, wherever it has such data, and where there is
none, as in a receive, normal noise. Zeros would not do: a GPU multiplies them faster than numbers.

A collective's answer takes time that is not the collective's, a copy within the device. It is measured as
passes are, and taken out of them; what the job would wait for the collective itself is added.

What differs from the job: no other rank is waited for, weights are not trained, and values that come from
other ranks are not theirs, so that experts get as many tokens as this rank sends.
"""

from __future__ import annotations

import bisect
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from wlb_titan.errors import UserError
from wlb_titan.memory.rank import GIB
from wlb_titan.runtime.compat import fake_group, ranks_of_group
from wlb_titan.runtime.data.dataloader import Step
from wlb_titan.runtime.job import device_bytes
from wlb_titan.runtime.memory import check_memory, check_planned_memory
from wlb_titan.runtime.one_rank.dry_trace import bytes_of, kind_of
from wlb_titan.runtime.one_rank.trainer import OneRankTrainer
from wlb_titan.runtime.step_trace import PassTimer
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.calls import RECEIVE, SEND
from wlb_titan.simulator.measured import Pass

ANSWER, STEP = "answer", "step"
"""The kinds that answers and the whole step have among the passes of a timer."""

BACKEND = "answering"
HOOK = 4711  # any number that torch's own hooks do not have


class RehearsalTrainer(OneRankTrainer):
    """One rank of a job, built as the job builds it, with weights made up.

    Args:
        first: first step of the plan that counts, from 1; the plans before it and the warm-up's are left out.
        warm_up: steps before it that are run and not counted.
        steps: that count.
        seconds: after which no further step begins.
        memory_gib: what the rank may take; None: what the device has.
    """

    def __init__(
        self,
        config: Trainer.Config,
        *,
        rank: int,
        world_size: int,
        first: int,
        warm_up: int,
        steps: int,
        seconds: float,
        memory_gib: float | None = None,
    ) -> None:
        self._first, self._warm_up, self._number = first, warm_up, steps
        self._limit, self._memory_gib = seconds, memory_gib
        self._traffic = Traffic()
        self._values: list[torch.Tensor] = []
        changed = replace(config, metrics=replace(config.metrics, log_freq=1))
        super().__init__(changed, rank=rank, world_size=world_size)
        # On the CPU all runs in this thread: its own time has nothing in it of what others do there.
        self.timer.clock = time.thread_time
        self._traffic.timer, self._traffic.wait = self.timer, self._wait

    def start_group(self) -> None:
        self._memory = self._allowed_memory()
        check_memory(self.job, self._memory)
        dist.Backend.register_backend(BACKEND, self._traffic.make_group, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, rank=self._rank, world_size=self._world_size, store=dist.HashStore())

    def _allowed_memory(self) -> int:
        """Bytes that this rank may take; an allocation beyond them fails."""
        whole = device_bytes()
        if self._memory_gib is None:
            return whole
        memory = int(self._memory_gib * GIB)
        if memory > whole:
            raise UserError(
                f"--memory-gib: the device has {whole / GIB:.2f} GiB, less than {self._memory_gib:g}."
            )
        if self.device.type == "cpu":
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
        else:
            torch.cuda.set_per_process_memory_fraction(memory / whole)
        return memory

    def run(self) -> Iterator[dict[str, Any]]:
        """Runs steps of the plan, and yields after each that counts what `wlb-titan rehearse --output` writes
        of a rank."""
        begin = time.perf_counter()
        planned = self._steps(self._first - self._warm_up)
        for _ in range(self._warm_up):
            self._step(next(planned))
        self._traffic.asked.clear()
        results: list[dict[str, Any]] = []
        for _ in range(self._number):
            if time.perf_counter() - begin > self._limit and results:
                return
            step = next(planned)
            results.append(self._step(step))
            if len(results) == 1:
                collectives = self._collectives(self._traffic.asked)
                predicted = self._predicted(step.plan)
            yield {
                **self._facts(),
                "device": self._device_name(),
                "first": self._first,
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
        passes, seconds, optimizer = without_answers(self.timer.stop())
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

    def _wait(self, kind: str, group: str, bytes_: int) -> float:
        """The seconds that the job waits for a collective; on a CPU waits as long, since a core that has
        waited is slower at first."""
        exposed = self._exposed(kind, group)
        seconds = exposed * self._seconds(kind, group, bytes_) if exposed else 0.0
        if self.device.type == "cpu":
            time.sleep(seconds)
        return seconds

    def _exposed(self, kind: str, group: str) -> float:
        """The share of a collective's seconds that the job waits for where it asks: for tensor parallelism,
        what does not overlap with matrix products. Others overlap with passes or are predicted, unless
        nothing overlaps; what stages send is in the pipeline's graph."""
        if self._axes.get(group) == "tp":
            return 1 - self.job.tensor_overlap
        return float(not self.job.overlap and kind not in (SEND, RECEIVE))

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


class Traffic:
    """What a rank asks of its process groups, and what they answer.

    The groups are torch's fake ones, which repeat this rank's own data where they can. Hooks around every
    call count it, measure the answer, and make up what only another rank has.

    Attributes:
        asked: number of calls and bytes, of the larger of what goes in and what comes out, by kind of
            collective and name of group.
        timer: measures the answers while it is on and they are on the passes' own stream; to be set once
            there is one.
        wait: is told kind, name of group and bytes of each answer that is measured, before it ends, and
            gives the seconds that the job waits in its place.
    """

    def __init__(self) -> None:
        self.asked: dict[tuple[str, str], tuple[int, int]] = {}
        self.timer: PassTimer | None = None
        self.wait: Callable[[str, str, int], float] = lambda kind, group, bytes_: 0.0
        self._call: Any = None
        self._begin: Any = None

    def make_group(self, store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
        """As torch calls it for each process group that this rank is in."""
        group = fake_group(store, rank, size)
        group.register_pre_hook(HOOK, self._before)
        group.register_post_hook(HOOK, partial(self._after, group))
        return group

    def _before(self, call: Any) -> None:
        timed = self.timer is not None and self.timer.measures_this_stream()
        self._call, self._begin = call, self.timer.mark() if timed else None

    def _after(self, group: dist.ProcessGroup, _: Any) -> None:
        call, self._call = self._call, None  # it would keep the tensors
        kind = kind_of(call.name.name)
        if kind in (None, "barrier"):
            return
        sent, received = call.input_tensors, call.output_tensors
        key = kind, group.group_name
        bytes_ = max(bytes_of(sent), bytes_of(received))
        number, total = self.asked.get(key, (0, 0))
        self.asked[key] = number + 1, total + bytes_
        with torch.no_grad():
            if kind == "all-to-all":
                for source, target in zip(sent, received, strict=True):
                    if source.numel() < target.numel():
                        repeat(source, target)
            elif kind == RECEIVE or (kind in ("broadcast", "scatter") and call.root != group.rank()):
                make_up(received or sent)
        if self._begin is not None:
            self.timer.keep(ANSWER, self._begin, waited=self.wait(*key, bytes_))


def repeat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fills a tensor with another's values, from the first again where they end; of none, with zeros."""
    flat, own = target.view(-1), source.reshape(-1)
    if not own.numel():
        flat.zero_()
        return
    whole = flat.numel() // own.numel() * own.numel()
    flat[:whole].view(-1, own.numel()).copy_(own)
    flat[whole:].copy_(own[: flat.numel() - whole])


def make_up(tensors: Sequence[torch.Tensor]) -> None:
    """Fills tensors: of floating point with normal noise, others with zeros."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()


def without_answers(measured: Sequence[Pass]) -> tuple[list[Pass], float, float]:
    """What a step's passes take without the answers of the rank's groups.

    Args:
        measured: passes, answers, each with what the job waits in its place, and the step.

    Returns:
        Passes, in pieces; seconds of the step with all that it waits for; and seconds after its last pass,
        of clipping and optimizer, with what is waited for outside passes.
    """
    answers = [one for one in measured if one.kind == ANSWER]
    (step,) = (one for one in measured if one.kind == STEP)
    starts = [one.start for one in answers]

    def within(start: float, end: float) -> list[Pass]:
        return answers[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]

    def pieces(start: float, end: float) -> list[float]:
        between = within(start, end)
        begins = [start, *(one.end for one in between)]
        ends = [*(one.start for one in between), end]
        return [end - begin for begin, end in zip(begins, ends, strict=True)]

    passes = []
    for one in measured:
        if one.kind not in (ANSWER, STEP):
            own, waited = pieces(one.start, one.end), _waited(within(one.start, one.end))
            passes.append(one._replace(seconds=sum(own), pieces=own, waited=waited))
    last = max((one.end for one in measured if one.kind not in (ANSWER, STEP)), default=step.end)
    everything = _waited(answers)
    seconds = sum(pieces(step.start, step.end)) + everything
    return passes, seconds, sum(pieces(last, step.end)) + everything - _waited(passes)


def _waited(passes: Sequence[Pass]) -> float:
    return sum(one.waited or 0.0 for one in passes)


def _out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate; on the CPU its error has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _peak(on_cpu: bool) -> int:
    """Peak bytes: on an accelerator those allocated in the step, on a CPU those resident since the start."""
    if on_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak: int = torch.accelerator.max_memory_allocated()
    return peak
