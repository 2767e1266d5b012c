"""What layers keep, compute and send by the model's own account, where no formula knows them.

`runtime/one_rank/layer_trace.py` takes the account from a trace, once for each `Shape` of a job. It consists
of plain numbers, for each token of a micro-batch (on all context-parallel ranks together) on one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wlb_titan.context.strategy import ALL_KEYS, KeyShares


class Shape(NamedTuple):
    """How a job divides a layer: what the account depends on, besides model and settings."""

    tensor: int
    context: int
    expert: int
    attention: str = ""  # of the context-parallel strategy (`ContextStrategy.attention`), above degree 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one pass of a layer does for a token."""

    products: float  # FLOPs
    elements: float  # bytes that element-wise operators read and write, one after the other
    fused: float  # the same in compiled code
    sent: Mapping[str, float]  # bytes of collectives, the larger of input and output, by axis of the mesh

    def __sub__(self, other: Work) -> Work:
        sent = {axis: bytes_ - other.sent.get(axis, 0.0) for axis, bytes_ in self.sent.items()}
        return Work(
            products=self.products - other.products,
            elements=self.elements - other.elements,
            fused=self.fused - other.fused,
            sent=sent,
        )


class KindBytes(NamedTuple):
    """A layer's bytes under one kind of recomputation, as of `TokenBytes`."""

    kept: float
    forward: float
    backward: float
    attention: float


class Weights(NamedTuple):
    """Numbers of weights, of all ranks and as this rank gathers them, after tensor and expert parallelism."""

    all: int
    gathered: int
    trained: int  # of `all`
    gradients: int  # those of `gathered` that are trained
    matrix: int  # the largest one of `gradients`
    tables: float  # bytes of buffers, such as rotary factors, for each position of the window


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAccount:
    """One layer, as all of its configuration."""

    weights: Weights
    forward: Work
    backward: Work  # under `none`
    weight_products: float  # FLOPs of weights' gradients, within `backward`
    kinds: Mapping[str, KindBytes]  # by the names of `recompute.KINDS`
    routed: Mapping[str, KindBytes]  # more of them where the rank's experts get twice their share
    repeated: Mapping[str, Work]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAccount:
    """All layers of a model in one shape."""

    layers: tuple[LayerAccount, ...]  # one of each configuration
    numbers: tuple[int, ...]  # of the model's layers in order: the place of each in `layers`
    ends: tuple[Weights, Weights]  # of the embedding, and of head and last norm; a tied table is the first's
    keys: KeyShares = ALL_KEYS  # of the micro-batch that was traced

    def of_stage(self, layers: Sequence[int], stage: int) -> list[LayerAccount]:
        """Those of a stage, in order, where stages have so many layers."""
        first = sum(layers[:stage])
        return [self.layers[number] for number in self.numbers[first : first + layers[stage]]]
