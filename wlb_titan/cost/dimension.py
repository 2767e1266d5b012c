"""Dimensions of parallelism: what the ranks along a mesh axis divide, where they lie, and what that costs.

Those of torchtitan are here, with their degrees in [parallelism]. Another one is a class of anybody's, chosen
by `[[wlb.dimensions]]`: what this class says of it is all that planner, memory, simulator, checks and trainer
ask (docs/extending.md).

What stays a matter of its own beside this: a pipeline's order of passes (`pipeline/`), who holds which tokens
in context parallelism (`context/`), and the bytes and seconds of a layer that tensor, context and expert
parallelism divide, which are formulas of `cost/`, `memory/` and `simulator/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Interval

from wlb_titan.errors import PlanError
from wlb_titan.plugins import Family, Plugin, PluginConfig

DIMENSIONS = Family(
    kind="dimension of parallelism",
    key="name",
    group="wlb_titan.dimension",
    base="wlb_titan.cost.dimension:Dimension",
    shipped={
        name: f"wlb_titan.cost.dimension:{name.capitalize()}"
        for name in ("pipeline", "replicate", "shard", "context", "tensor", "expert")
    },
)

Divides = Literal["data", "tokens", "heads", "layers", "experts", "nothing"]


class Meeting(NamedTuple):
    """What the ranks of a dimension all-reduce when they meet, outside the passes.

    Attributes:
        bytes_: bytes of one rank.
        collectives: number of collectives that these go in.
    """

    bytes_: float
    collectives: int


class Dimension(Plugin):
    """A dimension of parallelism.

    Attributes:
        axis: name of its mesh axis.
        divides: what its ranks share. The planner gives ranks that divide `data` micro-batches of their own;
            ranks of any other dimension of one's own get the same ones.
        outside: axis that it lies directly outside of in the order of ranks. What divides data lies outside
            `dp_replicate`; nothing lies outside the pipeline, which torchtitan takes to be outermost.
        key: key of its degree in [parallelism]; empty for those of [[wlb.dimensions]].
        borrows: its ranks are those of other dimensions.
        runtime: "module:Class" of its half that moves tensors, which derives from
            `wlb_titan.runtime.dimension:Axis`; empty if it has none.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[[wlb.dimensions]]: a dimension of parallelism that torchtitan does not have."""

        family = DIMENSIONS

        degree: Annotated[int, Interval(ge=1, le=1 << 20)] = 1
        """Ranks along it; the processes of the job are a multiple."""

    axis: ClassVar[str] = ""
    divides: ClassVar[Divides] = "nothing"
    outside: ClassVar[str] = "dp_replicate"
    key: ClassVar[str] = ""
    borrows: ClassVar[bool] = False
    runtime: ClassVar[str] = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def degree(self) -> int:
        """Ranks along the axis."""
        degree: int = self.config.degree
        return degree

    @property
    def every(self) -> int:
        """Steps from one meeting of its ranks to the next; in between they do not wait for each other."""
        return 1

    def check(self, job: Any) -> None:
        """Refuses a `wlb_titan.job.Job` that it cannot divide.

        Raises:
            PlanError: with the setting to blame.
        """

    def memory(self, job: Any, peak: Any) -> Any:
        """The peak of a pipeline rank with what the dimension changes in it.

        Args:
            job: a `wlb_titan.memory.peak.MemoryJob`: model, degrees, data types.
            peak: a `wlb_titan.memory.peak.RankMemory`, in bytes. What the dimension holds beside all passes
                is the term `dimensions`.
        """
        return peak

    def passes(self, job: Any, times: Any) -> Any:
        """The times of passes, a `wlb_titan.pipeline.graph.PassTimes`, with what it changes in them."""
        return times

    def meeting(self, job: Any, weights: float) -> Meeting | None:
        """What its ranks all-reduce every `every` steps; None for nothing.

        Args:
            job: the `wlb_titan.job.Job`.
            weights: number of weights on a rank.
        """
        return None


class Pipeline(Dimension):
    """Ranks that split the layers (PP)."""

    axis, divides, key = "pp", "layers", "pipeline_parallel_degree"

    def check(self, job: Any) -> None:
        try:
            _ = job.layers
        except PlanError as error:
            raise PlanError(str(error), setting=f"parallelism.{self.key}") from error


class _Data(Dimension):
    """Ranks that run different micro-batches."""

    divides = "data"

    def check(self, job: Any) -> None:
        ranks = job.replicas
        if job.micro_batches < 1 or job.micro_batches % ranks:
            raise PlanError(
                f"{job.micro_batches} micro-batches cannot be shared equally by {ranks} data-parallel ranks; "
                "the number must be a positive multiple of the data-parallel degree.",
                setting="training.global_batch_size",
            )


class Replicate(_Data):
    """Replicas of the sharded weights (HSDP)."""

    axis, key = "dp_replicate", "data_parallel_replicate_degree"


class Shard(_Data):
    """Data-parallel ranks that shard weights, gradients and optimizer state (FSDP)."""

    axis, key = "dp_shard", "data_parallel_shard_degree"


class Context(Dimension):
    """Ranks that split each micro-batch's tokens (CP); weights are sharded over them too."""

    axis, divides, key = "cp", "tokens", "context_parallel_degree"

    def check(self, job: Any) -> None:
        _ = job.strategy  # which checks itself


class Tensor(Dimension):
    """Ranks that split each layer, with sequence parallelism (TP)."""

    axis, divides, key = "tp", "heads", "tensor_parallel_degree"

    def check(self, job: Any) -> None:
        for name, heads in (("heads", job.model.heads), ("kv_heads", job.model.kv_heads)):
            if heads % self.degree:
                raise PlanError(
                    f"The model's {heads} {name} cannot be divided by the tensor parallel degree "
                    f"{self.degree}.",
                    setting=f"parallelism.{self.key}",
                )


class Expert(Dimension):
    """Ranks that share a layer's experts (EP), taken from those of TP, CP and `dp_shard`."""

    axis, divides, key, borrows = "ep", "experts", "expert_parallel_degree", True

    def check(self, job: Any) -> None:
        if self.degree > max(job.model.experts, 1):
            raise PlanError(
                f"The expert parallel degree is {self.degree}, and a layer has {job.model.experts} experts; "
                "it can be at most as many."
            )
        if not 1 <= job.routing_imbalance <= max(self.degree, 1):
            raise PlanError(
                f"The routing imbalance is {job.routing_imbalance}; it is the busiest rank's tokens over "
                f"the mean's, from 1 to the expert parallel degree of {self.degree}."
            )


TORCHTITAN = {
    "pipeline": Pipeline,
    "replicate": Replicate,
    "shard": Shard,
    "context": Context,
    "tensor": Tensor,
    "expert": Expert,
}
"""The dimensions of [parallelism], by the field of `Degrees`, in the order of ranks: the outermost first."""
