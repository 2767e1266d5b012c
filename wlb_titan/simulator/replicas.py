"""Steps whose micro-batches are MicroPacks: every replica runs its passes in the order that its plan says.

The dependency graph has the edges between slices too (SlimPack, section 4.3): the forward pass of a slice
waits for those of the slices before it, its backward pass for those of the slices behind it. All of them are
passes of one stage, and so of one rank, whose own order has to keep to them; it is checked to.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import Passes, RankMemory, SliceCache
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import parts, piece_numbers, replica_passes
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import LENGTH, PREFIX, TOTAL, Action, ByPass, Flow, MicroBatch, Plan
from wlb_titan.simulator.meeting import Replica, ends_together
from wlb_titan.simulator.planned import keys_of

Chain = list[tuple[Literal["F", "B"], int]]
"""Kinds and places of passes, of which each runs before the next one."""


def replica_graph(job: Job, plan: Plan, dp_rank: int) -> PipelineGraph:
    """The graph of one replica's step."""
    assert plan.flows is not None
    flow, micro_batches = plan.flows[dp_rank], plan.replica(dp_rank)
    needed = check_slices(flow, micro_batches)
    return PipelineGraph(job.shape, len(micro_batches.forward), flow, needed)


def run_flows(
    job: Job, plans: Sequence[Plan], times: PassTimes, delays: Floats, backward_delays: Floats
) -> tuple[Floats, Floats]:
    """Runs every replica of every plan.

    Args:
        plans: with an order of passes each.
        times: times of all passes, (stages, n, steps x replicas).
        delays: float64 (n, steps x replicas), seconds of a forward pass' data from one rank to the next.
        backward_delays: the same of gradients.

    Returns:
        float64 (steps x replicas,), seconds, and what a rank computes of them on average.
    """
    seconds, busy = [], []
    for number, plan in enumerate(plans):
        k = slice(number * job.replicas, (number + 1) * job.replicas)
        own = PassTimes(*(array[..., k] for array in times))
        replicas = replicas_of(job, plan, own, delays[:, k], backward_delays[:, k])
        seconds += [float(ends.max()) for ends in ends_together(replicas)]
        busy += [float(replica.graph.busy(replica.times).mean()) for replica in replicas]
    return np.array(seconds), np.array(busy)


def replicas_of(
    job: Job,
    plan: Plan,
    times: PassTimes,
    delays: Floats,
    backward_delays: Floats,
    places: slice = slice(None),
) -> list[Replica]:
    """The replicas of one plan, in one run of the pipeline.

    Args:
        times, delays, backward_delays: as of `run_flows`, of these replicas.
        places: which of a replica's micro-batches go through in this run.
    """
    ranks = range(job.replicas)
    micro_batches = [plan.replica(rank).each(operator.getitem, places) for rank in ranks]
    if plan.flows is None:
        graphs = [PipelineGraph(job.shape, len(micro_batches[0].forward))] * len(ranks)
    else:
        graphs = [replica_graph(job, plan, rank) for rank in ranks]
    replicas = []
    for rank, graph, packs in zip(ranks, graphs, micro_batches, strict=True):
        k = slice(rank, rank + 1)
        own = PassTimes(*(array[..., k] for array in times))
        replicas.append(Replica(graph, own, delays[:, k], backward_delays[:, k], packs))
    return replicas


def replica_memory(job: Job, plan: Plan, dp_rank: int) -> tuple[RankMemory, ...]:
    """The peak of each pipeline rank of one replica in a step."""
    return job.fitting.peak(replica_passes(plan, dp_rank, partial(keys_of, job=job)))


def flow_memory(job: Job, plans: Sequence[Plan]) -> tuple[RankMemory, ...]:
    """The largest peak of each pipeline rank over all replicas and plans."""
    peaks = [replica_memory(job, plan, rank) for plan in plans for rank in range(job.replicas)]
    return tuple(fullest(ranks) for ranks in zip(*peaks, strict=True))


def cache_bytes(job: Job, actions: Sequence[Action], passes: Passes) -> list[float]:
    """Keys and values of sliced documents, and their gradients, on a rank after each of its actions."""
    cache = SliceCache(job.token_bytes, job.layers)
    result = []
    for action in actions:
        packs = passes.packs.of(action.kind)
        slices = packs.slices[action.place]
        cache.begin(action, slices, packs.lengths[action.place] * packs.sharers[action.place])
        cache.end(action, slices)
        result.append(cache.bytes_)
    return result


def check_slices(flow: Flow, micro_batches: ByPass[tuple[MicroBatch, ...]]) -> list[int]:
    """Checks the edges between the slices of each document."""
    forward, backward = micro_batches.each(parts)
    needed = last_needed(forward, backward)
    numbers = piece_numbers([*forward, *backward])
    places: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for number, ((documents, slices), own) in enumerate(zip([*forward, *backward], numbers, strict=True)):
        which, place = divmod(number, len(forward))
        cut = slices[:, TOTAL] > documents[:, LENGTH]
        for piece, prefix in zip(own[cut].tolist(), slices[cut, PREFIX].tolist(), strict=True):
            places.setdefault(piece, ([], []))[which].append((prefix, place))
    chains: list[Chain] = []
    for ahead, back in places.values():
        chains.append([("F", place) for _, place in sorted(ahead)])
        chains.append([("B", place) for _, place in sorted(back, reverse=True)])
    chains += [[("F", first), ("B", place)] for place, first in enumerate(needed)]
    _check_chains(flow, chains)
    return needed


def _check_chains(flow: Flow, chains: Sequence[Chain]) -> None:
    """Checks that the passes of each chain stand in its order, on every stage."""
    for rank, actions in enumerate(flow):
        at = {action: number for number, action in enumerate(actions)}
        for stage in {action.stage for action in actions}:
            for chain in chains:
                passes = [Action(kind, stage, place) for kind, place in chain]
                for first, second in itertools.pairwise(passes):
                    if at[first] > at[second]:
                        raise PlanError(
                            f"Pipeline rank {rank} runs {second} before {first}, which it needs: forward "
                            "passes go from a document's begin to its end, and then backward passes from its "
                            "end to its begin."
                        )
