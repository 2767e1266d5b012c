"""A pipeline schedule whose passes run in the order of a plan (`wlb_titan.pipeline.packflow`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wlb_titan.plan import Flow
from wlb_titan.runtime.compat import ComputationType, PipelineScheduleRuntime, ScheduleAction
from wlb_titan.runtime.pipeline.stage import PlannedStage

KINDS = {"F": ComputationType.FORWARD, "B": ComputationType.FULL_BACKWARD}


class PackFlowSchedule(PipelineScheduleRuntime):
    """torch's schedule of explicit actions, made from an order of passes.

    torch adds sends and receives where they cannot wait for each other, and FSDP's collectives: the gathers
    of a rank's stages at the begin, in the order of the stages, and the reductions at the end, from the last
    stage to the first. These are alike on all data-parallel ranks, however their passes are ordered.

    A new schedule tells the stages which ranks have which stage. So another thread may make it while a step
    runs only because FLOW_SCHEDULES, and no other schedule, put stages on ranks as it does: in a loop.

    Args:
        loss_fn: computes loss and metrics from the last stage's output and the labels.

    Attributes:
        packs: micro-batches, of forward and as many of backward passes.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        flow: Flow,
        loss_fn: Callable[..., tuple[torch.Tensor, dict[str, Any]]],
    ) -> None:
        def loss_alone(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss, _ = loss_fn(*args, **kwargs)
            return loss

        self.packs = 1 + max(action.place for action in flow[0])
        super().__init__(
            list(stages),
            n_microbatches=self.packs,
            loss_fn=loss_alone,
            scale_grads=False,
            max_active_stages=len(stages),
        )
        order = {
            rank: [ScheduleAction(stage, KINDS[kind], place) for kind, stage, place in actions]
            for rank, actions in enumerate(flow)
        }
        self.pipeline_order = order
        self._prepare_schedule_with_comms(order)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Once for all schedules of these stages: torch asks and connects their ranks, and waits for them."""
        if self._stages[0]._inference_mode is None:
            super()._initialize_stages(*args, **kwargs)
