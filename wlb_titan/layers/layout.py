"""Where a job's layers and micro-batches lie: how many there are, and which ranks divide them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from wlb_titan.cost.models import PAPER_MODELS, ModelShape
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.pipeline.schedule import PipelineShape, layers_of_stages


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Model, parallelism and micro-batches of a training run."""

    window: int  # context window in tokens
    micro_batches: int
    """N, of the whole job in a step: pipeline micro-batches x gradient accumulation x data-parallel
    degree."""

    model: ModelShape = PAPER_MODELS["7B"]
    degrees: Degrees = field(default_factory=Degrees)
    memory: MemorySettings = field(default_factory=MemorySettings)
    multiple: int = 1
    """A context-parallel rank's tokens are a multiple of it: for sequence parallelism, the chunked loss and
    float8."""

    schedule: str = "1F1B"  # one of `pipeline.schedule.SCHEDULES` where predictions are wanted
    chunks: int = 1  # stages of each pipeline rank
    per_run: int | None = None
    """Micro-batches of one run through the pipeline; with more in a step there are several runs, as in
    gradient accumulation. None: all in one run."""

    stage_layers: tuple[int, ...] = ()  # layers of each stage; empty divides them as torchtitan does
    planned: int | None = None
    """Data-parallel ranks that are planned where some stand for all, and to which `micro_batches` then
    refers; None: all."""

    def __post_init__(self) -> None:
        try:
            _ = self.layers
        except PlanError as error:
            raise PlanError(str(error), setting="parallelism.pipeline_parallel_degree") from error
        for dimension in self.degrees.dimensions:
            dimension.check(self)

    @property
    def replicas(self) -> int:
        """How many data-parallel ranks are planned."""
        return self.planned or self.degrees.data

    @property
    def replica_micro_batches(self) -> int:
        return self.micro_batches // self.replicas

    @cached_property
    def shape(self) -> PipelineShape:
        splits = self.memory.recompute.splits_backward
        return PipelineShape(self.schedule, self.degrees.pipeline, self.chunks, splits)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.stage_layers or layers_of_stages(self.model.layers, self.shape.stages)
