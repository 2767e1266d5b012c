"""Steps whose micro-batches are MicroPacks: every replica runs its passes in the order of its plan.

SlimPack's graph also has edges between slices (section 4.3): the forward pass of a slice waits for those of
earlier slices, its backward pass for those of later ones. They are passes of one stage, and so of one rank,
so it is enough to check that the rank's order obeys them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.cost.workload import BYTES
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import PackSize, RankMemory, SliceCache
from wlb_titan.packing.predicted import pass_seconds, replica_memory
from wlb_titan.packing.slim.slices import last_needed, piece_numbers
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import PREFIX, TOTAL, Action, Flow, MicroBatch, Plan


def planned_times(job: Job, micro_batches: Sequence[MicroBatch], run: int) -> tuple[PassTimes, Floats]:
    """Times of the passes of planned micro-batches, float64 (stages, n, k), and tokens of each data-parallel
    rank, float64 (n, k), with n = `run` micro-batches in each of k pipeline runs."""
    tokens = np.array([m.length for m in micro_batches], dtype=np.float64).reshape(-1, run).T
    return in_runs(pass_seconds(job, micro_batches), run), tokens


def in_runs(seconds: Floats, run: int) -> PassTimes:
    """The seconds of `pass_seconds` as arrays (stages, n, k)."""
    return PassTimes(*seconds.reshape(*seconds.shape[:2], -1, run).swapaxes(2, 3))


def transfer_seconds(job: Job, tokens: Floats) -> Floats:
    """Seconds that micro-batches of these tokens take from one pipeline rank to the next."""
    if job.degrees.pipeline == 1:
        return np.zeros_like(tokens)
    inner = job.degrees.tensor * job.degrees.context
    link = job.cluster.link(2, job.degrees.strides["pp"])
    # One pair of ranks: its own network card, without the neighbours of a ring.
    bandwidth = link.bandwidth if link == job.cluster.node else job.cluster.network.bandwidth
    return tokens * (job.model.hidden * BYTES / inner / bandwidth) + link.latency


SETTLED = 1e-9  # of a step's time: less is no change


class Replica(NamedTuple):
    """One data-parallel rank in a step."""

    graph: PipelineGraph
    times: PassTimes  # arrays (stages, n, 1)
    delays: Floats  # float64 (n, 1), seconds of a micro-batch's data from one pipeline rank to the next
    micro_batches: Sequence[MicroBatch]  # by the `place` of its actions

    def ends(self, earliest: Floats) -> Floats:
        """float64 (actions,), when each action ends if none begins before its `earliest`."""
        return np.asarray(self.graph.ends(self.times, self.delays, earliest[:, None])[:, 0])


def ends_together(replicas: Sequence[Replica]) -> list[Floats]:
    """For each replica of a step float64 (actions,), when its actions end; shared passes begin together."""
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
    """For each shared pass its ranks, and its number in the graph of each."""
    passes: dict[tuple[int, Action], list[tuple[int, int]]] = {}
    for rank, replica in enumerate(replicas):
        for number, action in enumerate(replica.graph.actions):
            if merged := replica.micro_batches[action.place].merged:
                passes.setdefault((merged.start, action), []).append((rank, number))
    return list(passes.values())


def replica_graph(job: Job, plan: Plan, dp_rank: int) -> PipelineGraph:
    assert plan.flows is not None
    flow, micro_batches = plan.flows[dp_rank], plan.of_rank(dp_rank)
    needed = check_slices(flow, micro_batches)
    return PipelineGraph(job.shape, len(micro_batches), flow, needed)


def run_flows(job: Job, plans: Sequence[Plan], times: PassTimes, delays: Floats) -> tuple[Floats, Floats]:
    """Runs every replica of every plan; k is steps x replicas.

    Args:
        plans: each with an order of passes.
        times: arrays (stages, n, k).
        delays: float64 (n, k), seconds of a micro-batch's data from one rank to the next.

    Returns:
        float64 (k,) each, seconds, and how many of them a rank is busy on average.
    """
    seconds, busy = [], []
    for number, plan in enumerate(plans):
        k = slice(number * job.replicas, (number + 1) * job.replicas)
        own = PassTimes(*(array[..., k] for array in times))
        replicas = replicas_of(job, plan, own, delays[:, k])
        seconds += [float(ends.max()) for ends in ends_together(replicas)]
        busy += [float(replica.graph.busy(replica.times).mean()) for replica in replicas]
    return np.array(seconds), np.array(busy)


def replicas_of(
    job: Job, plan: Plan, times: PassTimes, delays: Floats, places: slice = slice(None)
) -> list[Replica]:
    """The replicas of one plan, in the run of the pipeline with the micro-batches at `places`."""
    ranks = range(job.replicas)
    micro_batches = [plan.of_rank(rank)[places] for rank in ranks]
    if plan.flows is None:
        graphs = [PipelineGraph(job.shape, len(micro_batches[0]))] * len(ranks)
    else:
        graphs = [replica_graph(job, plan, rank) for rank in ranks]
    replicas = []
    for rank, graph, packs in zip(ranks, graphs, micro_batches, strict=True):
        k = slice(rank, rank + 1)
        own = PassTimes(*(array[..., k] for array in times))
        replicas.append(Replica(graph, own, delays[:, k], packs))
    return replicas


def rank_memory(job: Job, plan: Plan, dp_rank: int) -> tuple[RankMemory, ...]:
    return replica_memory(job, plan.of_rank(dp_rank), None if plan.flows is None else plan.flows[dp_rank])


def flow_memory(job: Job, plans: Sequence[Plan]) -> tuple[RankMemory, ...]:
    """The largest peak of each pipeline rank over all replicas and plans."""
    peaks = [rank_memory(job, plan, rank) for plan in plans for rank in range(job.replicas)]
    return tuple(fullest(ranks) for ranks in zip(*peaks, strict=True))


def cache_bytes(job: Job, actions: Sequence[Action], packs: Sequence[PackSize]) -> list[float]:
    """`SliceCache.bytes_` on a rank after each of its actions."""
    cache = SliceCache(job.token_bytes, job.layers)
    result = []
    for action in actions:
        pack = packs[action.place]
        cache.begin(action, pack.slices, pack.length * pack.sharers)
        cache.end(action, pack.slices)
        result.append(cache.bytes_)
    return result


def check_slices(flow: Flow, packs: Sequence[MicroBatch]) -> dict[int, int]:
    """Checks the edges between slices; returns the place of the last forward pass that each backward pass, by
    its place, waits for."""
    behind = [place for place, pack in enumerate(packs) if pack.passes != "F"]
    needed = dict(zip(behind, last_needed(packs).tolist(), strict=True))
    chains: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for place, (pack, own) in enumerate(zip(packs, piece_numbers(packs), strict=True)):
        assert pack.slices is not None
        cut = pack.slices[:, TOTAL] > pack.lengths
        for piece, prefix in zip(own[cut].tolist(), pack.slices[cut, PREFIX].tolist(), strict=True):
            for kind in pack.passes:
                chains.setdefault((kind, piece), []).append((prefix if kind == "F" else -prefix, place))
    ordered = [[(kind, place) for _, place in sorted(found)] for (kind, _), found in chains.items()]
    _check_chains(flow, ordered + [[("F", first), ("B", place)] for place, first in needed.items()])
    return needed


def _check_chains(flow: Flow, chains: Sequence[Sequence[tuple[Any, int]]]) -> None:
    """Checks that every stage runs the passes of each chain in order."""
    for rank, actions in enumerate(flow):
        at = {action: number for number, action in enumerate(actions)}
        for stage in {action.stage for action in actions}:
            for chain in chains:
                passes = [Action(kind, stage, place) for kind, place in chain]
                for first, second in itertools.pairwise(passes):
                    if at[first] > at[second]:
                        raise PlanError(
                            f"Pipeline rank {rank} runs {second} before {first}, which it needs: forward "
                            "passes go from a document's start to its end, and then backward passes from its "
                            "end to its start."
                        )
