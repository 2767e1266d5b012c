"""A job's degrees along its dimensions of parallelism, and where its ranks lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wlb_titan.cost.cluster import Cluster, Link
from wlb_titan.dimensions.dimension import TAKEN, TORCHTITAN, Dimension, Expert
from wlb_titan.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks share the work along each dimension of `TORCHTITAN`, and the user's dimensions."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    shard: int = 1
    replicate: int = 1
    expert: int = 1  # divides the ranks of TP, CP and `shard`, and takes its own from them
    own: tuple[Dimension.Config, ...] = ()

    def __post_init__(self) -> None:
        if self.tensor * self.sharding_ranks % self.expert:
            raise PlanError(
                f"The expert parallel degree {self.expert} does not divide TP {self.tensor} x CP "
                f"{self.context} x {self.shard} sharding data-parallel ranks, from which it takes its ranks.",
                setting=f"parallelism.{Expert.key}",
            )
        own_dimensions(self.own)

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """All in the order of ranks, outermost first, then those that borrow ranks."""
        built_in = [cls(cls.Config(degree=getattr(self, name))) for name, cls in TORCHTITAN.items()]
        ranks = in_order([dim for dim in built_in if not dim.borrows], own_dimensions(self.own))
        return (*ranks, *(dim for dim in built_in if dim.borrows))

    @cached_property
    def layout(self) -> dict[str, int]:
        """Degree of each mesh axis, in the order of ranks."""
        return {dim.axis: dim.degree for dim in self.dimensions if not dim.borrows}

    @cached_property
    def strides(self) -> dict[str, int]:
        """Ranks from one neighbour to the next along each axis."""
        degrees = list(self.layout.values())
        return {axis: math.prod(degrees[place + 1 :]) for place, axis in enumerate(self.layout)}

    @cached_property
    def own_data(self) -> int:
        """Degree of the user's dimensions that divide data, whose weights differ between meetings."""
        return math.prod(dim.degree for dim in own_dimensions(self.own) if dim.divides == "data")

    @property
    def data(self) -> int:
        """Ranks that run different micro-batches."""
        return self.shard * self.replicate * self.own_data

    @property
    def ranks(self) -> int:
        return math.prod(self.layout.values())

    @property
    def sharding_ranks(self) -> int:
        """Ranks over which FSDP shards weights, context-parallel ones included."""
        return self.shard * self.context

    def link(self, cluster: Cluster, axis: str) -> Link:
        return cluster.link(self.layout[axis], self.strides[axis])

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.layout)

    def replica_at(self, place: Mapping[str, int]) -> int:
        """The data-parallel rank of what lies there; axes that are left out are 0."""
        data = [dim for dim in self.dimensions if dim.divides == "data"]
        places, degrees = [place.get(dim.axis, 0) for dim in data], [dim.degree for dim in data]
        return int(np.ravel_multi_index(places, degrees))

    def ends_of(self, replica: int) -> list[int]:
        """The first global rank of the first and of the last pipeline rank of a data-parallel rank."""
        axes = [dim.axis for dim in self.dimensions if dim.divides == "data"]
        places = np.unravel_index(replica, [self.layout[axis] for axis in axes])
        first = sum(int(place) * self.strides[axis] for axis, place in zip(axes, places, strict=True))
        return sorted({first, first + (self.pipeline - 1) * self.strides["pp"]})

    def __str__(self) -> str:
        data = self.shard * self.replicate
        text = f"TP {self.tensor} x CP {self.context} x PP {self.pipeline} x DP {data}"
        if self.replicate > 1 < self.shard:
            text += f" ({self.replicate} replicas of {self.shard})"
        text += "".join(f" x {dim.axis.upper()} {dim.degree}" for dim in own_dimensions(self.own))
        return text + (f", EP {self.expert}" if self.expert > 1 else "")


class Grid:
    """The global ranks of a job by their places along its mesh axes, the outermost first."""

    def __init__(self, layout: Mapping[str, int]) -> None:
        self._axes, self._shape = tuple(layout), tuple(layout.values())

    def place(self, rank: int) -> dict[str, int]:
        return dict(zip(self._axes, map(int, np.unravel_index(rank, self._shape)), strict=True))

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        """The axes along which these ranks differ."""
        places = np.array(np.unravel_index(ranks, self._shape))
        return [axis for axis, along in zip(self._axes, places, strict=True) if len(set(along.tolist())) > 1]

    def moved(self, ranks: Sequence[int], start: int, to: int) -> tuple[int, ...]:
        """The ranks that are to `to` what these are to `start`: with their own places on the axes along which
        they differ from it, and with those of `to` on the others."""
        from_place, to_place = np.array(np.unravel_index([start, to], self._shape)).T[..., None]
        along = np.array(np.unravel_index(ranks, self._shape))
        same = (along == from_place).all(axis=1, keepdims=True)
        return tuple(np.ravel_multi_index(tuple(np.where(same, to_place, along)), self._shape).tolist())


def own_dimensions(configs: Sequence[Dimension.Config]) -> tuple[Dimension, ...]:
    """The dimensions of [[wlb.dimensions]], checked."""
    dimensions: list[Dimension] = []
    for place, config in enumerate(configs):
        dim = config.make()
        allowed = ["dp_replicate"] if dim.divides == "data" else ["dp_replicate", "dp_shard", "cp", "tp"]
        if dim.key:
            problem = f"torchtitan has it; set parallelism.{dim.key}."
        elif not dim.axis:
            problem = 'No dimension is named. Write the name of an installed one, or "package.module:Class".'
        elif dim.axis in TAKEN | {other.axis for other in dimensions}:
            problem = f"There is a dimension with the axis {dim.axis!r} already; each can be there once."
        elif dim.outside not in allowed:
            problem = (
                f"Its `outside` is {dim.outside!r}; a dimension that divides {dim.divides} can be outside "
                f"{', '.join(allowed)}."
            )
        else:
            dimensions.append(dim)
            continue
        raise PlanError(problem, setting=f"wlb.dimensions.{place}.name")
    return tuple(dimensions)


def in_order(torchtitan: Sequence[Any], users: Sequence[Dimension]) -> list[Any]:
    """Dimensions in the order of ranks: the user's directly outside the axis that each names, in order."""
    ordered = list(torchtitan)
    for dim in users:
        place = next(number for number, other in enumerate(ordered) if other.axis == dim.outside)
        ordered.insert(place, dim)
    return ordered
