"""The workload of a document from the model's shape, the parallel degrees and the device's speed.

    W_a(d) = attention FLOPs / achieved FLOP/s
    W_l(d) = linear FLOPs / achieved FLOP/s + element-wise bytes / memory bandwidth + TP, CP communication

in seconds that one micro-batch of that one document takes on all pipeline stages together. The gradient
reduction of data parallelism and FSDP's gathers do not depend on documents; they are the same for every
micro-batch and left out, as is the pipeline's point-to-point traffic, which overlaps with computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.planner.cluster import Cluster, load_cluster
from wlb_titan.planner.degrees import Degrees

Floats = NDArray[np.float64]

BYTES = 2  # of an activation in bfloat16
ATTENTION_BACKWARD = 2.5  # matrix products of the backward pass over those of the forward pass: 5 / 2
LINEAR_BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A LLaMA-style decoder.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary: as usual; `feed_forward` is the
            inner width of the gated MLP, of a mixture of experts that of all experts which a token visits.
        unvisited_weights: of one layer's experts that a token does not visit.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    unvisited_weights: int = 0

    @property
    def linear_weights(self) -> int:
        """Weights that every token is multiplied with; the embedding's look-up is not among them."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.hidden * self.vocabulary

    def flops(self, lengths: NDArray[Any]) -> float:
        """FLOPs of forward and backward passes over documents of these lengths, without any recomputation.

        Attention counts the lower triangle of each document, which is what has to be computed; an MFU from it
        does not reward work on pairs of tokens that document masks leave out.
        """
        d = np.asarray(lengths, dtype=np.float64)
        linear = 2.0 * self.linear_weights * d.sum()
        attention = 2.0 * self.heads * self.head_dim * self.layers * (d * d).sum()
        return float(3.0 * (linear + attention))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a rank of a job achieves on this kind of work, not what data sheets promise.

    Attributes:
        attention_flops: achieved FLOP/s of causal attention, forward.
        attention_backward_flops: the same of the backward pass.
        linear_flops: achieved FLOP/s of matrix products.
        memory_bandwidth: bytes per second of element-wise operators.
        tensor_bandwidth: bytes per second of the links that tensor parallelism uses.
        context_bandwidth: of those that context parallelism uses.
    """

    attention_flops: float
    attention_backward_flops: float
    linear_flops: float
    memory_bandwidth: float
    tensor_bandwidth: float
    context_bandwidth: float

    @classmethod
    def of(cls, cluster: Cluster, *, tensor_parallel: int = 1, context_parallel: int = 1) -> Device:
        """A GPU of a cluster, with the links that its groups of these degrees have."""
        return cls(
            attention_flops=cluster.attention_flops,
            attention_backward_flops=cluster.attention_backward_flops,
            linear_flops=cluster.linear_flops,
            memory_bandwidth=cluster.memory_bandwidth,
            tensor_bandwidth=cluster.link(tensor_parallel).bandwidth,
            context_bandwidth=cluster.link(context_parallel, tensor_parallel).bandwidth,
        )


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Forward seconds that one token of a micro-batch adds to one rank, in one layer but for `head`.

    Attributes:
        matrices: matrix products.
        elements: element-wise operators.
        tensor: the collectives of tensor parallelism: all-gather and reduce-scatter, twice a layer.
        context: the all-gather of K and V.
        head: the matrix product with the vocabulary, on the last stage.
    """

    matrices: float
    elements: float
    tensor: float
    context: float
    head: float

    @classmethod
    def of(cls, shape: ModelShape, device: Device, tensor: int, context: int) -> TokenSeconds:
        """Args: the model, one of its ranks, and the degrees of tensor and context parallelism."""
        ranks = tensor * context
        head = shape.hidden * shape.vocabulary
        layer = (shape.linear_weights - head) // shape.layers
        # Reads and writes: two norms, two residuals, rotary embedding, gated activation.
        elements = 12 * shape.hidden + 4 * shape.heads * shape.head_dim + 3 * shape.feed_forward
        # Sequence-parallel TP gathers and scatters the activations twice a layer.
        shared = 4 * shape.hidden * (tensor - 1) / tensor / context
        gathered = 2 * shape.kv_heads * shape.head_dim / tensor * (context - 1) / context
        return cls(
            matrices=2.0 * layer / ranks / device.linear_flops,
            elements=BYTES * elements / ranks / device.memory_bandwidth,
            tensor=BYTES * shared / device.tensor_bandwidth,
            context=BYTES * gathered / device.context_bandwidth,
            head=2.0 * head / ranks / device.linear_flops,
        )


