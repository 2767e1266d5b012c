"""Pipeline parallelism for micro-batches of different lengths: the `pipelining_fn` of our models.

pipeline(...) -> PlannedSchedule -> a torch schedule for the step's number of micro-batches
                                 -> PlannedStage, told the lengths of the step's micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import LossFunction
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ParallelizeFunction

from wlb_titan.plan import Flow
from wlb_titan.runtime.compat import (
    ComputationType,
    PipelineSchedule,
    PipelineScheduleRuntime,
    ScheduleAction,
    build_pipeline_schedule,
    modules_of_stages,
    pipeline_metadata,
    split_into_stages,
)
from wlb_titan.runtime.pipeline.stage import Layout, PlannedStage
from wlb_titan.runtime.step_trace import PassTimer

KINDS = {"F": ComputationType.FORWARD, "B": ComputationType.FULL_BACKWARD}

Moved = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""A micro-batch from `Item.to`: this context-parallel rank's tokens, their labels, and the model's keyword
arguments, among them "positions", (1, tokens)."""

Pipeline = tuple["PlannedSchedule", list[nn.Module], bool, bool]
"""The schedule, this rank's parts of the model, and whether they hold the first and the last stage."""


class PackFlowSchedule(PipelineScheduleRuntime):
    """torch's schedule of explicit actions, made from an order of passes.

    torch adds sends and receives where they cannot wait for each other, and FSDP's collectives: gathers at
    the start, from a rank's first stage to its last, and reductions at the end, in reverse. These are alike
    on all data-parallel ranks, however their passes are ordered.

    Another thread may make a schedule while a step runs. The stages are then told again which ranks they are
    on, but nothing changes: schedules that PackFlow replaces put stages on ranks in one loop.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        flow: Flow,
        loss_fn: Callable[..., tuple[torch.Tensor, dict[str, Any]]],
    ) -> None:
        self.packs = 1 + max(action.place for action in flow[0])  # of forward, and as many of backward passes
        super().__init__(
            list(stages),
            n_microbatches=self.packs,
            loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],  # the loss alone
            scale_grads=False,
            max_active_stages=len(stages),
        )
        self.pipeline_order = {
            rank: [ScheduleAction(stage, KINDS[kind], place) for kind, stage, place in actions]
            for rank, actions in enumerate(flow)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Once for all schedules of these stages: torch connects their ranks and waits for them."""
        if self._stages[0]._inference_mode is None:
            super()._initialize_stages(*args, **kwargs)


@dataclass(eq=False)
class PlannedSchedule:
    """Runs the micro-batches of a step, whatever their lengths, for the trainer and the validator.

    torch's schedules have a fixed number of micro-batches, so one is kept for each number seen. They are not
    asked for outputs: those of different lengths could not be joined.

    `lower` makes the schedule of an order of passes. It takes a second for 256 MicroPacks on 16 ranks, so
    another thread may call it ahead of the step.
    """

    stages: Sequence[PlannedStage]
    schedule_of: Callable[..., PipelineSchedule]
    lower: Callable[[Flow], PackFlowSchedule]
    timer: PassTimer
    context_parallel: int
    schedules: dict[int, PipelineSchedule] = field(default_factory=dict)  # by number of micro-batches

    def __post_init__(self) -> None:
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)

    def step(
        self,
        micro_batches: Sequence[Moved],
        labels: torch.Tensor | None,
        lowered: PackFlowSchedule | None = None,
    ) -> torch.Tensor:
        """Runs forward and backward passes; returns the sum of the losses, 0 on ranks without the last stage.
        An error gets a note on how far this rank got.

        Args:
            micro_batches: those of forward passes, then those of backward passes if they have others.
            labels: their number in the whole step, by which the sum of the losses is divided; None: not
                divided, and only forward passes run.
            lowered: made by `lower`; None leaves the order of passes to torch.
        """
        lengths = [extra["positions"].shape[1] * self.context_parallel for _, _, extra in micro_batches]
        number = len(lengths) if lowered is None else lowered.packs
        if lowered is None and number not in self.schedules:
            self.schedules[number] = self.schedule_of(local_batch_size=number)
        for stage in self.stages:
            stage.set_micro_batch_lengths(lengths[:number], lengths[-number:])
        schedule = lowered or self.schedules[number]
        train = partial(schedule.step, loss_kwargs={"global_valid_tokens": labels})
        run = schedule.eval if labels is None else train
        losses: list[torch.Tensor] = []
        try:
            run(
                arg_mbs=[(inputs,) for inputs, _, _ in micro_batches] if self.has_first else None,
                kwarg_mbs=[extra for _, _, extra in micro_batches],
                target_mbs=[targets for _, targets, _ in micro_batches] if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
            )
            device = self.stages[0].device
            return torch.stack(losses).sum().to(device) if losses else torch.zeros((), device=device)
        except Exception as error:
            error.add_note(
                f"Global rank {dist.get_rank()} stopped in a step of {number} micro-batches; the last "
                f"pass that it began was {self.timer.latest}. If it waited for another rank, the cause is in "
                "that rank's log."
            )
            raise


