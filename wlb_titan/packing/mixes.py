"""What each layer recomputes, micro-batch by micro-batch, under `as_needed` (`memory/mix.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.passes import repeated_seconds
from wlb_titan.memory.mix import UNCHOSEN, Moments, mixed, unmixed
from wlb_titan.memory.rank import Moment, Passes
from wlb_titan.memory.recompute import KINDS
from wlb_titan.packing.predicted import pack_sizes, pass_seconds, passing
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import Flow, MicroBatch

if TYPE_CHECKING:
    from wlb_titan.job import Job

FILLED = 0.99
"""Share that a mix may take of what predictions may fill: traces are up to 1 % above predictions."""


def with_mixes(
    job: Job, micro_batches: Sequence[MicroBatch], flow: Flow | None, ranks: Collection[int]
) -> list[MicroBatch]:
    """A data-parallel rank's micro-batches of a step with their `mix`, chosen on these pipeline ranks.

    All ranks of a stage must repeat alike what they wait for together. So all that the choice follows from is
    the same on tensor- and context-parallel ranks, and micro-batches that data-parallel ranks share have no
    choice. Slack is that of a step that repeats nothing, so ranks need not know each other's choice; with
    slices hardly anything has any.
    """
    sizes, each = pack_sizes(job, micro_batches), len(micro_batches)
    length = each if flow is not None or job.run is None else job.run
    free = np.array([m.sharers == 1 for m in micro_batches])
    mixes = np.zeros((each, len(job.layers), len(KINDS)), dtype=np.int64)
    mixes[free, :, 0], mixes[~free, :, UNCHOSEN] = job.layers, job.layers
    begun = mixes.copy()

    @cache  # most of the time, and not needed where all fits
    def seconds() -> Floats:
        repeated = np.zeros((each, len(KINDS)))
        repeated[free] = repeated_seconds(job, passing([m for m in micro_batches if m.sharers == 1], job)).T
        return repeated

    @cache
    def slack(first: int) -> Floats:
        """float64 (stages, micro-batches of the run), of backward passes under `none`."""
        slacks = np.zeros((len(job.layers), length))
        if flow is None and job.shape.ranks > 1:
            graph = PipelineGraph(job.shape, length)
            run = slice(first, first + length)
            nothing_repeated = zip(micro_batches[run], begun[run], strict=True)
            times = pass_seconds(job, [replace(m, mix=mix) for m, mix in nothing_repeated])
            of_actions = graph.slack(PassTimes(*times[..., None]))
            for (kind, stage, place), of_action in zip(graph.actions, of_actions[:, 0], strict=True):
                if kind in ("B", "I"):
                    slacks[stage, place] = of_action
        return slacks

    for number in ranks:
        rank = job.packing.rank_memory(job, number)
        for first in range(0, each, length):
            run = slice(first, first + length)
            moments = Moments.of(rank, Passes(sizes[run], flow), reduced=first > 0)
            there = job.fitting.with_dimensions(rank.at(Moment(), 0.0, 0)).total
            stages, room = len(rank.stages), FILLED * job.fitting.usable - there
            chosen = unmixed(moments, np.tile(free[run], stages))
            if free.any() and moments.bytes_of(chosen).max() > room:
                repeated, waits = np.tile(seconds()[run], (stages, 1)), slack(first)[list(rank.stages)]
                chosen = mixed(moments, chosen, repeated, waits.ravel(), room)
            mixes[run, rank.stages] = chosen.reshape(stages, -1, len(KINDS)).swapaxes(0, 1)
    return [replace(m, mix=mix) for m, mix in zip(micro_batches, mixes, strict=True)]
