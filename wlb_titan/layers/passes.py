"""The time of a micro-batch's passes on a pipeline stage; docs/simulator.md says what counts.

    F = layers x (c + tokens x (matrices + elements + TP + CP + EP) + attention of the slowest CP rank) + head
    I = layers x (c + tokens x (matrices + 2 elements + TP + CP + EP) + attention backward + repeated) + head
    W = layers x tokens x matrices + head, or nothing where weights are frozen

The constants c are those of a profile that was fitted to a run (`simulator/calibrate.py`), or else 0. A
backward pass multiplies twice as much as a forward pass: for the gradients of inputs (I) and of weights (W).
Activation checkpointing repeats part of the forward pass (`recompute.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.cost.workload import CostModel
from wlb_titan.layers.rates import EXPERT_COLLECTIVES, TENSOR_COLLECTIVES, Rates
from wlb_titan.layers.recompute import KINDS
from wlb_titan.pipeline.graph import PassTimes


@dataclass(frozen=True, slots=True)
class Loads:
    """What the passes of one job's micro-batches follow from (shared ones: of `Rates.shared`); float64
    arrays of one shape, attention's perhaps for each stage."""

    tokens: Floats  # with padding
    forward: Floats
    """(stages, ...) or for all, seconds of one layer's attention on the slowest context-parallel rank."""
    backward: Floats
    moving: Floats  # seconds of context parallelism in one layer, as in `ExchangeSeconds`
    repeated: Floats
    latency: Floats
    mix: Floats | None = None
    """(stages, kinds of recomputation, ...), layers of each kind; None: all are of the job's."""
    beside: Floats | None = None
    """(2, stages, ...), seconds of the exchange that run beside a layer's attention, forward and backward."""

    @property
    def hidden(self) -> tuple[Floats | float, Floats | float]:
        return (0.0, 0.0) if self.beside is None else (self.beside[0], self.beside[1])

    @classmethod
    def imagined(cls, rates: Rates, tokens: Floats, forward: Floats, backward: Floats) -> Loads:
        """Micro-batches of unknown documents, where only what always moves travels."""
        always = rates.exchanging.always
        moving, repeated = tokens * always.moving, tokens * always.repeated
        return cls(tokens, forward, backward, moving, repeated, np.zeros_like(tokens) + always.latency)

    def in_runs(self, n: int) -> Loads:
        """As arrays (n, k): k runs of n micro-batches in order."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return Loads(
            **{
                name: array.reshape(*array.shape[:-1], -1, n).swapaxes(-1, -2)
                for name, array in arrays.items()
                if array is not None
            }
        )


def pass_times(rates: Rates, micro_batches: Loads) -> PassTimes:
    """Seconds, float64 (stages, n, k), of micro-batches as arrays (n, k): k runs of n in order."""
    token, tokens, layer = rates.token, micro_batches.tokens, rates.layer_seconds
    hidden = micro_batches.hidden

    def by_stage(seconds: Floats) -> Floats:
        return seconds.reshape(-1, *[1] * tokens.ndim)

    forward = _forward(rates, micro_batches)
    back = by_stage(layer.inputs - layer.matrices + layer.elements_back - layer.elements)
    attended, back_again = micro_batches.forward - hidden[0], micro_batches.backward - hidden[1]
    backward = forward - attended + tokens * back + back_again
    layers = by_stage(np.array(rates.layers, dtype=np.float64))
    if micro_batches.mix is None:
        kind = KINDS.index(rates.repeating)
        repeated = layers * _repeated(rates, kind, micro_batches, forward)
    else:
        repeated = (micro_batches.mix * repeated_seconds(rates, micro_batches)).sum(axis=1)
    head = np.zeros_like(layers)
    head[-1] = token.head
    return PassTimes(
        forward=layers * (forward + token.layer[0]) + head * tokens,
        inputs=layers * (backward + token.layer[1]) + repeated + head * tokens,
        weights=layers * tokens * by_stage(layer.weights) + head * tokens * (not rates.model.frozen),
    )


def repeated_seconds(rates: Rates, micro_batches: Loads) -> Floats:
    """float64 (stages, kinds, ...), what a layer of each kind of recomputation repeats."""
    forward = _forward(rates, micro_batches)
    each = [_repeated(rates, number, micro_batches, forward) for number in range(len(KINDS))]
    return np.stack(each, axis=1)


def _repeated(rates: Rates, number: int, micro_batches: Loads, forward: Floats) -> Floats:
    """float64 (stages, ...), what a layer of a kind repeats; `forward` are seconds of its forward pass."""
    kind, tokens = KINDS[number], micro_batches.tokens
    if kind.repeats_all:
        return forward
    linear = rates.layer_seconds.repeated[:, number].reshape(-1, *[1] * tokens.ndim)
    return np.asarray(linear * tokens + kind.repeats_moves * micro_batches.repeated)


def _forward(rates: Rates, micro_batches: Loads) -> Floats:
    """float64 (stages, ...), seconds of a layer's forward pass."""
    layer, links = rates.layer_seconds, sum(_latencies(rates)) + micro_batches.latency
    each = layer.matrices + layer.elements + (layer.tensor + layer.experts)
    linear = micro_batches.tokens * each.reshape(-1, *[1] * micro_batches.tokens.ndim) + links
    return np.asarray(linear + (micro_batches.forward - micro_batches.hidden[0] + micro_batches.moving))