def stage_names(parallelism: ParallelismConfig, model: Decoder.Config) -> list[list[str]]:
    """The modules of each stage, as torchtitan divides a model; ValueError where it cannot."""
    if parallelism.module_fqns_per_model_part:
        return parallelism.module_fqns_per_model_part
    degree = parallelism.pipeline_parallel_degree
    alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=degree, ep=1, world_size=degree)
    stages, layers, first, last = pipeline_metadata(alone, parallelism, model)
    return modules_of_stages(stages, layers, first, last)


def keys_of_stages(layers: int, stages: int) -> dict[str, object]:
    """The keys of [parallelism] with which torchtitan divides a model's layers over a number of stages.

    Embedding and head count as a layer each. If no number of layers per stage fits, modules are named.
    """
    sizes = [size for size in range(1, layers + 1) if math.ceil((layers + 2) / size) == stages]
    return {
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": sizes[0] if sizes else None,
        "module_fqns_per_model_part": None if sizes else modules_of_stages(stages, layers, 1, 1),
    }


def pipeline(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    ac_config: ActivationCheckpointingConfig,
    device: torch.device,
    model_config: Decoder.Config,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
    stage_class: Callable[..., PlannedStage] = PlannedStage,
    flow_class: type[PackFlowSchedule] = PackFlowSchedule,
    **others: Any,
) -> Pipeline:
    """torchtitan's `pipeline_llm`, with stages that take their shapes from the plan; `others` are arguments
    of `parallelize_fn` alone."""
    names = stage_names(parallelism, model_config)
    schedule = parallelism.pipeline_parallel_schedule
    drafts, parts = split_into_stages(model, parallel_dims.get_mesh("pp"), schedule, device, names)
    given = {"parallel_dims": parallel_dims, "training": training, "parallelism": parallelism}
    parts = [parallelize_fn(part, **given, ac_config=ac_config, **others) for part in parts]
    timer, cp = PassTimer(device), parallel_dims.cp
    ranks = cp * parallel_dims.tp if parallelism.enable_sequence_parallel else cp
    hidden = Layout(ranks, (model_config.dim,), TORCH_DTYPE_MAP[training.mixed_precision_param])
    planned = [
        stage_class(
            part,
            draft.stage_index,
            draft.num_stages,
            device,
            group=draft.group,
            tokens=Layout(cp, (), torch.int64),
            hidden=hidden,
            timer=timer,
            # With recomputation torch would recompute and keep a whole layer for its inputs' gradient and
            # again for each of its weights, and with selective checkpointing it cannot.
            splits_backward=ac_config is None,
        )
        for draft, part in zip(drafts, parts, strict=True)
    ]

    last = planned[-1] if planned[-1].is_last else planned[0]

    def timed_loss(*args: Any, **kwargs: Any) -> Any:
        with timer.time("L", last.stage_index, last.micro_batch):
            return loss_fn(*args, **kwargs)

    schedule_of = partial(
        build_pipeline_schedule, parallelism=parallelism, stages=planned, loss_fn=timed_loss
    )
    lower = partial(flow_class, planned, loss_fn=timed_loss)
    runs = PlannedSchedule(planned, schedule_of, lower, timer, cp)
    return runs, parts, runs.has_first, runs.has_last
