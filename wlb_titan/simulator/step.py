"""The time of a step: its pipeline, the slowest data-parallel replica, and what data parallelism adds.

docs/simulator.md says which communication counts. Where FSDP shards without a pipeline, replicas meet in
every layer of every micro-batch, so that the slowest k-th micro-batch of all counts for each k; else they
wait for the slowest at the end. The user's own dimensions ([[wlb.dimensions]]) may change the times of
passes, and their ranks may meet in some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.models import rank_parameters
from wlb_titan.dimensions.degrees import own_dimensions
from wlb_titan.dimensions.dimension import Dimension, Meeting
from wlb_titan.job import Job
from wlb_titan.layers.passes import Loads, pass_times
from wlb_titan.memory.fits import fullest
from wlb_titan.memory.mix import shares
from wlb_titan.memory.rank import GIB, RankMemory
from wlb_titan.packing.predicted import part_seconds
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.plan import Plan
from wlb_titan.simulator.measured import MeasuredPasses
from wlb_titan.simulator.replicas import (
    peak_memory,
    step_ends,
    step_passes,
    transfer_seconds,
    with_dimensions,
)

OPTIMIZER_READS_AND_WRITES = 7  # weight, gradient and two moments in, weight and two moments out


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times and memory of some steps; arrays are (steps,), times in seconds."""

    seconds: Floats
    pipeline: Floats  # of the slowest replica
    communication: Floats  # gathering and gradient reduction that is not hidden
    optimizer: Floats
    busy: Floats  # computing or communicating within passes, on the average rank
    tokens: Ints  # of documents
    flops: Floats  # of the model, without recomputation
    memory: tuple[RankMemory, ...]  # the peak of each pipeline rank over all steps and replicas
    longest: int  # tokens of the longest document
    kinds: dict[str, float]  # share of all layers and micro-batches that are recomputed in each way
    job: Job
    plans: Sequence[Plan]

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def flops_per_second(self) -> float:
        """Of all GPUs together."""
        return float(self.flops.sum() / self.seconds.sum())

    @property
    def mfu(self) -> float:
        return self.flops_per_second / (self.job.cluster.peak_flops * self.job.degrees.ranks)

    @property
    def bubble(self) -> float:
        """Share of the time in which a rank waits, on average."""
        return 1 - float(self.busy.sum() / self.seconds.sum())

    def parts(self) -> dict[str, float]:
        """Seconds of a step on the average rank by what they go to, which add up to the mean of `seconds` as
        predicted: within passes as of `part_seconds`, and the rest."""
        each = [_parts(self.job, plan) for plan in self.plans]
        result = {name: float(np.mean([of[name] for of in each])) for name in each[0]}
        result["waiting for replicas"] += float(np.mean(self.pipeline)) - result.pop("pipeline")
        numbers = np.array([plan.iteration + 1 for plan in self.plans])
        met = float(np.mean(_met(self.job, numbers)))
        result["own dimensions"] += met
        result["data parallelism"] = float(np.mean(self.communication)) - met
        result["optimizer"] = float(np.mean(self.optimizer))
        return result

    def figures(self) -> dict[str, str]:
        """Headings and cells that every table of predictions has."""
        repeated = [f"{name} {share:.1%}" for name, share in self.kinds.items() if name != "none" and share]
        return {
            "step, s": f"{self.seconds.mean():.3f}",
            "tokens/s": f"{self.tokens_per_second:,.0f}",
            "MFU": f"{self.mfu:.1%}",
            "bubble": f"{self.bubble:.1%}",
            "peak GiB": f"{self.peak_memory.total / GIB:.1f}" + ("" if self.fits else " !"),
            "recomputed": ", ".join(repeated) or "none",
        }

    @property
    def peak_memory(self) -> RankMemory:
        return fullest(self.memory)

    @property
    def fits(self) -> bool:
        """Whether memory suffices, as far as is known."""
        return not self.job.memory_known or self.peak_memory.total <= self.job.fitting.usable

    @property
    def extrapolated(self) -> str | None:
        """A warning if attention is predicted for longer documents than were measured."""
        measured = self.job.latency.measured_to
        if measured is None or self.longest <= measured:
            return None
        return (
            f"Attention was measured up to {measured:,} keys ({self.job.latency.source}) and documents have "
            f"up to {self.longest:,} tokens: these times are extrapolated."
        )


