"""The time of a step under dimensions of one's own ([[wlb.dimensions]])."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.degrees import own_dimensions
from wlb_titan.cost.models import rank_parameters
from wlb_titan.job import Job
from wlb_titan.pipeline.graph import PassTimes


def own_weights(job: Job, rank: int | None = None) -> float:
    """Number of weights on a GPU of a pipeline rank; None: of the one with the most."""
    ranks = range(job.degrees.pipeline) if rank is None else [rank]
    most = max(rank_parameters(job.model, job.layers, job.shape.stages_of(each)) for each in ranks)
    return most / job.degrees.tensor / job.degrees.sharding_ranks


def with_dimensions(job: Job, times: PassTimes) -> PassTimes:
    """Times of passes with what dimensions of one's own change in them."""
    for dimension in own_dimensions(job.degrees.own):
        times = dimension.passes(job, times)
    return times


def together(job: Job, seconds: Floats, numbers: Ints) -> Floats:
    """Seconds that steps take, some data-parallel ranks of which may wait for each other in some steps alone.

    Args:
        seconds: float64 (steps, data-parallel ranks), of each step on each of them.
        numbers: int64 (steps,), of the steps, from 1.

    Returns:
        float64 (steps,), of which the sum is when the last rank is done.
    """
    apart = [one for one in own_dimensions(job.degrees.own) if one.divides == "data"]
    if not apart:
        return np.asarray(seconds.max(axis=1))
    each = seconds.reshape(len(seconds), *(one.degree for one in apart), -1).max(axis=-1)
    clock, ends = np.zeros(each.shape[1:]), []
    for number, of_step in zip(numbers, each, strict=True):
        clock = clock + of_step
        for axis, one in enumerate(apart):
            if number % one.every == 0:
                clock = np.broadcast_to(clock.max(axis=axis, keepdims=True), clock.shape)
        ends.append(clock.max())
    return np.diff(ends, prepend=0.0)


class Met(NamedTuple):
    """A meeting of the ranks of a dimension of one's own.

    Attributes:
        axis: axis of the mesh.
        every: steps from one to the next.
        bytes_: bytes that a rank all-reduces in one meeting.
        collectives: number of collectives that these go in.
        seconds: seconds of one meeting.
    """

    axis: str
    every: int
    bytes_: float
    collectives: int
    seconds: float


def meetings(job: Job, rank: int | None = None) -> list[Met]:
    """The meetings of a job's dimensions, on a pipeline rank; None: on the one with the most weights."""
    found = []
    for one in own_dimensions(job.degrees.own):
        if one.degree > 1 and (met := one.meeting(job, own_weights(job, rank))) is not None:
            link = job.degrees.link(job.cluster, one.axis)
            each = 2 * link.collective(met.bytes_ / max(met.collectives, 1), one.degree)
            found.append(Met(one.axis, one.every, *met, met.collectives * each))
    return found
