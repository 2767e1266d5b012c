"""What a token of a layout takes on a cluster, by formulas of dense decoders."""

from __future__ import annotations

from dataclasses import dataclass

from wlb_titan.cost.cluster import Cluster
from wlb_titan.layers.layout import Layout


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Forward seconds that one token adds to one rank, in one layer but for `head`; and those of no token."""

    matrices: float  # products
    elements: float  # element-wise operators
    tensor: float  # collectives of tensor parallelism: all-gather and reduce-scatter, twice a layer
    head: float  # the product with the vocabulary, on the last stage
    layer: tuple[float, float] = (0.0, 0.0)  # of a layer's forward and backward pass, whatever its tokens

    @classmethod
    def of(cls, layout: Layout, cluster: Cluster, float8: tuple[float, float] = (0.0, 0.0)) -> TokenSeconds:
        shape, tensor, element = layout.model, layout.degrees.tensor, layout.memory.compute_bytes
        of_layers, of_head = map(cluster.product_flops, float8)
        ranks = tensor * layout.degrees.context
        head = shape.hidden * shape.vocabulary
        layer = (shape.linear_weights - head) // shape.layers
        # Reads and writes: two norms, two residuals, rotary embedding, gated activation.
        elements = 12 * shape.hidden + 4 * shape.heads * shape.head_dim + 3 * shape.feed_forward
        # Sequence-parallel TP gathers and scatters the activations twice a layer.
        shared = 4 * shape.hidden * (tensor - 1) / tensor / layout.degrees.context
        return cls(
            matrices=2.0 * layer / ranks / of_layers,
            elements=element * elements / ranks / cluster.memory_bandwidth,
            tensor=element * shared / cluster.link(tensor).bandwidth,
            head=2.0 * head / ranks / of_head,
            layer=cluster.layer,
        )