def simulate(job: Job, plans: Sequence[Plan], measured: Sequence[MeasuredPasses] | None = None) -> Prediction:
    """Predicts steps from their plans, with what was measured of each where that is given."""
    measurements: Sequence[MeasuredPasses | None] = measured or [None] * len(plans)
    steps = [_step(job, plan, passes) for plan, passes in zip(plans, measurements, strict=True)]
    of_ranks, busy, communication = (np.array(column) for column in zip(*steps, strict=True))
    numbers = np.array([plan.iteration + 1 for plan in plans])
    pipeline = seconds_with_meetings(job, of_ranks, numbers)
    communication += _met(measured[0].rest if measured else job, numbers)
    optimizer = np.array([passes.optimizer if passes else _optimizer(job) for passes in measurements])
    lengths = [plan.document_lengths for plan in plans]
    mixes = [m.mix for plan in plans for m in plan.micro_batches if m.mix is not None]
    return Prediction(
        seconds=pipeline + communication + optimizer,
        pipeline=pipeline,
        communication=communication,
        optimizer=optimizer,
        busy=busy + optimizer,
        tokens=np.array([plan.tokens for plan in plans]),
        flops=np.array([job.model.flops(documents) for documents in lengths]),
        memory=peak_memory(job, plans),
        longest=max(int(documents.max()) for documents in lengths),
        kinds=shares(mixes) if mixes else {job.memory.checkpointing: 1.0},
        job=job,
        plans=plans,
    )


def _parts(job: Job, plan: Plan) -> dict[str, float]:
    """Seconds of the average rank in a step's pipeline, by part, and of the mean replica's "pipeline"."""
    passes = step_passes(job, plan)
    ends = step_ends(job, plan, passes)

    def busy(times: PassTimes) -> float:
        of_ranks = enumerate(ends), passes._replace(times=times)
        return float(np.mean([graph.busy(of_ranks[1].of(rank)).sum() for rank, (graph, _) in of_ranks[0]]))

    def in_runs(seconds: Floats) -> PassTimes:
        return PassTimes(*seconds.reshape(*seconds.shape[:2], -1, len(passes.delays)).swapaxes(2, 3))

    seconds = part_seconds(job, plan.micro_batches)
    own = in_runs(np.sum(list(seconds.values()), axis=0))
    parts = {name: busy(in_runs(of_part)) for name, of_part in seconds.items()}
    alone, changed, met = busy(own), busy(with_dimensions(job, own)), busy(passes.times)
    parts |= {"own dimensions": changed - alone, "waiting for replicas": met - changed}
    parts = {name: of_part / job.degrees.pipeline for name, of_part in parts.items()}
    pipeline = float(np.mean([of_rank.max(axis=0).sum() for _, of_rank in ends]))
    return parts | {"waiting in the pipeline": pipeline - met / job.degrees.pipeline, "pipeline": pipeline}


def _met(job: Job, numbers: Ints) -> Floats:
    """float64 (steps,), seconds in which ranks of the user's own dimensions meet in these steps."""
    met = [seconds * (numbers % dim.every == 0) for dim, _, seconds in meetings(job)]
    return np.asarray(np.sum([np.zeros(len(numbers)), *met], axis=0))


def _step(job: Job, plan: Plan, measured: MeasuredPasses | None) -> tuple[Floats, float, float]:
    """Seconds: float64 (data-parallel ranks,), of each one's pipeline; in which a rank is busy, on average;
    and of communication that is not hidden, on the replica that waits least for others."""
    passes = step_passes(job, plan, measured)
    ends = step_ends(job, plan, passes)
    seconds = np.array([of_rank.max(axis=0).sum() for _, of_rank in ends])
    busy = [graph.busy(passes.of(rank)).mean(axis=0).sum() for rank, (graph, _) in enumerate(ends)]
    exposed = _communication(job if measured is None else measured.rest, passes.times)
    return seconds, float(np.mean(busy)), float(exposed.reshape(-1, passes.runs).sum(axis=1).min())


def step_seconds(job: Job, passing: Loads) -> float:
    """Seconds of a step in which each replica has these micro-batches, arrays (n, 1), in one pipeline run."""
    times = with_dimensions(job, pass_times(job, passing))
    ends = PipelineGraph(job.shape, len(passing.tokens)).ends(times, transfer_seconds(job, passing.tokens))
    seconds = ends.max() + _communication(job, times)[0] + _optimizer(job)
    return float(seconds + sum(each / dim.every for dim, _, each in meetings(job)))


def _communication(job: Job, times: PassTimes) -> Floats:
    """float64 (k,), seconds of data-parallel communication that is not hidden, on each run's slowest rank."""
    if job.degrees.sharding_ranks * job.degrees.replicate == 1:
        return np.zeros(times.forward.shape[2])
    # The stages of a rank communicate one by one.
    of_ranks = [
        np.sum([_exposed(job, times, stage) for stage in job.shape.stages_of(rank)], axis=0)
        for rank in range(job.degrees.pipeline)
    ]
    return np.asarray(np.max(of_ranks, axis=0))


