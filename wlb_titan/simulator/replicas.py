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
from typing import Literal, NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.context import ALL_KEYS, KeyShares, after, whole
from wlb_titan.cost.passes import MicroBatches
from wlb_titan.cost.workload import BYTES
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import Passes, RankMemory, SliceCache
from wlb_titan.packing.slim.asymmetric import last_needed
from wlb_titan.packing.slim.slices import parts, piece_numbers, replica_passes
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import LENGTH, PREFIX, TOTAL, Action, ByPass, Flow, MicroBatch, Plan


def passing(micro_batches: Sequence[MicroBatch], job: Job, context_rank: int | None = None) -> MicroBatches:
    """Planned micro-batches, as arrays (n,), on the slowest context-parallel rank or on a given one."""
    attention = np.array([_on_rank(attention_seconds(m, job), m, context_rank) for m in micro_batches])
    tokens = np.array([m.shared_length for m in micro_batches], dtype=np.float64)
    exchange = np.array([job.exchanging.seconds(travelling(m, job)) for m in micro_batches])
    return MicroBatches(tokens, attention[:, 0], attention[:, 1], *exchange.T)


def attention_seconds(micro_batch: MicroBatch, job: Job) -> Floats:
    """float64 (ranks, 2), seconds of one layer's attention on each context-parallel rank, both passes."""
    if job.strategy is None or micro_batch.ranks is None:
        documents = (whole(micro_batch.documents[:, LENGTH]),)
        return job.latency.seconds(after(documents, micro_batch.prefix))
    return job.strategy.seconds(after(micro_batch.ranks, micro_batch.prefix))


