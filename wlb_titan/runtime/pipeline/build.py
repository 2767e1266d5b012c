"""Pipeline parallelism for micro-batches of different lengths: the `pipelining_fn` of our models.

    pipeline(...) -> PlannedSchedule -> a torch schedule for the step's number of micro-batches
                                     -> PlannedStage, told the lengths of the step's micro-batches

Every rank of a pipeline plans the same step, so the lengths are known everywhere; each rank reads them from
the positions that its stages are given anyway. Apart from a few words when a schedule first runs, nothing but
hidden states and their gradients is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import LossFunction
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ParallelizeFunction
from torchtitan.tools.logging import logger

from wlb_titan.plan import Flow
from wlb_titan.runtime.compat import PipelineSchedule, build_pipeline_schedule, split_into_stages
from wlb_titan.runtime.pipeline.packflow import PackFlowSchedule
from wlb_titan.runtime.pipeline.pass_timer import PassTimer
from wlb_titan.runtime.pipeline.schedules import (
    SPLITS_BACKWARD,
    canonical_name,
    check_micro_batches,
    check_schedule,
    splits_backward,
    stage_names,
)
from wlb_titan.runtime.pipeline.stage import Layout, PlannedStage


def pipeline(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
    device: torch.device,
    model_config: Decoder.Config,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
    stage_class: Callable[..., PlannedStage] = PlannedStage,
    flow_class: type[PackFlowSchedule] = PackFlowSchedule,
) -> Pipeline:
    """torchtitan's `pipeline_llm`, with stages that take their shapes from the plan.

    Args besides torchtitan's:
        stage_class, flow_class: make a stage, and the schedule of an order of passes.

    Raises:
        ValueError: the schedule cannot run, with the reason; or the model does not fit its stages.
    """
    check_schedule(parallelism, compile_config)
    names = stage_names(parallelism, model_config)
    drafts, parts = split_into_stages(
        model,
        parallel_dims.get_mesh("pp"),
        parallelism.pipeline_parallel_schedule,
        device,
        names,
    )
    parts = [
        parallelize_fn(
            part,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=ac_config,
            dump_folder=dump_folder,
        )
        for part in parts
    ]
    name, splits = canonical_name(parallelism.pipeline_parallel_schedule), splits_backward(ac_config)
    if name in SPLITS_BACKWARD and not splits:
        logger.info(f"{name} runs whole backward passes, because activation checkpointing recomputes in them")
    timer = PassTimer(device)
    tokens, hidden = stage_layouts(model_config, parallel_dims, training, parallelism)
    planned = [
        stage_class(
            part,
            draft.stage_index,
            draft.num_stages,
            device,
            group=draft.group,
            tokens=tokens,
            hidden=hidden,
            timer=timer,
            splits_backward=splits,
        )
        for draft, part in zip(drafts, parts, strict=True)
    ]

    last = planned[-1] if planned[-1].is_last else planned[0]
    timed_loss = timer.timed(loss_fn, lambda: ("L", last.stage_index, last.micro_batch))

    def schedule_of(micro_batches: int) -> PipelineSchedule:
        check_micro_batches(
            parallelism.pipeline_parallel_schedule, parallel_dims.pp, len(names), micro_batches
        )
        return build_pipeline_schedule(
            parallelism=parallelism, local_batch_size=micro_batches, stages=planned, loss_fn=timed_loss
        )

    def lower(flow: Flow) -> PackFlowSchedule:
        return flow_class(planned, flow, timed_loss)

    schedule = PlannedSchedule(planned, schedule_of, lower, timer, parallel_dims.cp)
    return schedule, parts, any(s.is_first for s in planned), any(s.is_last for s in planned)


def stage_layouts(
    model_config: Decoder.Config,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> tuple[Layout, Layout]:
    """What a rank holds of tokens (1, L) and of hidden states (1, L, D) between two stages.

    Context parallelism shards the tokens of both, sequence parallelism those of the hidden states, which are
    of the data type in which FSDP computes.
    """
    cp, sequence_parallel = parallel_dims.cp, parallelism.enable_sequence_parallel
    hidden_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    return (
        Layout(cp, (), torch.int64),
        Layout(cp * parallel_dims.tp if sequence_parallel else cp, (model_config.dim,), hidden_dtype),
    )


class PlannedSchedule:
    """What the trainer and the validator call: runs the micro-batches of a step, whatever their lengths.

    torch's schedules are made for a fixed number of micro-batches; one is kept for each number seen. They are
    never asked for outputs: those of different lengths could not be joined.

    Args:
        schedule_of: makes the schedule for a number of micro-batches, or raises ValueError.
        lower: makes the schedule of an order of passes.
        timer: that the stages measure their passes by.
        context_parallel: ranks that share the tokens of a micro-batch.

    Attributes:
        lower: the same. Another thread may call it ahead of the step: for 256 MicroPacks on 16 ranks it takes
            a second.
        timer: the same.
        lowered: the schedule of the next step's MicroPacks, of `lower`; None leaves the order to torch's own.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        schedule_of: Callable[[int], PipelineSchedule],
        lower: Callable[[Flow], PackFlowSchedule],
        timer: PassTimer,
        context_parallel: int,
    ) -> None:
        self.lower, self.timer = lower, timer
        self._context_parallel = context_parallel
        self._stages = stages
        self._schedule_of = schedule_of
        self._schedules: dict[int, PipelineSchedule] = {}
        self.lowered: PackFlowSchedule | None = None

    def step(self, *, kwarg_mbs: list[dict[str, Any]], **arguments: Any) -> None:
        """Runs forward and backward of all micro-batches; gradients are added to the parameters'.

        Args:
            kwarg_mbs: the model's keyword arguments for each micro-batch, among them "positions",
                (1, tokens of this context-parallel rank). Under an order whose backward passes have others
                these come behind those of forward passes, here and in what follows.
            arguments: arguments of torch's schedules: arg_mbs, target_mbs, losses, loss_kwargs.

        Raises:
            ValueError: the schedule cannot run this number of micro-batches, or a length does not suit the
                ranks.
            RuntimeError: a stage or the communication failed.
        """
        with self._prepared(kwarg_mbs, self.lowered) as (schedule, number):
            schedule.step(kwarg_mbs=kwarg_mbs, **{**arguments, "return_outputs": False})
        self.timer.first += number

    def eval(self, *, kwarg_mbs: list[dict[str, Any]], **arguments: Any) -> None:
        """Runs forward only; the losses go into `losses`, the outputs are not kept. Otherwise as `step`."""
        with self._prepared(kwarg_mbs, None) as (schedule, _):
            schedule.eval(kwarg_mbs=kwarg_mbs, **{**arguments, "return_outputs": False})

    @contextmanager
    def _prepared(
        self, kwarg_mbs: list[dict[str, Any]], lowered: PackFlowSchedule | None
    ) -> Iterator[tuple[PipelineSchedule, int]]:
        """The schedule for these micro-batches, and how many it runs; an error gets a note that says how far
        this rank came."""
        lengths = [kwargs["positions"].shape[1] * self._context_parallel for kwargs in kwarg_mbs]
        number = len(lengths) if lowered is None else lowered.packs
        if lowered is None and number not in self._schedules:
            self._schedules[number] = self._schedule_of(number)
        schedule = lowered or self._schedules[number]
        for stage in self._stages:
            stage.set_micro_batch_lengths(lengths[:number], lengths[-number:])
        try:
            yield schedule, number
        except Exception as error:
            error.add_note(
                f"Global rank {dist.get_rank()} stopped in a step of {number} micro-batches; the last "
                f"pass that it began was {self.timer.latest}. If it waited for another rank, the cause is in "
                "that rank's log."
            )
            raise


Pipeline = tuple[PlannedSchedule, list[nn.Module], bool, bool]
"""The schedule, this rank's parts of the model, and whether they hold the first and the last stage."""
