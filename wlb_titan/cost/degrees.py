"""Dimensions of parallelism and a job's degrees along them (paper section 2.1: TP, CP, PP and DP).

A dimension says what the ranks along a mesh axis divide, where they lie, and what that costs. Those of
torchtitan are here, with their degrees in [parallelism]. Another one is a class of anybody's, chosen by
`[[wlb.dimensions]]`: what this class says of it is all that planner, memory, simulator, checks and trainer
ask (docs/extending.md).

What stays a matter of its own beside this: a pipeline's order of passes (`pipeline/`), who holds which tokens
in context parallelism (`context/`), and the bytes and seconds of a layer that tensor, context and expert
parallelism divide, which are formulas of `cost/`, `memory/` and `simulator/`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Ints
from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.errors import PlanError
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plugins import Family, Plugin, PluginConfig

if TYPE_CHECKING:
    from wlb_titan.job import Job

DIMENSIONS = Family(
    kind="dimension of parallelism",
    key="name",
    group="wlb_titan.dimension",
    base="wlb_titan.cost.degrees:Dimension",
    shipped={
        name: f"wlb_titan.cost.degrees:{name.capitalize()}"
        for name in ("pipeline", "replicate", "shard", "context", "tensor", "expert")
    },
)

Divides = Literal["data", "tokens", "heads", "layers", "experts", "nothing"]


class Meeting(NamedTuple):
    """What the ranks of a dimension all-reduce when they meet, outside the passes."""

    bytes_: float  # of one rank
    collectives: int  # that they go in


class Dimension(Plugin):
    """A dimension of parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(PluginConfig):
        """[[wlb.dimensions]]: a dimension of parallelism that torchtitan does not have."""

        family = DIMENSIONS

        degree: Annotated[int, Interval(ge=1, le=1 << 20)] = 1
        """Ranks along it; the processes of the job are a multiple."""

    axis: ClassVar[str] = ""  # name of its mesh axis
    divides: ClassVar[Divides] = "nothing"
    """What its ranks share. The planner gives ranks that divide `data` micro-batches of their own; ranks of
    any other dimension of a user's get the same ones."""

    outside: ClassVar[str] = "dp_replicate"
    """Axis that it lies directly outside of in the order of ranks. What divides data lies outside
    `dp_replicate`; nothing lies outside the pipeline, which torchtitan takes to be outermost."""

    key: ClassVar[str] = ""  # of its degree in [parallelism]; empty for those of [[wlb.dimensions]]
    borrows: ClassVar[bool] = False  # its ranks are those of other dimensions
    runtime: ClassVar[str] = ""
    """Its half that moves tensors, as "module:Class" derived from `wlb_titan.runtime.dimension:Axis`; empty:
    none."""

    every: ClassVar[int] = 1
    """Steps from one meeting of its ranks to the next; in between they do not wait for each other."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.degree: int = config.degree

    def check(self, job: Job) -> None:
        """Raises PlanError, with the setting to blame, for a job that it cannot divide."""

    def memory(self, job: Job, peak: Any) -> Any:
        """The peak of a pipeline rank, a `wlb_titan.memory.rank.RankMemory` in bytes, with what the dimension
        changes in it. What it holds beside all passes is the term `dimensions`."""
        return peak

    def passes(self, job: Job, times: PassTimes) -> PassTimes:
        """The times of passes with what the dimension changes in them."""
        return times

    def meeting(self, job: Job, weights: float) -> Meeting | None:
        """What its ranks, each with this number of weights, all-reduce every `every` steps; None: nothing."""
        return None


class Pipeline(Dimension):
    """Ranks that split the layers (PP)."""

    axis, divides, key = "pp", "layers", "pipeline_parallel_degree"

    def check(self, job: Job) -> None:
        try:
            _ = job.layers
        except PlanError as error:
            raise PlanError(str(error), setting=f"parallelism.{self.key}") from error


class Replicate(Dimension):
    """Replicas of the sharded weights (HSDP)."""

    axis, divides, key = "dp_replicate", "data", "data_parallel_replicate_degree"


class Shard(Dimension):
    """Data-parallel ranks that shard weights, gradients and optimizer state (FSDP)."""

    axis, divides, key = "dp_shard", "data", "data_parallel_shard_degree"

    def check(self, job: Job) -> None:
        if job.micro_batches < 1 or job.micro_batches % job.replicas:
            raise PlanError(
                f"{job.micro_batches} micro-batches cannot be shared equally by {job.replicas} data-parallel "
                "ranks; the number must be a positive multiple of the data-parallel degree.",
                setting="training.global_batch_size",
            )


class Context(Dimension):
    """Ranks that split each micro-batch's tokens (CP)."""

    axis, divides, key = "cp", "tokens", "context_parallel_degree"

    def check(self, job: Job) -> None:
        _ = job.strategy  # which checks itself


class Tensor(Dimension):
    """Ranks that split each layer, with sequence parallelism (TP)."""

    axis, divides, key = "tp", "heads", "tensor_parallel_degree"

    def check(self, job: Job) -> None:
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

    def check(self, job: Job) -> None:
        if self.degree > max(job.model.experts, 1):
            raise PlanError(
                f"The expert parallel degree is {self.degree}, and a layer has {job.model.experts} experts; "
                "it can be at most as many."
            )
        if not 1 <= job.routing_imbalance <= self.degree:
            raise PlanError(
                f"The routing imbalance is {job.routing_imbalance}; it is the busiest rank's tokens over "
                f"the mean's, from 1 to the expert parallel degree of {self.degree}."
            )