def _on_rank(attention: Floats, micro_batch: MicroBatch, context_rank: int | None) -> Floats:
    """Seconds of both passes, float64 (2,), of all ranks' as `attention_seconds` has them."""
    if context_rank is None or len(attention) == 1:
        return np.asarray(attention.max(axis=0))
    first = (micro_batch.dp_rank - micro_batch.merged.start) if micro_batch.merged else 0
    return np.asarray(attention[first * (len(attention) // micro_batch.sharers) + context_rank])


def travelling(micro_batch: MicroBatch, job: Job) -> tuple[int, ...]:
    """Tokens of a micro-batch that travel by each of the job's moves."""
    if job.strategy is None or micro_batch.ranks is None:
        return ()
    return job.strategy.travelling(micro_batch.ranks, micro_batch.shared_length, micro_batch.elsewhere)


def keys_of(micro_batch: MicroBatch, job: Job) -> KeyShares:
    """What of a micro-batch's keys a context-parallel rank has at the most."""
    strategy = job.merged[micro_batch.sharers].strategy
    if strategy is None or micro_batch.ranks is None:
        return ALL_KEYS
    return strategy.keys(micro_batch.ranks, micro_batch.shared_length, micro_batch.elsewhere)


def planned_times(
    job: Job, micro_batches: ByPass[Sequence[MicroBatch]], run: int
) -> tuple[PassTimes, ByPass[Floats]]:
    """The passes of planned micro-batches, `run` to a pipeline run.

    Returns:
        Seconds, float64 (stages, n, k), and tokens of each data-parallel rank, float64 (n, k).
    """

    def tokens(packs: Sequence[MicroBatch]) -> Floats:
        return np.array([m.length for m in packs], dtype=np.float64).reshape(-1, run).T

    return in_runs(pass_seconds(job, micro_batches), run), micro_batches.each(tokens)


def pass_seconds(
    job: Job, micro_batches: ByPass[Sequence[MicroBatch]], context_rank: int | None = None
) -> Floats:
    """float64 (3, stages, micro-batches), seconds of forward passes, inputs and weights, also of those that
    data-parallel ranks share; on the slowest context-parallel rank or on a given one."""
    sharers = np.array([m.sharers for m in micro_batches.forward])
    found = np.empty((3, len(job.layers), len(sharers)))
    for ranks in np.unique(sharers).tolist():
        (own,) = np.nonzero(sharers == ranks)
        shared = job.merged[ranks]
        packs = micro_batches.each(_some, own.tolist(), shared, context_rank)
        found[:, :, own] = [times[:, 0] for times in shared.packing.pass_times(shared, packs)]
    return found


def in_runs(seconds: Floats, run: int) -> PassTimes:
    """Seconds as of `pass_seconds`, `run` micro-batches to a pipeline run: arrays (stages, n, k)."""
    return PassTimes(*seconds.reshape(*seconds.shape[:2], -1, run).swapaxes(2, 3))


def _some(
    micro_batches: Sequence[MicroBatch], numbers: Sequence[int], job: Job, context_rank: int | None
) -> MicroBatches:
    return passing([micro_batches[number] for number in numbers], job, context_rank).in_runs(1)


def transfer_seconds(job: Job, tokens: Floats) -> Floats:
    """Seconds that a micro-batch's hidden states take from one pipeline rank to the next, shaped alike."""
    if job.degrees.pipeline == 1:
        return np.zeros_like(tokens)
    inner = job.degrees.tensor * job.degrees.context
    link = job.cluster.link(2, job.degrees.strides["pp"])
    # One pair of ranks: its own network card, without the neighbours of a ring.
    bandwidth = link.bandwidth if link == job.cluster.node else job.cluster.network.bandwidth
    return tokens * (job.model.hidden * BYTES / inner / bandwidth) + link.latency


SETTLED = 1e-9  # of a step's time: less is no change


class Replica(NamedTuple):
    """One data-parallel rank in a step.

    Attributes:
        graph: graph of its passes.
        times: times of the passes, arrays (stages, n, 1).
        delays: float64 (n, 1), seconds of a forward pass' data from one pipeline rank to the next.
        backward_delays: the same of gradients.
        micro_batches: micro-batches of forward and of backward passes, in the order of their places.
    """

    graph: PipelineGraph
    times: PassTimes
    delays: Floats
    backward_delays: Floats
    micro_batches: ByPass[Sequence[MicroBatch]]

    def ends(self, earliest: Floats) -> Floats:
        """float64 (actions,), when each action ends that does not begin before `earliest`, of the same
        shape."""
        ends = self.graph.ends(self.times, self.delays, earliest[:, None], self.backward_delays)
        return np.asarray(ends[:, 0])


def ends_together(replicas: Sequence[Replica]) -> list[Floats]:
    """float64 (actions,) of each replica of a step, when its actions end."""
    earliest = [np.zeros(len(replica.graph.actions)) for replica in replicas]
    found = [replica.ends(own) for replica, own in zip(replicas, earliest, strict=True)]
    shared = _shared_passes(replicas)
    if not shared:
        return found
    seconds = [
        np.array([float(replica.times.of(action)[0]) for action in replica.graph.actions])
        for replica in replicas
    ]
    while True:
        later = set()
        tolerance = SETTLED * max(float(ends.max()) for ends in found)
        for places in shared:
            begin = max(found[rank][number] - seconds[rank][number] for rank, number in places)
            for rank, number in places:
                if begin > found[rank][number] - seconds[rank][number] + tolerance:
                    earliest[rank][number] = begin
                    later.add(rank)
        if not later:
            return found
        for rank in later:
            found[rank] = replicas[rank].ends(earliest[rank])


def _shared_passes(replicas: Sequence[Replica]) -> list[list[tuple[int, int]]]:
    """The ranks that run each shared pass, and its number in the graph of each."""
    passes: dict[tuple[int, Action], list[tuple[int, int]]] = {}
    for rank, replica in enumerate(replicas):
        for number, action in enumerate(replica.graph.actions):
            if merged := replica.micro_batches.of(action.kind)[action.place].merged:
                passes.setdefault((merged.start, action), []).append((rank, number))
    return list(passes.values())


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
