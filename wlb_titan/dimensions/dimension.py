"""Dimensions of parallelism (paper section 2.1: TP, CP, PP and DP).

A dimension says what the ranks along a mesh axis divide, where they lie, and what that costs. Those of
torchtitan are here, with their degrees in [parallelism]. Others are classes that `[[wlb.dimensions]]` names;
planner, memory, simulator, checks and trainer ask nothing but this class of them (docs/extending.md).

Kept elsewhere: a pipeline's order of passes (`pipeline/`), who holds which tokens in context parallelism
(`context/`), and the formulas for a layer's bytes and seconds (`cost/`, `memory/` and `simulator/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Interval

from wlb_titan.errors import PlanError
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plugins import Family, Plugin, PluginConfig

DIMENSIONS = Family(
    kind="dimension of parallelism",
    key="name",
    group="wlb_titan.dimension",
    base="wlb_titan.dimensions.dimension:Dimension",
    shipped={
        name: f"wlb_titan.dimensions.dimension:{name.capitalize()}"
        for name in ("pipeline", "replicate", "shard", "context", "tensor", "expert")
    },
)

Divides = Literal["data", "tokens", "heads", "layers", "experts", "nothing"]


class Meeting(NamedTuple):
    """What a dimension's ranks all-reduce outside the passes."""

    bytes_: float  # of one rank
    collectives: int  # among which they are divided


class Dimension(Plugin):
    """A dimension of parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[[wlb.dimensions]]: a dimension of parallelism that torchtitan does not have."""

        family = DIMENSIONS

        degree: Annotated[int, Interval(ge=1, le=1 << 20)] = 1
        """Ranks along this dimension; the number of the job's processes is a multiple."""

    axis: ClassVar[str] = ""  # name of its mesh axis
    divides: ClassVar[Divides] = "nothing"
    """Of a user's dimensions only those that divide `data` give each rank micro-batches of its own."""

    outside: ClassVar[str] = "dp_replicate"
    """Axis directly inside it in the order of ranks. What divides data lies outside `dp_replicate`; nothing
    lies outside the pipeline, which torchtitan takes to be outermost."""

    key: ClassVar[str] = ""  # of its degree in [parallelism]; empty for those of [[wlb.dimensions]]
    borrows: ClassVar[bool] = False  # its ranks are those of other dimensions
    runtime: ClassVar[str] = ""
    """Its half that moves tensors: "module:Class", a `wlb_titan.runtime.meshes:Axis`; empty: none."""

    every: ClassVar[int] = 1  # steps from one meeting of its ranks to the next; none waits in between

    def __init__(self, config: Any) -> None:
        self.config = config
        self.degree: int = config.degree

    # Layouts and rates hold dimensions, so their types are known above this file only.

    def check(self, layout: Any) -> None:
        """Raises PlanError, with the setting to blame, for a `wlb_titan.layers.layout.Layout` that it cannot
        divide."""

    def memory(self, rates: Any, peak: Any) -> Any:
        """The peak of a pipeline rank, a `wlb_titan.memory.rank.RankMemory` in bytes, as the dimension
        changes it for a job with these `wlb_titan.layers.rates.Rates`. The term `dimensions` is for what it
        holds beside all passes."""
        return peak

    def passes(self, rates: Any, times: PassTimes) -> PassTimes:
        """The times of passes, as the dimension changes them."""
        return times

    def meeting(self, rates: Any, weights: float) -> Meeting | None:
        """What ranks of this number of weights all-reduce every `every` steps; None: nothing."""
        return None


class Pipeline(Dimension):
    """Ranks that split the layers (PP)."""

    axis, divides, key = "pp", "layers", "pipeline_parallel_degree"

    def check(self, layout: Any) -> None:
        if layout.per_run and self.degree > 1 and layout.replica_micro_batches % layout.per_run:
            raise PlanError(
                f"A replica's {layout.replica_micro_batches} micro-batches of a step cannot be divided into "
                f"runs of {layout.per_run} through the pipeline.",
                setting="training.local_batch_size",
            )


class Replicate(Dimension):
    """Replicas of the sharded weights (HSDP)."""

    axis, divides, key = "dp_replicate", "data", "data_parallel_replicate_degree"


class Shard(Dimension):
    """Data-parallel ranks that shard weights, gradients and optimizer state (FSDP)."""

    axis, divides, key = "dp_shard", "data", "data_parallel_shard_degree"

    def check(self, layout: Any) -> None:
        if layout.micro_batches < 1 or layout.micro_batches % layout.replicas:
            raise PlanError(
                f"{layout.micro_batches} micro-batches cannot be shared equally by {layout.replicas} "
                "data-parallel ranks; the number must be a positive multiple of the data-parallel degree.",
                setting="training.global_batch_size",
            )


class Context(Dimension):
    """Ranks that split each micro-batch's tokens (CP)."""

    axis, divides, key = "cp", "tokens", "context_parallel_degree"


class Tensor(Dimension):
    """Ranks that split each layer, with sequence parallelism (TP)."""

    axis, divides, key = "tp", "heads", "tensor_parallel_degree"

    def check(self, layout: Any) -> None:
        for name, heads in (("heads", layout.model.heads), ("kv_heads", layout.model.kv_heads)):
            if heads % self.degree:
                raise PlanError(
                    f"The model's {heads} {name} cannot be divided by the tensor parallel degree "
                    f"{self.degree}.",
                    setting=f"parallelism.{self.key}",
                )


class Expert(Dimension):
    """Ranks that share a layer's experts (EP), taken from those of TP, CP and `dp_shard`."""

    axis, divides, key, borrows = "ep", "experts", "expert_parallel_degree", True

    def check(self, layout: Any) -> None:
        if self.degree > max(layout.model.experts, 1):
            raise PlanError(
                f"The expert parallel degree is {self.degree}, but a layer has only {layout.model.experts} "
                "experts; lower it to that number or below.",
                setting=f"parallelism.{self.key}",
            )


TORCHTITAN = {
    dimension.__name__.lower(): dimension
    for dimension in (Pipeline, Replicate, Shard, Context, Tensor, Expert)
}
"""The dimensions of [parallelism], by the field of `Degrees`, in the order of ranks: the outermost first."""

TAKEN = {"batch", "loss", "dp", "efsdp", "fsdp", "world", *(cls.axis for cls in TORCHTITAN.values())}
"""Names of torchtitan's meshes."""