def _exposed(job: Job, times: PassTimes, stage: int) -> Floats:
    """float64 (k,), seconds of one stage's communication that no pass hides."""
    gather, reduce = _gather_and_reduce(job, stage)
    in_forward = np.zeros(times.forward.shape[1:])  # of the k-th micro-batch to pass a stage
    in_backward = np.zeros_like(in_forward)
    if job.degrees.pipeline > 1:
        in_forward[0], in_backward[-1] = gather, reduce
    else:
        in_forward[:], in_backward[:] = gather, reduce
    if job.memory.reshards(job.degrees):
        in_forward[:] = gather
        in_backward += gather
    if not job.overlap:
        return np.asarray(in_forward.sum(axis=0) + in_backward.sum(axis=0))
    layers = max(job.layers[stage], 1)
    in_forward[0] -= gather / layers
    in_backward[-1] -= reduce / layers
    forward, backward = times.forward[stage], times.inputs[stage] + times.weights[stage]
    beyond = np.maximum(in_forward - forward, 0) + np.maximum(in_backward - backward, 0)
    return np.asarray(beyond.sum(axis=0) + (gather + reduce) / layers)


def _gather_and_reduce(job: Job, stage: int) -> tuple[float, float]:
    """Seconds of gathering the weights of a stage, and of reducing their gradients.

    There is a collective for each layer, and one for embedding, last norm and head if the stage has them.
    Under expert parallelism a layer's experts have their own, over the ranks that hold the same ones.
    """
    degrees, layers = job.degrees, job.layers[stage]
    everything = rank_parameters(job.model, job.layers, [stage])
    experts = layers * job.model.expert_weights if degrees.expert > 1 else 0
    groups = layers + (stage in (0, len(job.layers) - 1))
    gather, reduce = _collectives(
        job, (everything - experts) / degrees.tensor, groups, degrees.sharding_ranks, degrees.strides["cp"]
    )
    if experts:
        sharing = degrees.tensor * degrees.sharding_ranks // degrees.expert
        more = _collectives(job, experts / degrees.expert, layers, sharing, degrees.expert)
        gather, reduce = gather + more[0], reduce + more[1]
    return gather, reduce


def _collectives(job: Job, weights: float, groups: int, ranks: int, stride: int) -> tuple[float, float]:
    """Seconds of gathering and of reducing `weights` in groups, over `ranks` that are `stride` apart."""
    if not groups:
        return 0.0, 0.0
    settings, replicate = job.memory, job.degrees.replicate
    group_weights = weights / groups
    shards = job.cluster.link(ranks, stride)
    between = job.degrees.link(job.cluster, "dp_replicate")
    gather = shards.collective(group_weights * settings.compute_bytes, ranks)
    reduce = shards.collective(group_weights * settings.parameter_bytes, ranks)
    reduce += 2 * between.collective(group_weights * settings.parameter_bytes / ranks, replicate)
    return groups * gather, groups * reduce


def _optimizer(job: Job) -> float:
    """Seconds of AdamW on the rank with the most weights, bound by memory bandwidth."""
    bytes_ = own_weights(job) * job.memory.parameter_bytes
    return bytes_ * OPTIMIZER_READS_AND_WRITES / job.cluster.memory_bandwidth


def own_weights(job: Job, rank: int | None = None) -> float:
    """Number of weights on a GPU of a pipeline rank; None: of the one with the most."""
    ranks = range(job.degrees.pipeline) if rank is None else [rank]
    most = max(rank_parameters(job.model, job.layers, job.shape.stages_of(number)) for number in ranks)
    return most / job.degrees.tensor / job.degrees.sharding_ranks


def seconds_with_meetings(job: Job, seconds: Floats, numbers: Ints) -> Floats:
    """Seconds of each step when data-parallel ranks wait for each other only in steps in which they meet.

    Args:
        seconds: float64 (steps, data-parallel ranks).
        numbers: int64 (steps,), of the steps, from 1.

    Returns:
        float64 (steps,); their sum is when the last rank is done.
    """
    apart = [dim for dim in own_dimensions(job.degrees.own) if dim.divides == "data"]
    if not apart:
        return np.asarray(seconds.max(axis=1))
    by_rank = seconds.reshape(len(seconds), *(dim.degree for dim in apart), -1).max(axis=-1)
    clock, ends = np.zeros(by_rank.shape[1:]), []
    for number, of_step in zip(numbers, by_rank, strict=True):
        clock = clock + of_step
        for axis, dim in enumerate(apart):
            if number % dim.every == 0:
                clock = np.broadcast_to(clock.max(axis=axis, keepdims=True), clock.shape)
        ends.append(clock.max())
    return np.diff(ends, prepend=0.0)


def meetings(job: Job, rank: int | None = None) -> list[tuple[Dimension, Meeting, float]]:
    """What the ranks of the user's own dimensions all-reduce when they meet, and its seconds, on a pipeline
    rank or on the one with the most weights."""
    timed = []
    for dim in own_dimensions(job.degrees.own):
        if dim.degree > 1 and (met := dim.meeting(job, own_weights(job, rank))) is not None:
            link = job.degrees.link(job.cluster, dim.axis)
            seconds = 2 * link.collective(met.bytes_ / max(met.collectives, 1), dim.degree)
            timed.append((dim, met, met.collectives * seconds))
    return timed
