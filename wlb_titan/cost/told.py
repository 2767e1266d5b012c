"""What layers keep, compute and send by the model's own account, where no formula knows them.

`runtime/one_rank/layer_trace.py` takes the account from a trace, once for each `Shape` of a job. It consists
of plain numbers, for each token of a micro-batch (on all context-parallel ranks together) on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """How a job divides a layer: what the account depends on, besides model and settings."""

    tensor: int
    context: int
    expert: int
    attention: str = ""  # of the context-parallel strategy (`ContextStrategy.attention`), above degree 1


class Work(NamedTuple):
    """What one pass of a layer does for a token."""

    products: float  # FLOPs
    elements: float  # bytes that element-wise operators read and write, one after the other
    fused: float  # the same in compiled code
    tensor: float  # bytes of tensor parallelism's collectives, the larger of input and output
    expert: float  # of expert parallelism's


class KindWork(NamedTuple):
    """A layer under one kind of recomputation: bytes as of `TokenBytes`, and what it does again."""

    kept: float
    forward: float
    backward: float
    attention: float
    gradients: float  # of weights, which are there at the fullest moment of the backward pass
    repeated: Work


class Weights(NamedTuple):
    """Numbers of weights, of all ranks and as this rank gathers them, after tensor and expert parallelism."""

    all: float
    gathered: float
    trained: float  # of `all`
    gradients: float  # those of `gathered` that are trained
    matrix: float  # of `gradients` the largest one, or those at a backward pass's fullest moment
    experts: float  # those of `gathered` in routed experts
    tables: float  # bytes of buffers, such as rotary factors, for each position of the window


class LayerWork(NamedTuple):
    """A layer's passes."""

    forward: Work
    backward: Work  # under `none`
    weight_products: float  # FLOPs of weights' gradients, within `backward`
    kinds: Mapping[str, KindWork]  # by the names of `recompute.KINDS`


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAccount:
    """One layer, as all of its configuration."""

    weights: Weights
    work: LayerWork  # where the experts of all ranks get equally many tokens
    uneven: LayerWork | None = None  # what is added where this rank's get twice as many

    def under(self, kinds: Sequence[str]) -> Weights:
        """The weights, with the gradients at a backward pass's fullest moment under any of these kinds."""
        return self.weights._replace(matrix=max(self.work.kinds[kind].gradients for kind in kinds))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAccount:
    """All layers of a model in one shape."""

    layers: tuple[LayerAccount, ...]  # one of each configuration
    numbers: tuple[int, ...]  # of the model's layers in order: the place of each in `layers`
    embedded: float  # bytes that the embedding keeps besides its output
    loss: tuple[float, float]  # as of `TokenBytes.loss` and `TokenBytes.head`
    ends: tuple[Weights, Weights]  # of the embedding, and of head and last norm; a tied table is the first's

    def at(self, experts: float) -> ModelAccount:
        """Where this rank's experts get so many times their share of the tokens."""
        layers = (
            replace(layer, work=_plus(layer.work, layer.uneven, experts - 1)) if layer.uneven else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def of_stage(self, layers: Sequence[int], stage: int) -> list[LayerAccount]:
        """Those of a stage, in order, where stages have so many layers."""
        first = sum(layers[:stage])
        return [self.layers[number] for number in self.numbers[first : first + layers[stage]]]


def _plus(work: Any, more: Any, times: float) -> Any:
    if isinstance(work, Mapping):
        return {name: _plus(value, more[name], times) for name, value in work.items()}
    if isinstance(work, tuple):
        return type(work)(*(_plus(*pair, times) for pair in zip(work, more, strict=True)))
    return work + times * more
