"""One rank of a job for real, on the device at hand: whole planned steps, with every pass measured.

docs/rehearsal.md says what is the job's own and what is made up: weights, and what other ranks would send.
Zeros would not do for that: a GPU multiplies them faster than other numbers.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from wlb_titan.memory.rank import GIB
from wlb_titan.runtime.compat import fake_group, ranks_of_group
from wlb_titan.runtime.configured import device_bytes
from wlb_titan.runtime.dataloader import Step
from wlb_titan.runtime.memory import check_memory, check_planned_memory
from wlb_titan.runtime.one_rank.dry_trace import bytes_of, kind_of
from wlb_titan.runtime.one_rank.lone import OneRankTrainer
from wlb_titan.runtime.step_trace import PassTimer
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.calls import RECEIVE, SEND
from wlb_titan.simulator.measured import Pass

ANSWER, STEP = "answer", "step"
"""What a timer measures beside passes: answers, and the whole step."""

BACKEND = "answering"
HOOK = 4711  # any number that torch's own hooks do not have


class RehearsalTrainer(OneRankTrainer):
    """One rank of a job, built as the job builds it, with weights made up.

    Args:
        first: number of the first step that counts, from 1. The one before it is run too, so that kernels are
            compiled; those before that are only planned.
    """

    def __init__(self, config: Trainer.Config, *, rank: int, world_size: int, first: int, steps: int) -> None:
        self._first, self._number = first, steps
        self._traffic = Traffic()
        super().__init__(config, rank=rank, world_size=world_size)
        # On the CPU all runs in this thread, whose own time excludes what others do there.
        self.timer.clock = time.thread_time
        self._traffic.timer, self._traffic.wait = self.timer, self._wait

    def start_group(self) -> None:
        check_memory(self.job, device_bytes())
        dist.Backend.register_backend(BACKEND, self._traffic.make_group, devices=["cpu", "cuda"])
        dist.init_process_group(BACKEND, rank=self._rank, world_size=self._world_size, store=dist.HashStore())

    def run(self) -> dict[str, Any]:
        """What `wlb-titan rehearse --output` writes about a rank (docs/rehearsal.md)."""
        begin, on_cpu = time.perf_counter(), self.device.type == "cpu"
        warm_up = min(1, self._first - 1)
        planned = self._steps(self._first - warm_up)
        for step in islice(planned, warm_up):
            self._step(step)
        self._traffic.asked.clear()
        first = next(planned)
        results = [self._step(first)]
        collectives = self._collectives(self._traffic.asked)
        results += [self._step(step) for step in islice(planned, self._number - 1)]
        return {
            **self._facts(),
            "device": f"CPU, {torch.get_num_threads()} thread" if on_cpu else torch.cuda.get_device_name(),
            "first": self._first,
            "steps": results,
            **self._predicted(first.plan),
            "collectives": collectives,
            "seconds": time.perf_counter() - begin,
        }

    def _step(self, planned: Step) -> dict[str, Any]:
        self.step += 1
        self.gc_handler.run(self.step)
        replica, stage = self.parallel_dims.place("batch"), self.parallel_dims.place("pp")
        check_planned_memory(self.job, planned.plan, replica, stage, device_bytes())
        on_cpu = self.device.type == "cpu"  # which does not say what tensors take
        if not on_cpu:
            torch.accelerator.reset_peak_memory_stats()
        self.timer.start()
        with self.timer.time(STEP, 0, 0):
            self.gradients(planned)
            self.update()
        passes, seconds, optimizer = without_answers(self.timer.stop())
        return {
            "iteration": planned.plan.iteration,
            "lengths": [m.length for m in planned.plan.of_rank(replica)],
            "passes": list(map(asdict, passes)),
            "optimizer": optimizer,
            "seconds": seconds,
            "peak_gib": None if on_cpu else torch.accelerator.max_memory_allocated() / GIB,
        }

    def _wait(self, kind: str, group: str, bytes_: int) -> float:
        """Seconds that the job waits for a collective at the call. In tensor parallelism it is what does not
        overlap with matrix products. What stages send is in the pipeline's graph."""
        if self._axes.get(group) == "tp":
            exposed = 1 - self.job.tensor_overlap
        else:
            exposed = float(not self.job.overlap and kind not in (SEND, RECEIVE))
        ranks = ranks_of_group(group) if exposed else []
        if len(ranks) < 2:
            return 0.0
        link = self.job.cluster.link(len(ranks), ranks[1] - ranks[0])
        seconds = exposed * link.collective(bytes_ * (2 if kind == "all-reduce" else 1), len(ranks))
        if self.device.type == "cpu":  # it does wait: its cores are slower after that
            time.sleep(seconds)
        return seconds


class Traffic:
    """What a rank asks of its process groups, and what they answer.

    The groups are torch's fake ones, which repeat this rank's own data where they can. Hooks note each call,
    measure the answer, and make up what only another rank has.

    Attributes:
        asked: kind, name of group, and bytes of the larger of input and output of each call.
        timer: measures answers on the passes' own stream while it is on.
        wait: is called before a measured answer ends, with kind, name of group and bytes; returns the
            seconds that the job waits in its place.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.timer: PassTimer | None = None
        self.wait: Callable[[str, str, int], float] = lambda kind, group, bytes_: 0.0
        self._call: Any = None
        self._begin: Any = None

    def make_group(self, store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
        """Called by torch for each process group of this rank."""
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
        if kind is None or kind == "barrier":
            return
        sent, received = call.input_tensors, call.output_tensors
        asked = kind, group.group_name, max(bytes_of(sent), bytes_of(received))
        self.asked.append(asked)
        with torch.no_grad():
            if kind == "all-to-all":
                for source, target in zip(sent, received, strict=True):
                    if source.numel() < target.numel():
                        repeat(source, target)
            elif kind == RECEIVE or (kind in ("broadcast", "scatter") and call.root != group.rank()):
                make_up(received or sent)
        if self._begin is not None:
            self.timer.keep(ANSWER, self._begin, waited=self.wait(*asked))


def repeat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fills `target` with the values of `source`, over and over; with zeros if there are none."""
    flat, own = target.view(-1), source.reshape(-1)
    if not own.numel():
        flat.zero_()
        return
    whole = flat.numel() // own.numel() * own.numel()
    flat[:whole].view(-1, own.numel()).copy_(own)
    flat[whole:].copy_(own[: flat.numel() - whole])


def make_up(tensors: Sequence[torch.Tensor]) -> None:
    """Fills floating-point tensors with normal noise, others with zeros."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()


def without_answers(measured: Sequence[Pass]) -> tuple[list[Pass], float, float]:
    """Replaces a step's answers by what the job waits in their place.

    Returns:
        Passes, in the pieces between answers; seconds of the step, waits included; and seconds after its last
        pass, of clipping and optimizer, with the waits outside passes.
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
            passes.append(replace(one, seconds=sum(own), pieces=own, waited=waited))
    last = max((one.end for one in measured if one.kind not in (ANSWER, STEP)), default=step.end)
    everything = _waited(answers)
    seconds = sum(pieces(step.start, step.end)) + everything
    return passes, seconds, sum(pieces(last, step.end)) + everything - _waited(passes)


def _waited(passes: Sequence[Pass]) -> float:
    return sum(one.waited or 0.0 for one in passes)