def _latencies(rates: Rates) -> tuple[float, float]:
    """Latencies of a layer's collectives in one pass: of tensor and of expert parallelism."""
    tensor, expert = rates.degrees.tensor, rates.degrees.expert
    of_tensor = (1 - rates.tensor_overlap) * TENSOR_COLLECTIVES * rates.cluster.link(tensor).latency
    of_experts = EXPERT_COLLECTIVES * rates.cluster.link(expert).latency
    return of_tensor * (tensor > 1), of_experts * (expert > 1 and rates.model.visits > 0)


def pass_parts(rates: Rates, micro_batches: Loads) -> dict[str, Floats]:
    """The parts of `pass_times`, float64 (3, stages, ...) each, which add up to it."""
    times, tokens = np.stack(pass_times(rates, micro_batches)), micro_batches.tokens
    layer = rates.layer_seconds
    layers = np.array(rates.layers, dtype=np.float64).reshape(-1, *[1] * tokens.ndim)
    (tensor, experts), hidden = _latencies(rates), micro_batches.hidden
    exchange = micro_batches.moving + micro_batches.latency

    def of(*passes: Floats | float) -> Floats:
        """Of one layer forward, of gradients of inputs and of weights."""
        each = (*passes, 0.0)[:3]
        return np.stack([np.zeros_like(times[0]) + layers * seconds for seconds in each])

    def each(of_token: Floats) -> Floats:
        return of_token.reshape(-1, *[1] * tokens.ndim) * tokens

    head = np.zeros_like(times)
    head[:, -1] = rates.token.head * tokens
    head[2] *= not rates.model.frozen
    parts = {
        "attention": of(micro_batches.forward, micro_batches.backward),
        "products": of(each(layer.matrices), each(layer.inputs), each(layer.weights)),
        "element-wise": of(each(layer.elements), each(layer.elements_back)),
        "head": head,
        "tensor parallelism": of(*[each(layer.tensor) + tensor] * 2),
        "context parallelism": of(exchange - hidden[0], exchange - hidden[1]),
        "experts' exchange": of(*[each(layer.experts) + experts] * 2),
        "launches": of(*rates.token.layer),
    }
    return parts | {"recomputed": np.asarray(times - sum(parts.values()))}


class JobCost(CostModel):
    """A document's seconds in the simulator, of all layers on one rank of each stage. W_a is its attention,
    shared equally by context-parallel ranks; W_l all that grows with tokens."""

    recomputes = True

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        linear, still = (
            pass_times(rates, Loads.imagined(rates, np.full((1, 1), tokens), *np.zeros((2, 1, 1))))
            for tokens in (2.0, 1.0)
        )
        self._linear_forward = (linear.forward - still.forward).sum()
        self._linear_backward = (linear.inputs - still.inputs + linear.weights - still.weights).sum()

    @classmethod
    def of(cls, config: CostModel.Config, rates: Rates) -> JobCost:
        return cls(rates)

    def forward(self, lengths: NDArray[Any]) -> Floats:
        return np.asarray(self.passes(lengths)[0])

    def backward(self, lengths: NDArray[Any]) -> Floats:
        return np.asarray(self.passes(lengths)[1])

    def passes(self, lengths: NDArray[Any]) -> Floats:
        rates = self._rates
        attention = rates.latency.work(lengths, lengths) / rates.degrees.context
        d, layers = np.asarray(lengths, dtype=np.float64), rates.model.layers
        again = rates.repeating.repeats_all
        forward = self._linear_forward * d + layers * attention[0]
        backward = self._linear_backward * d + layers * (attention[1] + again * attention[0])
        return np.stack([forward, backward])
