"""Steps whose micro-batches are MicroPacks: every replica runs its passes in the order that its plan says.

The dependency graph has the edges between slices too (SlimPack, section 4.3): the forward pass of a slice
waits for those of the slices before it, its backward pass for those of the slices behind it. All of them are
passes of one stage, and so of one rank, whose own order has to keep to them; it is checked to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wlb_titan.context import after, whole
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.peak import RankMemory
from wlb_titan.memory.slices import SliceCache
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import parts, replica_passes, sliced_document
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import LENGTH, Action, Flow, MicroBatch, Passes, Plan, Slices
from wlb_titan.simulator.meeting import Replica, ends_together
from wlb_titan.simulator.passes import MicroBatches, both_times, keys_of, pass_times

Floats = NDArray[np.float64]
Chain = list[tuple[Literal["F", "B"], int]]
"""Kinds and places of passes, of which each runs before the next one."""


@dataclass(frozen=True, slots=True)
class PackSeconds:
    """Seconds of packs, for the choice of their number: what short packs lose counts here."""

    job: Job

    def __call__(self, packing: Packing) -> tuple[Floats, Floats]:
        """float64 (packs,) each, forward and backward through all stages."""
        if packing.backward is not None:
            passing, back = (_passing(self.job, one, one_pass=True) for one in (packing, packing.backward))
            times = both_times(self.job, passing, back)
            return times.forward.sum(axis=0)[0], (times.inputs + times.weights).sum(axis=0)[0]
        forward, backward = np.empty((2, len(packing.packs)))
        for ranks in np.unique(packing.sharers).tolist():
            (own,) = np.nonzero(packing.sharers == ranks)
            job = self.job.merged[ranks]
            times = pass_times(job, _passing(job, packing, own.tolist(), one_pass=False))
            forward[own] = times.forward.sum(axis=0)[0]
            backward[own] = (times.inputs + times.weights).sum(axis=0)[0]
        return forward, backward


def _passing(
    job: Job, packing: Packing, numbers: Sequence[int] | None = None, *, one_pass: bool
) -> MicroBatches:
    """Some of a packing's packs, or all, as arrays (1, packs)."""
    numbers = range(len(packing.packs)) if numbers is None else numbers
    return MicroBatches(*np.array([_pack(job, packing, number, one_pass) for number in numbers]).T[:, None])


