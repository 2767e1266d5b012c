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

from wlb_titan.arrays import Floats
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.workload import CostJob, CostModel

BYTES = 2  # of an activation in bfloat16
ATTENTION_BACKWARD = 2.5  # matrix products of the backward pass over those of the forward pass: 5 / 2
LINEAR_BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a rank of a job achieves on this kind of work, not what data sheets promise.

    Attributes:
        attention_flops: achieved FLOP/s of causal attention, forward.
        attention_backward_flops: the same of the backward pass.
        linear_flops: achieved FLOP/s of matrix products.
        memory_bandwidth: bytes per second of element-wise operators.
        tensor_bandwidth: bytes per second of the links that tensor parallelism uses.
        context_bandwidth: bytes/s of the links that context parallelism uses.
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
        context: the collectives of context parallelism.
        experts: the part of `matrices` in routed experts, where they get equally many tokens.
        head: the matrix product with the vocabulary, on the last stage.
    """

    matrices: float
    elements: float
    tensor: float
    context: float
    experts: float
    head: float

    @classmethod
    def of(
        cls, shape: ModelShape, device: Device, tensor: int, context: int, exchange: float | None = None
    ) -> TokenSeconds:
        """The seconds of one rank of a model.

        Args:
            exchange: seconds of context parallelism's collectives in a pass, for each token of the
                micro-batch; None: those of the keys and values of the other ranks, as in the paper.
        """
        ranks = tensor * context
        head = shape.hidden * shape.vocabulary
        layer = (shape.linear_weights - head) // shape.layers
        # Reads and writes: two norms, two residuals, rotary embedding, gated activation.
        elements = 12 * shape.hidden + 4 * shape.heads * shape.head_dim + 3 * shape.feed_forward
        # Sequence-parallel TP gathers and scatters the activations twice a layer.
        shared = 4 * shape.hidden * (tensor - 1) / tensor / context
        if exchange is None:
            received = shape.key_elements(tensor) * (context - 1) / context
            exchange = BYTES * received / device.context_bandwidth
        return cls(
            matrices=2.0 * layer / ranks / device.linear_flops,
            elements=BYTES * elements / ranks / device.memory_bandwidth,
            tensor=BYTES * shared / device.tensor_bandwidth,
            context=exchange,
            experts=6.0 * shape.hidden * shape.routed_width / ranks / device.linear_flops,
            head=2.0 * head / ranks / device.linear_flops,
        )


class Analytic(CostModel):
    """`analytic`: seconds by counting operations.

    Example: the paper's 7B model with a document of 131072 tokens on one H100 without parallelism: attention
    2 x 131072^2 x 4096 x 32 FLOPs forward, 6.9 s at 650 TFLOP/s; linear layers 2 x 6.6e9 x 131072 FLOPs,
    2.9 s at 600 TFLOP/s.

    Args:
        device: one of its ranks; None takes a GPU of the paper's cluster, `h100_roce`.
        tensor_parallel: degree; divides FLOPs and element-wise bytes, adds its collectives.
        context_parallel: the same.
        exchange: as of `TokenSeconds.of`.

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
        exchange: float | None = None,
    ) -> None:
        device = device or Device.of(
            load_cluster("h100_roce"), tensor_parallel=tensor_parallel, context_parallel=context_parallel
        )
        token = TokenSeconds.of(shape, device, tensor_parallel, context_parallel, exchange)
        # Two matrix products, 2 FLOPs a multiplication, over half of the squares d x d.
        attention = shape.heads * shape.head_dims / (tensor_parallel * context_parallel)
        self._squares = shape.squares
        self._attention_forward = attention / device.attention_flops
        self._attention_backward = attention * ATTENTION_BACKWARD / device.attention_backward_flops
        computed = (token.matrices + token.elements) * shape.layers + token.head
        communicated = (token.tensor + token.context) * shape.layers
        self.linear_forward = computed + communicated
        self.linear_backward = LINEAR_BACKWARD * computed + communicated

    @classmethod
    def of(cls, config: CostModel.Config, job: CostJob) -> Analytic:
        tensor, context = job.degrees.tensor, job.degrees.context
        device = Device.of(job.cluster, tensor_parallel=tensor, context_parallel=context)
        return cls(
            job.model,
            device,
            tensor_parallel=tensor,
            context_parallel=context,
            exchange=job.exchanging.always.moving,
        )

    def forward(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self._attention_forward * self._squares(d) + self.linear_forward * d

    def backward(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self._attention_backward * self._squares(d) + self.linear_backward * d