class Analytic:
    """`analytic`: seconds by counting operations.

    Example: the paper's 7B model with a document of 131072 tokens on one H100 without parallelism: attention
    2 x 131072^2 x 4096 x 32 FLOPs forward, 6.9 s at 650 TFLOP/s; linear layers 2 x 6.6e9 x 131072 FLOPs,
    2.9 s at 600 TFLOP/s.

    Args:
        shape: of the model.
        device: one of its ranks; None takes a GPU of the paper's cluster, `h100_roce`.
        tensor_parallel: degree; divides FLOPs and element-wise bytes, adds its collectives.
        context_parallel: the same.

    Attributes:
        linear_forward, linear_backward: W_l of one token, seconds.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: Device | None = None,
        *,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
    ) -> None:
        device = device or Device.of(
            load_cluster("h100_roce"), tensor_parallel=tensor_parallel, context_parallel=context_parallel
        )
        token = TokenSeconds.of(shape, device, tensor_parallel, context_parallel)
        # Two matrix products, 2 FLOPs a multiplication, over the lower triangle of d x d.
        attention = 2.0 * shape.heads * shape.head_dim * shape.layers / (tensor_parallel * context_parallel)
        self._attention_forward = attention / device.attention_flops
        self._attention_backward = attention * ATTENTION_BACKWARD / device.attention_backward_flops
        computed = (token.matrices + token.elements) * shape.layers + token.head
        communicated = (token.tensor + token.context) * shape.layers
        self.linear_forward = computed + communicated
        self.linear_backward = LINEAR_BACKWARD * computed + communicated

    def forward(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self._attention_forward * d * d + self.linear_forward * d

    def backward(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self._attention_backward * d * d + self.linear_backward * d


PAPER_MODELS = {
    "550M": ModelShape(
        layers=16, hidden=1536, heads=12, kv_heads=12, head_dim=128, feed_forward=4096, vocabulary=32000
    ),
    "7B": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, feed_forward=11008, vocabulary=32000
    ),
    "30B": ModelShape(
        layers=64, hidden=6144, heads=48, kv_heads=48, head_dim=128, feed_forward=16384, vocabulary=32000
    ),
    "70B": ModelShape(
        layers=86, hidden=8192, heads=64, kv_heads=64, head_dim=128, feed_forward=22016, vocabulary=32000
    ),
}
"""The sizes of the paper's Table 1. Only the 7B model is the published LLaMA2; of the others the paper says
that layers and width are scaled in proportion, so these are shapes of that size."""

PAPER_DEGREES = {
    "550M-64K": Degrees(tensor=2, context=2, pipeline=4, shard=2),
    "550M-128K": Degrees(tensor=2, context=4, pipeline=4),
    "7B-64K": Degrees(tensor=4, context=2, pipeline=4),
    "7B-128K": Degrees(tensor=8, context=2, pipeline=4),
    "30B-64K": Degrees(tensor=8, context=2, pipeline=4),
    "30B-128K": Degrees(tensor=8, context=4, pipeline=4),
    "70B-64K": Degrees(tensor=16, context=4, pipeline=4),
    "70B-128K": Degrees(tensor=16, context=4, pipeline=4),
}
"""The rows of Table 1. A global batch is of pipeline x data-parallel degree micro-batches."""


def paper_configuration(name: str) -> Analytic:
    """The cost model of one row of Table 1, such as `7B-128K`; KeyError where there is none."""
    degrees = PAPER_DEGREES[name]
    shape = PAPER_MODELS[name.split("-")[0]]
    return Analytic(shape, tensor_parallel=degrees.tensor, context_parallel=degrees.context)
