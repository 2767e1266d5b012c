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

Floats = NDArray[np.float64]

BYTES = 2  # of an activation in bfloat16
ATTENTION_BACKWARD = 2.5  # matrix products of the backward pass over those of the forward pass: 5 / 2
LINEAR_BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A LLaMA-style decoder.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary: as usual; `feed_forward` is the
            inner width of the gated MLP.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @property
    def linear_weights(self) -> int:
        """Weights that every token is multiplied with; the embedding's look-up is not among them."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.hidden * self.vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a device achieves on this kind of work, not what its data sheet promises.

    Attributes:
        attention_flops: achieved FLOP/s of causal attention, forward.
        attention_backward_flops: the same of the backward pass.
        linear_flops: achieved FLOP/s of matrix products.
        memory_bandwidth: bytes per second of element-wise operators.
        tensor_bandwidth: bytes per second of the links that tensor parallelism uses (NVLink).
        context_bandwidth: of those that context parallelism uses.
    """

    attention_flops: float
    attention_backward_flops: float
    linear_flops: float
    memory_bandwidth: float
    tensor_bandwidth: float
    context_bandwidth: float


H100 = Device(
    attention_flops=650e12,
    attention_backward_flops=550e12,
    linear_flops=600e12,
    memory_bandwidth=2.5e12,
    tensor_bandwidth=350e9,
    context_bandwidth=350e9,
)
"""H100 SXM with NVLink: published FlashAttention-3 and cuBLAS figures in bfloat16 at head dimension 128,
memory at 75 % of 3.35 TB/s, and NCCL's bus bandwidth on eight GPUs."""


class Analytic:
    """`analytic`: seconds by counting operations.

    Example: the paper's 7B model with a document of 131072 tokens on one H100 without parallelism: attention
    2 x 131072^2 x 4096 x 32 FLOPs forward, 6.9 s at 650 TFLOP/s; linear layers 2 x 6.6e9 x 131072 FLOPs,
    2.9 s at 600 TFLOP/s.

    Args:
        shape: of the model.
        device: one of its ranks.
        tensor_parallel: degree; divides FLOPs and element-wise bytes, adds its collectives.
        context_parallel: the same.

    Attributes:
        linear_forward, linear_backward: W_l of one token, seconds.
    """

    def __init__(
        self, shape: ModelShape, device: Device = H100, *, tensor_parallel: int = 1, context_parallel: int = 1
    ) -> None:
        ranks = tensor_parallel * context_parallel
        # Two matrix products, 2 FLOPs a multiplication, over the lower triangle of d x d.
        attention = 2.0 * shape.heads * shape.head_dim * shape.layers / ranks
        linear = 2.0 * shape.linear_weights / ranks / device.linear_flops
        # Of each layer, reads and writes: two norms, two residuals, rotary embedding, gated activation.
        elements = 12 * shape.hidden + 4 * shape.heads * shape.head_dim + 3 * shape.feed_forward
        element_wise = BYTES * elements * shape.layers / ranks / device.memory_bandwidth
        # Sequence-parallel TP gathers and scatters the activations twice a layer; CP gathers keys and values.
        shared = 4 * shape.hidden * (tensor_parallel - 1) / tensor_parallel / context_parallel
        tensor = BYTES * shared * shape.layers / device.tensor_bandwidth
        gathered = 2 * shape.kv_heads * shape.head_dim / tensor_parallel
        gathered *= (context_parallel - 1) / context_parallel
        context = BYTES * gathered * shape.layers / device.context_bandwidth
        self._attention_forward = attention / device.attention_flops
        self._attention_backward = attention * ATTENTION_BACKWARD / device.attention_backward_flops
        self.linear_forward = linear + element_wise + tensor + context
        self.linear_backward = LINEAR_BACKWARD * (linear + element_wise) + tensor + context

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
    "550M-64K": (2, 2), "550M-128K": (2, 4), "7B-64K": (4, 2), "7B-128K": (8, 2),
    "30B-64K": (8, 2), "30B-128K": (8, 4), "70B-64K": (16, 4), "70B-128K": (16, 4),
}  # fmt: skip
"""(tensor, context) parallel degrees of Table 1."""


def paper_configuration(name: str) -> Analytic:
    """The cost model of one row of Table 1, such as `7B-128K`; KeyError where there is none."""
    tensor, context = PAPER_DEGREES[name]
    shape = PAPER_MODELS[name.split("-")[0]]
    return Analytic(shape, tensor_parallel=tensor, context_parallel=context)
