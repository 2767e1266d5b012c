"""The job that is simulated: model, degrees, pipeline, cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from wlb_titan.cost.analytic import Device, TokenSeconds
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.attention_profile import AttentionShape, attention_latency
from wlb_titan.cost.cluster import Cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError
from wlb_titan.memory.peak import (
    MemorySettings,
    RankMemory,
    layers_of_stages,
    longest_that_fits,
    pipeline_memory,
)
from wlb_titan.pipeline.schedule import PipelineShape


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    """What decides about the time of a step besides its plan.

    Attributes:
        model: its shape.
        degrees: of parallelism.
        cluster: the hardware.
        latency: predicts the attention of one layer on one tensor-parallel rank.
        schedule: of the pipeline, one of `pipeline_schedule.SCHEDULES`.
        chunks: stages of each pipeline rank.
        run: micro-batches of one run through the pipeline; a replica with more in a step makes several runs,
            as gradient accumulation does. None: all in one run.
        memory: data types and activation checkpointing, which also costs time.
        overlap: whether weights are gathered and gradients reduced while ranks compute.
        gather_groups: groups of heads in which keys and values are gathered.
        stage_layers: layers of each stage; empty divides them as torchtitan does.
    """

    model: ModelShape
    degrees: Degrees
    cluster: Cluster
    latency: AttentionLatency
    schedule: str = "1F1B"
    chunks: int = 1
    run: int | None = None
    memory: MemorySettings = field(default_factory=MemorySettings)
    overlap: bool = True
    gather_groups: int = 1
    stage_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, heads in (("heads", self.model.heads), ("kv_heads", self.model.kv_heads)):
            if heads % self.degrees.tensor:
                raise PlanError(
                    f"The model's {heads} {name} cannot be divided by the tensor parallel degree "
                    f"{self.degrees.tensor}."
                )

    @property
    def shape(self) -> PipelineShape:
        return PipelineShape(self.schedule, self.degrees.pipeline, self.chunks)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.stage_layers or layers_of_stages(self.model.layers, self.shape.stages)

    @property
    def device(self) -> Device:
        """One of its ranks."""
        return Device.of(
            self.cluster, tensor_parallel=self.degrees.tensor, context_parallel=self.degrees.context
        )

    @property
    def token(self) -> TokenSeconds:
        """What one token of a micro-batch costs a rank."""
        return TokenSeconds.of(self.model, self.device, self.degrees.tensor, self.degrees.context)

    def peak_memory(self, lengths: Sequence[int]) -> tuple[RankMemory, ...]:
        """Of each pipeline rank, for a replica's micro-batches of these lengths in the order of running."""
        return pipeline_memory(
            self.model,
            self.degrees,
            lengths,
            schedule=self.schedule,
            chunks=self.chunks,
            run=self.run,
            settings=self.memory,
            layers=self.layers,
        )

    def longest_micro_batch(self, window: int, micro_batches: int, divisor: int) -> int | None:
        """Tokens of the longest micro-batches that fit, `micro_batches` of them on a replica; see
        `longest_that_fits`."""

        def memory(length: int) -> tuple[RankMemory, ...]:
            return self.peak_memory([length] * micro_batches)

        return longest_that_fits(memory, window, divisor, self.cluster.memory)

    def on(self, cluster: Cluster) -> SimulatedJob:
        """The same job on another cluster with the same GPUs."""
        return replace(self, cluster=cluster)


def cluster_latency(
    cluster: Cluster, model: ModelShape, tensor_parallel: int, dtype: str = "bfloat16"
) -> AttentionLatency:
    """The attention of one layer on one tensor-parallel rank of a cluster.

    Raises:
        PlanError: the cluster's profile cannot be read or lacks this attention.
    """
    attention = AttentionShape.of(model, tensor_parallel, dtype)
    try:
        return attention_latency(cluster.attention_profile, attention)
    except PlanError as error:
        raise PlanError(
            f"{error} Then name that file as [gpu] attention_profile in a copy of the cluster's TOML file; "
            f"the simulated cluster is {cluster.name}."
        ) from error