def _pack(job: Job, packing: Packing, number: int, one_pass: bool) -> tuple[float, ...]:
    """Of a pack the fields of `MicroBatches`."""
    lengths = packing.packs[number][:, LENGTH]
    slices = None if packing.slices is None else Slices.of(packing.slices[number], lengths, one_pass)
    prefix = None if slices is None else slices.prefix
    total = -(-int(lengths.sum()) // job.divisor) * job.divisor
    travelling: tuple[int, ...] = ()
    if job.strategy is None:
        seconds = job.latency.seconds(after((whole(lengths),), prefix))
    else:
        _, sharding = job.strategy.shard(lengths, total, slices=slices)
        seconds = job.strategy.seconds(after(sharding, prefix))
        travelling = job.strategy.travelling(sharding, total, slices)
    forward, backward = seconds.max(axis=0).tolist()
    return total, forward, backward, *job.exchange_of(travelling)


def replica_graph(job: Job, plan: Plan, dp_rank: int) -> PipelineGraph:
    """The graph of one replica's step.

    Raises:
        PlanError: the order does not keep to what slices need, or waits for itself.
    """
    assert plan.order is not None
    flow = plan.order[dp_rank]
    micro_batches = plan.of_rank(dp_rank)
    if plan.backward is None:
        check_slices(flow, micro_batches)
        return PipelineGraph(job.shape, len(micro_batches), flow)
    needed = check_passes(flow, micro_batches, plan.backward_of_rank(dp_rank))
    return PipelineGraph(job.shape, len(micro_batches), flow, needed)


def run_flows(
    job: Job, plans: Sequence[Plan], times: PassTimes, delays: Floats, backward_delays: Floats
) -> tuple[Floats, Floats]:
    """Runs every replica of every plan.

    Args:
        job: the job.
        plans: with an order of passes each.
        times: of all passes, (stages, n, steps x replicas).
        delays: float64 (n, steps x replicas), seconds of a forward pass' data from one rank to the next.
        backward_delays: the same of gradients.

    Returns:
        float64 (steps x replicas,), seconds, and what a rank computes of them on average.
    """
    seconds, busy = [], []
    for first, plan in zip(range(0, len(plans) * job.degrees.data, job.degrees.data), plans, strict=True):
        replicas = replicas_of(job, plan, times, delays, backward_delays, first)
        seconds += [float(ends.max()) for ends in ends_together(replicas)]
        busy += [float(replica.graph.busy(replica.times).mean()) for replica in replicas]
    return np.array(seconds), np.array(busy)


def replicas_of(
    job: Job, plan: Plan, times: PassTimes, delays: Floats, backward_delays: Floats, first: int = 0
) -> list[Replica]:
    """The replicas of one plan; arguments as of `run_flows`, in which theirs are from number `first` on."""
    replicas = []
    for rank in range(job.degrees.data):
        k = slice(first + rank, first + rank + 1)
        own = PassTimes(*(a[:, :, k] for a in (times.forward, times.inputs, times.weights)))
        graph = replica_graph(job, plan, rank)
        backward = None if plan.backward is None else plan.backward_of_rank(rank)
        delayed = delays[:, k], backward_delays[:, k]
        replicas.append(Replica(graph, own, *delayed, plan.of_rank(rank), backward))
    return replicas


def replica_memory(job: Job, plan: Plan, dp_rank: int) -> tuple[RankMemory, ...]:
    """The peak of each pipeline rank of one replica in a step.

    Raises:
        PlanError: it cannot be predicted for this schedule.
    """
    return job.peak_memory(replica_passes(plan, dp_rank, partial(keys_of, job=job)))


def flow_memory(job: Job, plans: Sequence[Plan]) -> tuple[RankMemory, ...]:
    """The largest peak of each pipeline rank over all replicas and plans."""
    peaks = [replica_memory(job, plan, rank) for plan in plans for rank in range(job.degrees.data)]
    return tuple(fullest(ranks) for ranks in zip(*peaks, strict=True))


def cache_bytes(job: Job, actions: Sequence[Action], passes: Passes) -> list[float]:
    """Keys and values of sliced documents, and their gradients, on a rank after each of its actions.

    Args:
        job: the job.
        actions: of the rank.
        passes: of its replica.
    """
    cache = SliceCache(job.token_bytes, job.layers)
    result = []
    for action in actions:
        packs = passes.forward if action.kind == "F" else passes.backward
        slices = packs.slices[action.place]
        cache.begin(action, slices, packs.lengths[action.place] * packs.sharers[action.place])
        cache.end(action, slices)
        result.append(cache.bytes_)
    return result


def check_slices(flow: Flow, micro_batches: Sequence[MicroBatch]) -> None:
    """Checks the edges between the slices of each document.

    Raises:
        PlanError: naming the two passes that stand in the wrong order.
    """
    packs: dict[int, list[int]] = {}
    for place, m in enumerate(micro_batches):
        if m.slices is not None and (document := sliced_document(m.documents, m.slices)) >= 0:
            packs.setdefault(document, []).append(place)
    chains: list[Chain] = [
        [("F", place) for place in places] + [("B", place) for place in reversed(places)]
        for places in packs.values()
    ]
    _check_chains(
        flow,
        chains,
        "but these are slices of one document: forward passes go from its begin to its end, backward passes "
        "from its end to its begin.",
    )


def check_passes(flow: Flow, forward: Sequence[MicroBatch], backward: Sequence[MicroBatch]) -> list[int]:
    """The same where backward passes have micro-batches of their own, which run in the order of these.

    Returns:
        As of `last_needed`.

    Raises:
        PlanError: as of `check_slices`; or a backward pass runs before the forward pass of one of its tokens.
    """
    needed = last_needed(parts(forward), parts(backward))
    chains: list[Chain] = [[("F", place) for place in range(len(forward))]]
    chains.append([("B", place) for place in range(len(backward))])
    chains += [[("F", first), ("B", place)] for place, first in enumerate(needed)]
    _check_chains(
        flow,
        chains,
        "which it needs: forward passes go from a document's begin to its end, and then backward passes from "
        "its end to its begin.",
    )
    return needed


def _check_chains(flow: Flow, chains: Sequence[Chain], why: str) -> None:
    """Checks that the passes of each chain stand in its order, on every stage."""
    for rank, actions in enumerate(flow):
        at = {action: number for number, action in enumerate(actions)}
        for stage in {action.stage for action in actions}:
            for chain in chains:
                passes = [Action(kind, stage, place) for kind, place in chain]
                for first, second in itertools.pairwise(passes):
                    if at[first] > at[second]:
                        raise PlanError(f"Pipeline rank {rank} runs {second} before {first}, {why}")
