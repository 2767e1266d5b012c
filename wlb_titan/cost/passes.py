"""The time of a micro-batch's passes on a pipeline stage; docs/simulator.md says what counts.

    F = layers x (c + tokens x (matrices + elements + TP + CP + EP) + attention of the slowest CP rank) + head
    I = layers x (c + tokens x (matrices + 2 elements + TP + CP + EP) + attention backward + repeated) + head
    W = layers x tokens x matrices + head, or nothing where weights are frozen

The constants c are those of a profile that was fitted to a run (`simulator/calibrate.py`), or else 0. A
backward pass multiplies twice as much as a forward pass: for the gradients of inputs (I) and of weights (W).
Activation checkpointing repeats part of the forward pass (`memory/recompute.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.cost.told import LayerWork, ModelAccount, Work
from wlb_titan.cost.workload import CostModel
from wlb_titan.pipeline.graph import PassTimes

if TYPE_CHECKING:
    from wlb_titan.job import Job

TENSOR_COLLECTIVES = 4  # of a layer in each pass
EXPERT_COLLECTIVES = 2


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """What the passes of one job's micro-batches follow from (shared ones: of `Job.by_sharers`); float64
    arrays of one shape."""

    tokens: Floats  # with padding
    forward: Floats  # seconds of one layer's attention on the slowest context-parallel rank
    backward: Floats
    moving: Floats  # seconds of context parallelism in one layer, as in `ExchangeSeconds`
    repeated: Floats
    latency: Floats
    mix: Floats | None = None
    """(stages, kinds of recomputation, ...), layers of each kind; None: all are of the job's."""

    @classmethod
    def imagined(cls, job: Job, tokens: Floats, forward: Floats, backward: Floats) -> MicroBatches:
        """Micro-batches of unknown documents, where only what always moves travels."""
        always = job.exchanging.always
        moving, repeated = tokens * always.moving, tokens * always.repeated
        return cls(tokens, forward, backward, moving, repeated, np.zeros_like(tokens) + always.latency)

    def in_runs(self, n: int) -> MicroBatches:
        """As arrays (n, k): k runs of n micro-batches in order."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return MicroBatches(
            **{
                name: array.reshape(*array.shape[:-1], -1, n).swapaxes(-1, -2)
                for name, array in arrays.items()
                if array is not None
            }
        )


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of a layer for each token, float64 (stages,): the mean of a stage's layers; forward but for
    `inputs`, `weights` and `elements_back`."""

    matrices: Floats  # products
    inputs: Floats  # products for gradients of inputs
    weights: Floats  # and of weights
    elements: Floats  # element-wise operators
    elements_back: Floats
    collectives: Floats  # of tensor and expert parallelism
    repeated: Floats  # (stages, kinds), all but attention and its exchange

    @classmethod
    def of(cls, job: Job) -> LayerSeconds:
        if job.account is not None:
            return cls.told(job, job.account)
        token, ones = job.token, np.ones(len(job.layers))
        return cls(
            matrices=ones * token.matrices,
            inputs=ones * token.matrices,
            weights=ones * token.matrices * (not job.model.frozen),
            elements=ones * token.elements,
            elements_back=ones * 2 * token.elements,
            collectives=ones * (_tensor(job) + _experts(job)),
            repeated=np.outer(ones, [kind.seconds(job, _tensor(job)) for kind in job.memory.kinds]),
        )

    @classmethod
    def told(cls, job: Job, account: ModelAccount) -> LayerSeconds:
        cluster, degrees = job.measured_cluster, job.degrees
        numbers = [job.numbers_of_stage(stage) or (0,) for stage in range(len(job.layers))]
        products = 1 / cluster.linear_flops

        def mean(of_layer: Callable[[LayerWork], float]) -> Floats:
            each = [of_layer(layer.work) for layer in account.layers]
            return np.array([np.mean([each[number] for number in own]) for own in numbers])

        def elements(work: Work) -> float:
            return (work.fused if job.memory.compiled else work.elements) / cluster.memory_bandwidth

        def collectives(work: Work) -> float:
            moved = work.tensor * (degrees.tensor - 1) / degrees.tensor
            seconds = moved / cluster.link(degrees.tensor).bandwidth
            hidden = min(job.tensor_overlap * seconds, job.token.matrices)
            return seconds - hidden + cluster.all_to_all(work.expert, degrees.expert)

        def all_of(work: Work) -> float:
            return work.products * products + elements(work) + collectives(work)

        def repeated(kind: str) -> Floats:
            return mean(lambda layer: all_of(layer.kinds[kind].repeated))

        return cls(
            matrices=mean(lambda layer: products * layer.forward.products),
            inputs=mean(lambda layer: products * (layer.backward.products - layer.weight_products)),
            weights=mean(lambda layer: products * layer.weight_products),
            elements=mean(lambda layer: elements(layer.forward)),
            elements_back=mean(lambda layer: elements(layer.backward)),
            collectives=mean(lambda layer: collectives(layer.forward)),
            repeated=np.stack([repeated(kind.name) for kind in job.memory.kinds], axis=1),
        )


