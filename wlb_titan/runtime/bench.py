"""Policies in turns on one model: what every rank of `wlb-titan bench` runs.

Machines drift by tens of percent within minutes, so runs one after another say little about policies. Here a
round is a step of each policy, on the same weights, which stay as they are, and in the same process groups.
Each policy reads the stream of documents that a run of its own would read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from wlb_titan.corpus import Corpus
from wlb_titan.files import save
from wlb_titan.job import Job
from wlb_titan.runs import BENCH_FILE, TURNS, mean_parts
from wlb_titan.runtime.agreement import agreed_job, timeout
from wlb_titan.runtime.attention.implementation import compile_attention
from wlb_titan.runtime.attention.module import ContextAttention, attentions, prepare_attention
from wlb_titan.runtime.checks import turns_of
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import job_of, parallel_dims
from wlb_titan.runtime.dataloader import PlannedDataLoader, Step
from wlb_titan.runtime.memory import measured_memory
from wlb_titan.runtime.meshes import Dims, context_meshes
from wlb_titan.runtime.models.compiling import prepare_compiling
from wlb_titan.runtime.trainer import Trainer
from wlb_titan.simulator.choice import predicted
from wlb_titan.summary import best_in_turns, fastest

ERROR_OF_MEDIAN = 1.86  # times the median deviation over the root of the number, for normal noise
WARM_UP = 1  # rounds that do not count: kernels are compiled, and memory is allocated


@dataclass
class Turn:
    """What a policy brings when its turn comes."""

    policy: str
    job: Job
    loader: PlannedDataLoader
    steps: Iterator[Step]
    contexts: list[dict[int, ContextAttention]]  # of each attention layer
    measured: list[tuple[float, ...]] = field(default_factory=list)  # rows as of `bench_records`
    figures: list[dict[str, Any]] = field(default_factory=list)  # of their traces, on the rank that reports


class BenchTrainer(Trainer):
    """Runs the rounds of [wlb.bench], and writes bench.json into the dump folder."""

    def __init__(self, config: TrainerConfig, corpus: Corpus | None = None) -> None:
        dims, configs = parallel_dims(config, int(os.environ["WORLD_SIZE"])), turns_of(config)
        self._jobs = {name: job_of(turn, dims) for name, turn in configs.items()}
        self._rounds = WARM_UP + config.wlb.bench.rounds
        wlb, checkpoint = next(iter(configs.values())).wlb, config.checkpoint
        loading = {"load_only": True, "load_step": -1, "initial_load_model_only": True}
        loading |= {"last_save_in_hf": False, "enable": bool(checkpoint.initial_load_path)}
        checkpoint = replace(checkpoint, **loading)
        super().__init__(
            replace(
                config,
                checkpoint=checkpoint,
                metrics=replace(config.metrics, enable_tensorboard=False, enable_wandb=False),
                training=replace(config.training, steps=self._rounds * len(configs)),
                wlb=replace(wlb, epochs=0, trace_every=1, validation=replace(wlb.validation, every=0)),
            ),
            corpus,
        )
        self.step_trace.folder, self.step_trace.told = os.path.join(config.dump_folder, TURNS), True
        self.turns = [self._turn(name) for name in configs]
        torch._dynamo.config.recompile_limit *= len(configs)

    def set_up(self, dims: Dims) -> None:
        """Also makes the process groups of all policies, in one order on all ranks."""
        first, *others = self._jobs
        self._jobs[first] = self.job
        self._jobs |= {name: agreed_job(self.config, self._jobs[name], self.documents) for name in others}
        longest = max(timeout(self.config, job) for job in self._jobs.values())
        super().set_up(dims)
        self.config.comm.train_timeout_seconds = longest
        self._meshes_of = {name: context_meshes(job, dims, self._made) for name, job in self._jobs.items()}

    def _turn(self, name: str) -> Turn:
        job, loader, layers = self._jobs[name], self.dataloader, attentions(self.model_parts)
        if job is not self.job:
            loader = PlannedDataLoader(replace(self.config.dataloader, job=job))
            if self.config.compile.enable:
                prepare_compiling(job)
            for layer in layers:
                layer.context = {}
            prepare_attention(self.model_parts, job, self._meshes_of[name])
        return Turn(name, job, loader, loader.steps(self.lower), [layer.context for layer in layers])

    def train(self, begin: Callable[[int], None], goes_on: Callable[[], bool]) -> bool:
        """Runs all rounds; returns whether nobody asked to stop."""
        for turn in self.turns[1:]:
            compile_attention(self.config, turn.job, self.device)
        done = super().train(begin, goes_on)
        if done and self.metrics_processor.reports:
            self._tell()
        return done

    def train_step(self, data_iterator: Iterator[Step]) -> None:
        """A step of the policy whose turn it is."""
        number, place = divmod(self.step - 1, len(self.turns))
        turn = self.turns[place]
        self.job, self.dataloader = turn.job, turn.loader
        for layer, context in zip(attentions(self.model_parts), turn.contexts, strict=True):
            layer.context = context
        on_cpu = self.device.type == "cpu"
        if not on_cpu:
            torch.accelerator.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):  # of a Linux without it
                Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
        self.step_trace.begin(self.step)
        begin = time.perf_counter()
        with self.timer.time("loading"):
            step = next(turn.steps)
        loss = self.gradients(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0  # weights stay
        with self.timer.time("optimizer"):
            self.update()
        if not on_cpu:
            torch.accelerator.synchronize()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        figures = self.step_trace.end(self.step, step.plan, self.job)
        balance = figures.get("measured_imbalance", nan), figures.get("bubble", 0.0)
        peak = max(measured_memory(self.parallel_dims, self.device, step, None).values())
        mean = dist_utils.dist_sum(loss, self.parallel_dims.get_optional_mesh("loss"))
        if number >= WARM_UP:
            turn.measured.append((seconds.item(), step.flops, step.plan.tokens, *balance, peak))
            turn.figures.append(figures)
        round_ = f"round {number} of {self._rounds - WARM_UP}" if number >= WARM_UP else "warm-up"
        logger.info(f"{round_} | {turn.policy} | loss {mean:8.5f} | {seconds:.2f} s")

    def _tell(self) -> None:
        rates: list[float] = []
        for turn in self.turns:
            slow = turn.job.packing.planning_seconds > 0  # it would plan as long again
            steps = self.documents, self._rounds - WARM_UP, WARM_UP
            rates.append(nan if slow else predicted(turn.job, turn.job.policy, *steps).flops_per_second)
        records = bench_records({turn.policy: np.array(turn.measured) for turn in self.turns}, rates)
        for record, turn in zip(records, self.turns, strict=True):
            record["parts"] = mean_parts(turn.figures)
        path = Path(self.config.dump_folder) / BENCH_FILE
        save(path, {"policies": records}, indent=1)
        logger.info(f"{best_in_turns(records)}. Wrote {path}; `wlb-titan compare {path.parent}` shows it.")

    def close(self) -> None:
        for turn in self.turns:
            turn.loader.close()
        super().close()


def bench_records(measured: Mapping[str, Any], predicted_rates: Sequence[float]) -> list[dict[str, Any]]:
    """What bench.json says of each policy.

    `over_first` is the median over rounds of FLOPs a second over the first policy's: a round's steps meet the
    same machine, and a neighbour that disturbs one of them spoils one round. `scatter` is its standard error,
    from the median deviation. `step` is the policy's in the round nearest to the fastest one's median.

    Args:
        measured: float64 (rounds, 6): seconds, FLOPs, tokens, imbalance, bubble and peak GiB of each step.
        predicted_rates: FLOPs a second; nan where they are not predicted.
    """
    (first, *_), records = (steps[:, 1] / steps[:, 0] for steps in measured.values()), []
    for (policy, steps), expected in zip(measured.items(), predicted_rates, strict=True):
        seconds, flops, tokens, imbalance, bubble, peak = steps.T
        ratios, ratio = flops / seconds / first, expected / predicted_rates[0]
        over = float(np.median(ratios))
        record = {
            "over_first": over,
            "scatter": ERROR_OF_MEDIAN * np.median(np.abs(ratios - over)) / len(ratios) ** 0.5,
            "predicted": ratio if isfinite(ratio) else None,
            "flops_per_second": flops.sum() / seconds.sum(),
            "tokens_per_second": tokens.sum() / seconds.sum(),
            "imbalance": imbalance.mean(),
            "bubble": bubble.mean(),
            "peak_gib": peak.max(),
        }
        records.append({"policy": policy} | {key: value and float(value) for key, value in record.items()})
        records[-1]["step"] = int(abs(ratios - over).argmin())
    round_ = WARM_UP + fastest(records)["step"]
    return [each | {"step": round_ * len(records) + number} for number, each in enumerate(records, start=1)]