TORCHTITAN = {
    dimension.__name__.lower(): dimension
    for dimension in (Pipeline, Replicate, Shard, Context, Tensor, Expert)
}
"""The dimensions of [parallelism], by the field of `Degrees`, in the order of ranks: the outermost first."""

TAKEN = {"batch", "loss", "dp", "efsdp", "fsdp", "world", *(one.axis for one in TORCHTITAN.values())}
"""Names that torchtitan's meshes have."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks share the work along each dimension: those of `TORCHTITAN`, and the user's."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    shard: int = 1
    replicate: int = 1
    expert: int = 1  # divides the ranks of TP, CP and `shard`, from which it takes its own
    own: tuple[Dimension.Config, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "own" and (degree := getattr(self, field.name)) < 1:
                raise PlanError(f"The {field.name} parallel degree is {degree}; it must be at least 1.")
        if self.tensor * self.sharding_ranks % self.expert:
            raise PlanError(
                f"The expert parallel degree {self.expert} does not divide TP {self.tensor} x CP "
                f"{self.context} x {self.shard} sharding data-parallel ranks, of which it takes its own."
            )
        own_dimensions(self.own)

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """All of them in the order of ranks, outermost first, and then those that borrow ranks."""
        known = [cls(cls.Config(degree=getattr(self, name))) for name, cls in TORCHTITAN.items()]
        ranks = in_order([one for one in known if not one.borrows], own_dimensions(self.own))
        return (*ranks, *(one for one in known if one.borrows))

    @cached_property
    def layout(self) -> dict[str, int]:
        """Degree of each mesh axis, in the order of ranks."""
        return {one.axis: one.degree for one in self.dimensions if not one.borrows}

    @cached_property
    def strides(self) -> dict[str, int]:
        """How many ranks two neighbours along an axis are apart."""
        degrees = list(self.layout.values())
        return {axis: math.prod(degrees[place + 1 :]) for place, axis in enumerate(self.layout)}

    @cached_property
    def own_data(self) -> int:
        """Degree of the user's dimensions that divide data. Ranks along them have weights of their
        own between meetings, as FSDP does not add up their gradients."""
        return math.prod(one.degree for one in own_dimensions(self.own) if one.divides == "data")

    @property
    def data(self) -> int:
        """Data-parallel degree: ranks that run different micro-batches."""
        return self.shard * self.replicate * self.own_data

    @property
    def ranks(self) -> int:
        """GPUs of the job."""
        return math.prod(self.layout.values())

    @property
    def sharding_ranks(self) -> int:
        """Ranks over which FSDP shards weights: context-parallel ranks would hold the same ones."""
        return self.shard * self.context

    def link(self, cluster: Cluster, axis: str) -> Link:
        """What the ranks along an axis communicate over."""
        return cluster.link(self.layout[axis], self.strides[axis])

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        """The axes along which some ranks differ."""
        places: tuple[Ints, ...] = np.unravel_index(ranks, tuple(self.layout.values()))
        return [axis for axis, place in zip(self.layout, places, strict=True) if len(set(place.tolist())) > 1]

    def ends_of(self, replica: int) -> list[int]:
        """The first rank of the first and of the last pipeline rank that run a data-parallel rank's
        micro-batches."""
        axes = [one.axis for one in self.dimensions if one.divides == "data"]
        places = np.unravel_index(replica, [self.layout[axis] for axis in axes])
        first = sum(int(place) * self.strides[axis] for axis, place in zip(axes, places, strict=True))
        return sorted({first, first + (self.pipeline - 1) * self.strides["pp"]})

    def __str__(self) -> str:
        data = self.shard * self.replicate
        text = f"TP {self.tensor} x CP {self.context} x PP {self.pipeline} x DP {data}"
        if self.replicate > 1 < self.shard:
            text += f" ({self.replicate} replicas of {self.shard})"
        text += "".join(f" x {one.axis.upper()} {one.degree}" for one in own_dimensions(self.own))
        return text + (f", EP {self.expert}" if self.expert > 1 else "")


def own_dimensions(configs: Sequence[Dimension.Config]) -> tuple[Dimension, ...]:
    """The dimensions of [[wlb.dimensions]]; PlanError where one is torchtitan's, has another's axis or lies
    where it cannot."""
    found: list[Dimension] = []
    for place, config in enumerate(configs):
        one = config.make()
        known = ["dp_replicate"] if one.divides == "data" else ["dp_replicate", "dp_shard", "cp", "tp"]
        if one.key:
            wrong = f"torchtitan has it; set parallelism.{one.key}."
        elif not one.axis:
            wrong = 'No dimension is named. Write the name of an installed one, or "package.module:Class".'
        elif one.axis in TAKEN | {other.axis for other in found}:
            wrong = f"There is a dimension with the axis {one.axis!r} already; each can be there once."
        elif one.outside not in known:
            wrong = (
                f"It says that it lies outside {one.outside!r}; dividing {one.divides} it can lie outside "
                f"{', '.join(known)}."
            )
        else:
            found.append(one)
            continue
        raise PlanError(wrong, setting=f"wlb.dimensions.{place}.name")
    return tuple(found)


def in_order(torchtitan: Sequence[Any], own: Sequence[Dimension]) -> list[Any]:
    """Dimensions in the order of ranks: each of the user's directly outside of the axis that it names, the
    first that does so outermost."""
    found = list(torchtitan)
    for one in own:
        place = next(number for number, other in enumerate(found) if other.axis == one.outside)
        found.insert(place, one)
    return found