def pass_times(job: Job, micro_batches: MicroBatches) -> PassTimes:
    """Seconds, float64 (stages, n, k), of micro-batches as arrays (n, k): k runs of n in order."""
    token, tokens, layer = job.token, micro_batches.tokens, job.layer_seconds

    def by_stage(seconds: Floats) -> Floats:
        return seconds.reshape(-1, *[1] * tokens.ndim)

    forward = _forward(job, micro_batches)
    back = by_stage(layer.inputs - layer.matrices + layer.elements_back - layer.elements)
    backward = forward - micro_batches.forward + tokens * back + micro_batches.backward
    layers = by_stage(np.array(job.layers, dtype=np.float64))
    if micro_batches.mix is None:
        kind = job.memory.kinds.index(job.repeating)
        repeated = layers * _repeated(job, kind, micro_batches, forward)
    else:
        repeated = (micro_batches.mix * repeated_seconds(job, micro_batches)).sum(axis=1)
    head = np.zeros_like(layers)
    head[-1] = token.head
    return PassTimes(
        forward=layers * (forward + token.layer[0]) + head * tokens,
        inputs=layers * (backward + token.layer[1]) + repeated + head * tokens,
        weights=layers * tokens * by_stage(layer.weights) + head * tokens * (not job.model.frozen),
    )


def repeated_seconds(job: Job, micro_batches: MicroBatches) -> Floats:
    """float64 (stages, kinds, ...), what a layer of each kind of recomputation repeats."""
    kinds, forward = job.memory.kinds, _forward(job, micro_batches)
    each = [_repeated(job, number, micro_batches, forward) for number in range(len(kinds))]
    return np.stack(each, axis=1)


def _repeated(job: Job, number: int, micro_batches: MicroBatches, forward: Floats) -> Floats:
    """float64 (stages, ...), what a layer of a kind repeats; `forward` are seconds of its forward pass."""
    kind, tokens = job.memory.kinds[number], micro_batches.tokens
    if kind.repeats_all:
        return forward
    linear = job.layer_seconds.repeated[:, number].reshape(-1, *[1] * tokens.ndim)
    return np.asarray(linear * tokens + kind.repeats_moves * micro_batches.repeated)


def _forward(job: Job, micro_batches: MicroBatches) -> Floats:
    """float64 (stages, ...), seconds of a layer's forward pass."""
    layer, links = job.layer_seconds, _latencies(job) + micro_batches.latency
    each = layer.matrices + layer.elements + layer.collectives
    linear = micro_batches.tokens * each.reshape(-1, *[1] * micro_batches.tokens.ndim) + links
    return np.asarray(linear + (micro_batches.forward + micro_batches.moving))


def _tensor(job: Job) -> float:
    """Seconds a token that a layer waits for in one pass."""
    return job.token.tensor - min(job.tensor_overlap * job.token.tensor, job.token.matrices)


def _experts(job: Job) -> float:
    """Seconds a token of a layer's exchange in one pass."""
    model, degrees = job.model, job.degrees
    elements = model.visits * model.hidden / (degrees.context * degrees.tensor)
    bytes_ = elements * job.memory.compute_bytes
    return EXPERT_COLLECTIVES * job.cluster.all_to_all(bytes_, degrees.expert)


def _latencies(job: Job) -> float:
    """Latencies of a layer's collectives in one pass but for context parallelism's."""
    tensor, expert = job.degrees.tensor, job.degrees.expert
    seconds = 0.0
    if tensor > 1:
        seconds += (1 - job.tensor_overlap) * TENSOR_COLLECTIVES * job.cluster.link(tensor).latency
    if expert > 1 and job.model.visits:
        seconds += EXPERT_COLLECTIVES * job.cluster.link(expert).latency
    return seconds


class JobCost(CostModel):
    """A document's seconds in the simulator, of all layers on one rank of each stage. W_a is its attention,
    shared equally by context-parallel ranks; W_l all that grows with tokens."""

    recomputes = True

    def __init__(self, job: Job) -> None:
        self._job = job
        linear, still = (
            pass_times(job, MicroBatches.imagined(job, np.full((1, 1), tokens), *np.zeros((2, 1, 1))))
            for tokens in (2.0, 1.0)
        )
        self._linear_forward = (linear.forward - still.forward).sum()
        self._linear_backward = (linear.inputs - still.inputs + linear.weights - still.weights).sum()

    @classmethod
    def of(cls, config: CostModel.Config, job: Job) -> JobCost:
        return cls(job)

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return self._work(lengths)[0]

    def backward(self, lengths: NDArray[Any]) -> Floats:
        return self._work(lengths)[1]

    def _work(self, lengths: NDArray[Any]) -> tuple[Floats, Floats]:
        job = self._job
        attention = job.latency.work(lengths, lengths) / job.degrees.context
        d, layers = np.asarray(lengths, dtype=np.float64), job.model.layers
        again = job.repeating.repeats_all
        return (
            self._linear_forward * d + layers * attention[0],
            self._linear_backward * d + layers * (attention[1] + again * attention[0]),
        )
