"""torchtitan's trainer on planned micro-batches.

A micro-batch is one packed sequence, so the batch dimension is always 1. The step of the whole job is
`global_batch_size` micro-batches (or local_batch_size x data-parallel degree), whatever the parallelism:
with pipeline parallelism a rank's `local_batch_size` micro-batches go through the pipeline together, without
it they are accumulated one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.components.validate import Validator as TitanValidator
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.config.settings import WlbSettings
from wlb_titan.corpus import Corpus
from wlb_titan.planner.pipeline_runs import PipelineRuns
from wlb_titan.planner.plan import LENGTH, MicroBatch
from wlb_titan.runtime.dataloader import PlannedDataLoader
from wlb_titan.runtime.imbalance import rank_imbalance
from wlb_titan.runtime.inputs import rank_inputs
from wlb_titan.runtime.lengths import length_divisor
from wlb_titan.runtime.memory import describe_memory, measured_memory
from wlb_titan.runtime.metrics import MetricsProcessor, metrics_rank
from wlb_titan.runtime.pass_timer import PassTimer
from wlb_titan.runtime.pipeline_schedules import pipeline_shape
from wlb_titan.runtime.shape import model_shape
from wlb_titan.runtime.step_trace import StepTrace
from wlb_titan.runtime.validator import Validator


class Trainer(TorchtitanTrainer):
    """Trains on a prepared corpus under the packing and sharding policies of `config.wlb`."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanTrainer.Config):
        wlb: WlbSettings = field(default_factory=WlbSettings)
        """What wlb_titan adds: corpus, packing, sharding."""

        metrics: TitanMetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        validator: TitanValidator.Config = field(default_factory=Validator.Config)

    def __init__(self, config: Config) -> None:
        corpus = Corpus.open(config.wlb.corpus.path)
        assert config.model_spec is not None
        config = dataclasses.replace(
            config,
            hf_assets_path=str(corpus.tokenizer_path),
            dataloader=dataloader_config(config),
        )
        super().__init__(config)
        self.metrics_processor.step_figures = self.step_figures
        self.timer = self.pp_schedule.timer if self.parallel_dims.pp_enabled else PassTimer(self.device)
        self.step_trace = StepTrace(
            self.timer,
            every=config.wlb.trace_every,
            parallel_dims=self.parallel_dims,
            writer=metrics_rank(self.parallel_dims, config.parallelism.pipeline_parallel_schedule),
            folder=config.dump_folder,
        )
        if self.parallel_dims.pp_enabled:
            self.pp_schedule.check_lengths = config.wlb.pipeline.check_lengths
        else:
            self.gradient_accumulation_steps *= config.training.local_batch_size
        if self.device.type == "cpu":
            # gloo has no premultiplied sum, which FSDP would use for its gradient scaling.
            for part in self.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)

    @property
    def planned(self) -> PlannedDataLoader:
        return cast(PlannedDataLoader, self.dataloader)

    def post_dataloading_process(
        self, input_dict: dict[str, Any], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Cuts this context-parallel rank's share out of a micro-batch and makes its attention mask.

        Args:
            input_dict: "input" and "positions", int64 (1, L), and the "micro_batch" they belong to.
            labels: int64 (1, L).

        Returns:
            as `rank_inputs`.
        """
        inputs, positions = input_dict["input"], input_dict["positions"]
        micro_batch: MicroBatch = input_dict["micro_batch"]
        self.ntokens_seen += micro_batch.length // self.parallel_dims.cp
        return rank_inputs(
            self.parallel_dims,
            inputs,
            labels,
            positions,
            micro_batch.documents[:, LENGTH],
            micro_batch.ranks,
        )

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        if self.parallel_dims.pp_enabled:
            return super().forward_backward_step(**arguments)
        with self.timer.time("FB", 0, 0):
            loss = super().forward_backward_step(**arguments)
        self.timer.first += 1
        return loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.step_trace.begin(self.step)
        super().train_step(data_iterator)
        assert self.planned.plan is not None
        self.step_trace.end(self.step, self.planned.plan)  # where the step was not logged

    def step_figures(self) -> dict[str, Any]:
        """What the plan of the current step says, for metrics.jsonl."""
        plan = self.planned.plan
        assert plan is not None
        lengths = np.concatenate([m.documents[:, LENGTH] for m in plan.micro_batches])
        return {
            "tokens": plan.tokens,
            "padding": plan.padding,
            "imbalance": plan.imbalance,
            **rank_imbalance(plan, self.planned.latency),
            "delay_mean": plan.delay,
            "delay_max": plan.max_delay,
            "waiting_documents": plan.waiting_documents,
            "waiting_tokens": plan.waiting_tokens,
            "lost_tokens": plan.lost_tokens,
            "longest_micro_batch": max(m.length for m in plan.micro_batches),
            "plan_ms": plan.plan_ms,
            **self.step_trace.end(self.step, plan),
            **measured_memory(self.parallel_dims, self.device),
            "flops": self.planned.config.shape.flops(lengths),
        }

    def close(self) -> None:
        self.planned.close()
        super().close()

    def train(self) -> None:
        logger.info(
            f"Corpus {self.planned.corpus.path}: {len(self.planned.corpus.lengths):,} documents, "
            f"{int(self.planned.corpus.lengths.sum()):,} tokens"
        )
        for line in describe_memory(self.config, self.parallel_dims):
            logger.info(line)
        super().train()
        if self.planned.plan is None and self.step >= self.config.training.steps:
            logger.warning(
                f"Nothing was left to do: the checkpoint in {self.config.dump_folder} is of step "
                f"{self.step}, and training.steps is {self.config.training.steps}. Raise it to go on, or "
                "name another dump_folder to start anew."
            )


def dataloader_config(config: Trainer.Config) -> PlannedDataLoader.Config:
    """The dataloader's settings, all of which follow from other sections of the configuration."""
    parallelism, wlb = config.parallelism, config.wlb
    assert config.model_spec is not None
    return PlannedDataLoader.Config(
        corpus=wlb.corpus.path,
        seed=wlb.corpus.seed,
        job_micro_batches=config.training.global_batch_size,
        rank_micro_batches=config.training.local_batch_size,
        shape=model_shape(config.model_spec.model),
        dtype=config.training.mixed_precision_param,
        tensor_parallel=parallelism.tensor_parallel_degree,
        context_parallel=parallelism.context_parallel_degree,
        pipeline=pipeline_runs(config),
        divisor=length_divisor(config),
        packing=wlb.packing,
        sharding=wlb.sharding,
    )


def pipeline_runs(config: Trainer.Config) -> PipelineRuns | None:
    """How a data-parallel rank's micro-batches go through its pipeline; None without one."""
    if config.parallelism.pipeline_parallel_degree < 2:
        return None
    assert config.model_spec is not None
    return PipelineRuns(
        shape=pipeline_shape(config.parallelism, config.model_spec.model),
        micro_batches=config.training.local_batch_size,
        order=config.wlb.pipeline.order,
    )
