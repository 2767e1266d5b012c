"""The workload of a document from the model's shape, the parallel degrees and the device's speed.

    W_a(d) = attention FLOPs / achieved FLOP/s
    W_l(d) = linear FLOPs / achieved FLOP/s + element-wise bytes / memory bandwidth + TP, CP communication

in seconds that one micro-batch of that one document takes on all pipeline stages together. The gradient
reduction of data parallelism and FSDP's gathers do not depend on documents; they are the same for every
micro-batch and left out, as is the pipeline's point-to-point traffic, which overlaps with computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.cost.models import ModelShape
from wlb_titan.cost.workload import CostModel

if TYPE_CHECKING:
    from wlb_titan.job import Job

BYTES = 2  # of an activation in bfloat16
ATTENTION_BACKWARD = 2.5  # matrix products of the backward pass over those of the forward pass: 5 / 2
LINEAR_BACKWARD = 2.0


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
        cls, shape: ModelShape, cluster: Cluster, tensor: int, context: int, exchange: float | None = None
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
            exchange = BYTES * received / cluster.link(context, tensor).bandwidth
        return cls(
            matrices=2.0 * layer / ranks / cluster.linear_flops,
            elements=BYTES * elements / ranks / cluster.memory_bandwidth,
            tensor=BYTES * shared / cluster.link(tensor).bandwidth,
            context=exchange,
            experts=6.0 * shape.hidden * shape.routed_width / ranks / cluster.linear_flops,
            head=2.0 * head / ranks / cluster.linear_flops,
        )


class Analytic(CostModel):
    """`analytic`: seconds by counting operations.

    Example: the paper's 7B model with a document of 131072 tokens on one H100 without parallelism: attention
    2 x 131072^2 x 4096 x 32 FLOPs forward, 6.9 s at 650 TFLOP/s; linear layers 2 x 6.6e9 x 131072 FLOPs,
    2.9 s at 600 TFLOP/s.

    Args:
        cluster: its hardware; None takes the paper's, `h100_roce`.
        tensor_parallel: degree; divides FLOPs and element-wise bytes, adds its collectives.
        context_parallel: the same.
        exchange: as of `TokenSeconds.of`.

    Attributes:
        linear_forward, linear_backward: W_l of one token, seconds.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster | None = None,
        *,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        exchange: float | None = None,
    ) -> None:
        cluster = cluster or load_cluster("h100_roce")
        token = TokenSeconds.of(shape, cluster, tensor_parallel, context_parallel, exchange)
        # Two matrix products, 2 FLOPs a multiplication, over half of the squares d x d.
        attention = shape.heads * shape.head_dims / (tensor_parallel * context_parallel)
        self._squares = shape.squares
        self._attention_forward = attention / cluster.attention_flops
        self._attention_backward = attention * ATTENTION_BACKWARD / cluster.attention_backward_flops
        computed = (token.matrices + token.elements) * shape.layers + token.head
        communicated = (token.tensor + token.context) * shape.layers
        self.linear_forward = computed + communicated
        self.linear_backward = LINEAR_BACKWARD * computed + communicated

    @classmethod
    def of(cls, config: CostModel.Config, job: Job) -> Analytic:
        return cls.on(job.cluster, job)

    @classmethod
    def on(cls, cluster: Cluster, job: Job) -> Analytic:
        """The model for a job on this cluster."""
        return cls(
            job.model,
            cluster,
            tensor_parallel=job.degrees.tensor,
            context_parallel=job.degrees.context,
            exchange=job.exchanging.always.moving,
        )

    def forward(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self._attention_forward * self._squares(d) + self.linear_forward * d

    def backward(self, lengths: NDArray[Any]) -> Floats:
        d = np.asarray(lengths, dtype=np.float64)
        return self._attention_backward * self._squares(d) + self.linear_backward * d
