"""The passes of a step and when they end, rank by rank: from plans, or from what was measured.

Micro-batches run in the schedule's order, MicroPacks in that of their plan. For these SlimPack's graph also
has edges between slices (section 4.3): the forward pass of a slice waits for those of earlier slices, its
backward pass for those of later ones. They are passes of one stage, and so of one rank, so it is enough to
check that the rank's order obeys them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from wlb_titan.arrays import Floats
from wlb_titan.dimensions.degrees import own_dimensions
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.rank import RankMemory
from wlb_titan.packing import slices
from wlb_titan.packing.predicted import pass_seconds, replica_memory
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import PREFIX, TOTAL, Action, Flow, MicroBatch, Plan
from wlb_titan.simulator.measured import MeasuredPasses, Pass


class StepPasses(NamedTuple):
    """The passes of a planned step, in runs of n micro-batches through the pipeline; k is data-parallel
    ranks x runs of each."""

    times: PassTimes  # arrays (stages, n, k)
    delays: Floats  # float64 (n, k), seconds of a micro-batch's data from one pipeline rank to the next
    runs: int  # of a data-parallel rank, one after the other

    def of(self, dp_rank: int) -> PassTimes:
        k = slice(dp_rank * self.runs, (dp_rank + 1) * self.runs)
        return PassTimes(*(array[..., k] for array in self.times))


def step_passes(job: Job, plan: Plan, measured: MeasuredPasses | None = None) -> StepPasses:
    """As predicted, or as `measured`."""
    packs = plan.micro_batches
    per_replica = len(packs) // job.replicas
    run = (
        job.per_run if job.per_run and plan.flows is None else per_replica
    )  # MicroPacks go through in one run
    seconds = pass_seconds(job, packs) if measured is None else measured.seconds
    times = PassTimes(*seconds.reshape(*seconds.shape[:2], -1, run).swapaxes(2, 3))
    if measured is None:
        times = with_dimensions(job, times)
    runs = per_replica // run
    if job.degrees.pipeline == 1 and job.degrees.shard > 1:
        # Every replica of a shard group waits for the slowest, micro-batch by micro-batch. Shards are the
        # inner data-parallel ranks.
        arrays = np.stack(times)
        groups = arrays.reshape(*arrays.shape[:3], -1, gcd(job.degrees.shard, job.replicas), runs)
        most = groups.max(axis=4, keepdims=True)
        times = PassTimes(*np.broadcast_to(most, groups.shape).reshape(arrays.shape))
    tokens = np.array([m.length for m in packs], dtype=np.float64).reshape(-1, run).T
    return StepPasses(times, transfer_seconds(job, tokens), runs)


def with_dimensions(job: Job, times: PassTimes) -> PassTimes:
    for dimension in own_dimensions(job.degrees.own):
        times = dimension.passes(job, times)
    return times


def transfer_seconds(job: Job, tokens: Floats) -> Floats:
    """Seconds that micro-batches of these tokens take from one pipeline rank to the next."""
    if job.degrees.pipeline == 1:
        return np.zeros_like(tokens)
    inner = job.degrees.tensor * job.degrees.context
    link = job.cluster.link(2, job.degrees.strides["pp"])
    # One pair of ranks: its own network card, without the neighbours of a ring.
    bandwidth = link.bandwidth if link == job.cluster.node else job.cluster.network.bandwidth
    return tokens * (job.model.hidden * job.memory.compute_bytes / inner / bandwidth) + link.latency


def step_ends(job: Job, plan: Plan, passes: StepPasses) -> list[tuple[PipelineGraph, Floats]]:
    """For each data-parallel rank the graph of its actions, and float64 (actions, runs), when they end."""
    if plan.flows is None:
        graph = PipelineGraph(job.shape, len(passes.delays))
        ends = graph.ends(passes.times, passes.delays).reshape(len(graph.actions), -1, passes.runs)
        return [(graph, ends[:, rank]) for rank in range(job.replicas)]
    replicas = replicas_of(job, plan, passes)
    return [
        (r.graph, ends[:, None]) for r, ends in zip(replicas, ends_with_shared_passes(replicas), strict=True)
    ]


class Replica(NamedTuple):
    """One data-parallel rank in a step with an order of its own."""

    graph: PipelineGraph
    times: PassTimes  # arrays (stages, n, 1)
    delays: Floats  # float64 (n, 1)
    micro_batches: Sequence[MicroBatch]  # by the `place` of its actions

    def ends(self, earliest: Floats) -> Floats:
        """float64 (actions,), when each action ends if none begins before its `earliest`."""
        return np.asarray(self.graph.ends(self.times, self.delays, earliest[:, None])[:, 0])


def replicas_of(job: Job, plan: Plan, passes: StepPasses) -> list[Replica]:
    assert plan.flows is not None
    replicas = []
    for rank, flow in enumerate(plan.flows):
        packs = plan.of_rank(rank)
        graph = PipelineGraph(job.shape, len(packs), flow, check_slices(flow, packs))
        replicas.append(Replica(graph, passes.of(rank), passes.delays[:, [rank]], packs))
    return replicas


SETTLED = 1e-9  # of a step's time: less is no change


def ends_with_shared_passes(replicas: Sequence[Replica]) -> list[Floats]:
    """For each replica of a step float64 (actions,), when its actions end; shared passes begin together."""
    earliest = [np.zeros(len(replica.graph.actions)) for replica in replicas]
    finish = [replica.ends(not_before) for replica, not_before in zip(replicas, earliest, strict=True)]
    shared = _shared_passes(replicas)
    if not shared:
        return finish
    seconds = [
        np.array([float(replica.times.of(action)[0]) for action in replica.graph.actions])
        for replica in replicas
    ]
    while True:
        later = set()
        tolerance = SETTLED * max(float(ends.max()) for ends in finish)
        for places in shared:
            begin = max(finish[rank][number] - seconds[rank][number] for rank, number in places)
            for rank, number in places:
                if begin > finish[rank][number] - seconds[rank][number] + tolerance:
                    earliest[rank][number] = begin
                    later.add(rank)
        if not later:
            return finish
        for rank in later:
            finish[rank] = replicas[rank].ends(earliest[rank])


def _shared_passes(replicas: Sequence[Replica]) -> list[list[tuple[int, int]]]:
    """For each shared pass its ranks, and its number in the graph of each."""
    passes: dict[tuple[int, Action], list[tuple[int, int]]] = {}
    for rank, replica in enumerate(replicas):
        for number, action in enumerate(replica.graph.actions):
            if merged := replica.micro_batches[action.place].merged:
                passes.setdefault((merged.start, action), []).append((rank, number))
    return list(passes.values())


def rank_memory(job: Job, plan: Plan, dp_rank: int) -> tuple[RankMemory, ...]:
    flow = None if plan.flows is None else plan.flows[dp_rank]
    return replica_memory(job.fitting, plan.of_rank(dp_rank), flow)


def peak_memory(job: Job, plans: Sequence[Plan]) -> tuple[RankMemory, ...]:
    """The largest peak of each pipeline rank over all replicas and plans."""
    peaks = [rank_memory(job, plan, rank) for plan in plans for rank in range(job.replicas)]
    return tuple(fullest(ranks) for ranks in zip(*peaks, strict=True))


def check_slices(flow: Flow, packs: Sequence[MicroBatch]) -> dict[int, int]:
    """Checks the edges between slices; returns the place of the last forward pass that each backward pass, by
    its place, waits for."""
    behind = [place for place, pack in enumerate(packs) if pack.passes != "F"]
    needed = dict(zip(behind, slices.last_needed(packs).tolist(), strict=True))
    chains: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for place, (pack, pieces) in enumerate(zip(packs, slices.piece_numbers(packs), strict=True)):
        assert pack.slices is not None
        cut = pack.slices[:, TOTAL] > pack.lengths
        for piece, prefix in zip(pieces[cut].tolist(), pack.slices[cut, PREFIX].tolist(), strict=True):
            for kind in pack.passes:
                chains.setdefault((kind, piece), []).append((prefix if kind == "F" else -prefix, place))
    ordered = [[(kind, place) for _, place in sorted(chain)] for (kind, _), chain in chains.items()]
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


def step_timeline(job: Job, plan: Plan, name: str = "step", dp_rank: int | None = None) -> list[Pass]:
    """The predicted passes of one replica, by default the slowest, in a picture of this name."""
    passes = step_passes(job, plan)
    of_replicas = step_ends(job, plan, passes)
    if dp_rank is None:
        dp_rank = int(np.argmax([ends.max(axis=0).sum() for _, ends in of_replicas]))
    graph, ends = of_replicas[dp_rank]
    begins = np.cumsum(ends.max(axis=0)) - ends.max(axis=0)
    times, micro_batches = passes.of(dp_rank), plan.of_rank(dp_rank)
    n = len(micro_batches) // passes.runs
    drawn = []
    for rank in range(job.degrees.pipeline):
        numbers = [i for i, a in enumerate(graph.actions) if job.shape.rank_of(a.stage) == rank]
        for run, begin in enumerate(begins.tolist()):
            for number in numbers:
                action, end = graph.actions[number], float(ends[number, run])
                seconds = float(times.of(action)[run])
                place, start = run * n + action.place, begin + end - seconds
                what = action.kind, action.stage, place, start, seconds, name, f"pp {rank}"
                drawn.append(Pass(*what, facts=facts_of(micro_batches[place])))
    return drawn


def facts_of(micro_batch: MicroBatch) -> dict[str, Any]:
    """What pictures tell of a pass's micro-batch."""
    facts: dict[str, Any] = {
        "tokens": micro_batch.length,
        "documents": len(micro_batch.documents),
        "sharding": micro_batch.sharding or "none",
        "predicted_work": micro_batch.workload,
    }
    if micro_batch.slices is not None:
        facts["MicroPack"] = slices.kind(micro_batch)
        lengths = micro_batch.lengths.tolist()
        if cut := ", ".join(
            f"{prefix}-{prefix + length} of {total}"
            for length, (prefix, total) in zip(lengths, micro_batch.slices.tolist(), strict=True)
            if total > length
        ):
            facts["slice"] = cut
    if merged := micro_batch.merged:
        facts["merged"] = f"dp {merged[0]}-{merged[-1]}"
    return facts
