"""The degrees of a job's dimensions (paper section 2.1: TP, CP, PP and DP), and where its ranks lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.cost.dimension import TORCHTITAN, Dimension
from wlb_titan.errors import PlanError

TAKEN = {"batch", "loss", "dp", "efsdp", "fsdp", "world", *(one.axis for one in TORCHTITAN.values())}
"""Names that torchtitan's meshes have."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks share the work along each dimension.

    Attributes:
        tensor: ranks that split each layer, with sequence parallelism.
        context: ranks that split each micro-batch's tokens.
        pipeline: ranks that split the layers.
        shard: data-parallel ranks that shard weights, gradients and optimizer state (FSDP).
        replicate: replicas of these (HSDP).
        expert: ranks that share a layer's experts, taken from those of TP, CP and `shard`; their product is a
            multiple of it.
        own: settings of dimensions that torchtitan does not have, a `Dimension.Config` each.

    Raises:
        PlanError: a degree is below 1, expert parallelism does not divide the ranks that it borrows, or as
            of `own_dimensions`.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    shard: int = 1
    replicate: int = 1
    expert: int = 1
    own: tuple[Any, ...] = ()

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
    def apart(self) -> int:
        """Parts of the job whose weights are each their own between meetings: data-parallel ranks whose
        gradients FSDP does not add up."""
        return math.prod(one.degree for one in own_dimensions(self.own) if one.divides == "data")

    @property
    def data(self) -> int:
        """Data-parallel degree: ranks that run different micro-batches."""
        return self.shard * self.replicate * self.apart

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
        begin = sum(int(place) * self.strides[axis] for axis, place in zip(axes, places, strict=True))
        return sorted({begin, begin + (self.pipeline - 1) * self.strides["pp"]})

    def check_ranks(self, gpus: int) -> None:
        """Raises PlanError where the degrees do not multiply to the GPUs that there are."""
        if self.ranks != gpus:
            raise PlanError(f"{self} is {self.ranks} GPUs, and the job has {gpus}. Change a degree to match.")

    def __str__(self) -> str:
        data = self.shard * self.replicate
        text = f"TP {self.tensor} x CP {self.context} x PP {self.pipeline} x DP {data}"
        if self.replicate > 1 < self.shard:
            text += f" ({self.replicate} replicas of {self.shard})"
        text += "".join(f" x {one.axis.upper()} {one.degree}" for one in own_dimensions(self.own))
        return text + (f", EP {self.expert}" if self.expert > 1 else "")


def own_dimensions(configs: Sequence[Any]) -> tuple[Dimension, ...]:
    """The dimensions of [[wlb.dimensions]].

    Raises:
        PlanError: one is torchtitan's, has another's axis or lies where it cannot; with the setting.
    """
    found: list[Dimension] = []
    for place, config in enumerate(configs):
        setting, one = f"wlb.dimensions.{place}.name", config.make()
        if one.key:
            raise PlanError(f"torchtitan has it; set parallelism.{one.key}.", setting=setting)
        if not one.axis:
            raise PlanError(
                'No dimension is named. Write the name of an installed one, or "package.module:Class".',
                setting=setting,
            )
        if one.axis in TAKEN | {other.axis for other in found}:
            raise PlanError(
                f"There is a dimension with the axis {one.axis!r} already; each can be there once.",
                setting=setting,
            )
        known = ["dp_replicate"] if one.divides == "data" else ["dp_replicate", "dp_shard", "cp", "tp"]
        if one.outside not in known:
            raise PlanError(
                f"It says that it lies outside {one.outside!r}; dividing {one.divides} it can lie outside "
                f"{', '.join(known)}.",
                setting=setting,
            )
        found.append(one)
    return tuple(found)


def in_order(torchtitan: Sequence[Any], own: Sequence[Dimension]) -> list[Any]:
    """Dimensions in the order of ranks: each of one's own directly outside of the axis that it names, the
    first that does so outermost."""
    found = list(torchtitan)
    for one in own:
        place = next(number for number, other in enumerate(found) if other.axis == one.outside)
        found.insert(place, one)
    return found
