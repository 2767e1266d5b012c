"""Tensors that FSDP has whole on a rank beside shards: weights for passes, gradients until they are reduced.

Under pipeline parallelism micro-batches add up gradients before they are reduced: weights stay gathered in
the compute type, and gradients add up in the reduction's type from a stage's first backward pass on.

Without it a layer at a time is whole, and with several sharding ranks the one that is fetched meanwhile. In a
backward pass there is one weight's gradient at the fullest moment, the MLP's; the layer's gradients are all
there when they are copied to be reduced; and this copy, in the reduction's type, stays while the next layer's
backward pass runs. The first backward layer of all has none of it. Where the sharding degree is 1 only a
step's last backward pass reduces: in those before it gradients add up in the reduction's type, and layers
stay whole until their next forward pass.

The chunked loss makes the head's gradient in each chunk, in both types, and adds it up. Where embedding and
head are one table, FSDP has it once more in the compute type meanwhile, and a shard of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape, layer_parameters, rank_parameters
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.memory.settings import MemorySettings


class Gathered:
    """Bytes of whole weights and gradients on one pipeline rank."""

    def __init__(
        self,
        model: ModelShape,
        degrees: Degrees,
        settings: MemorySettings,
        layers: Sequence[int],
        stages: Sequence[int],
    ) -> None:
        self._degrees, self._layers, self._stages = degrees, layers, stages
        self._sharded = degrees.sharding_ranks > 1
        self._reshards = settings.reshards(degrees)
        compute, self._reduced = settings.compute_bytes, settings.parameter_bytes
        self._compute = compute
        # Of a rank alone whose weights have the compute type the shards are whole weights.
        self._whole = compute if self._sharded or compute != self._reduced else 0
        tensor = degrees.tensor
        self._table = model.hidden * model.vocabulary / tensor
        head = len(layers) - 1 in stages
        self._chunked_head = self._table if head and settings.loss_chunks > 1 else 0.0
        self._plain_head = self._table if head and settings.loss_chunks == 1 else 0.0
        self._joined = 0.0
        if model.tied and 0 in stages:
            self._joined = self._chunked_head * (compute + self._reduced / degrees.sharding_ranks)
        self._weight = model.hidden * max(model.feed_forward, model.heads * model.head_dim) / tensor
        # A rank gathers its share of a layer: by tensor parallelism, and of experts by expert parallelism.
        experts = model.expert_weights if degrees.expert > 1 else 0
        less = experts / tensor - experts / degrees.expert
        self._layer = layer_parameters(model) / tensor - less
        self._held = {s: rank_parameters(model, layers, [s]) / tensor - layers[s] * less for s in stages}

    def in_pipeline(self, went_back: Collection[int], *, in_loss: bool = False) -> float:
        """In a pass through a pipeline's stage."""
        result = self._weight * (self._compute + self._reduced)
        head = self._chunked_head * self._reduced
        if self._sharded:
            result += head * (1 + in_loss + 2 / self._degrees.sharding_ranks)
        result += sum(self._held[stage] for stage in went_back) * self._reduced
        if len(self._layers) - 1 in went_back:
            result -= head
        if not self._reshards:
            return result + sum(self._held.values()) * self._whole
        # The layer at hand and the one that is fetched ahead, and the ends of the model.
        ends = sum(self._held.values()) - sum(self._layers[stage] for stage in self._stages) * self._layer
        return result + (2 * self._layer + ends) * self._whole

    def in_forward(self) -> float:
        """In a layer's forward pass, without a pipeline."""
        return self._weights(1)

    def in_loss(self, token: TokenBytes, went_back: Collection[int]) -> Iterator[tuple[float, float]]:
        """Bytes a token of the loss, and of weights and gradients: at softmax and at the head's gradient."""
        if self._degrees.pipeline > 1:
            yield token.loss, self.in_pipeline(went_back, in_loss=True)
            return
        head = self._chunked_head or self._plain_head
        whole = (head * self._whole if self._reshards else self._weights(0)) + self._joined
        yield token.loss, whole + self._chunked_head * self._reduced
        copied = max(self._compute, self._sharded * 2 * self._reduced / self._degrees.sharding_ranks)
        yield token.head, whole + head * (2 * self._reduced + copied)

    def in_backward(
        self, *, reduced: bool, last: bool
    ) -> tuple[Callable[[int], float], Callable[[int], float]]:
        """In a backward pass without a pipeline, as functions of a layer, from 0: at its fullest moment, and
        behind it.

        Args:
            reduced: whether there are gradients from before it.
            last: whether it is the step's last.
        """
        if self._sharded or last:
            return self._in_layer, self._reducing
        return partial(self._adding, first=not reduced), partial(self._added, first=not reduced)

    def _adding(self, layer: int, first: bool) -> float:
        """In a layer's backward pass that leaves its gradients for a later one to reduce."""
        return self._kept_on(layer) + self._weight * self._compute + self._new(layer + 1, first)

    def _added(self, layer: int, first: bool) -> float:
        """Behind it, where its gradients have been added."""
        return self._kept_on(layer) + self._layer * self._compute + self._new(layer, first)

    def _kept_on(self, layer: int) -> float:
        """Weights of this and all later layers."""
        return self._behind_and(layer) * self._whole if self._reshards else self._weights(layer)

    def _new(self, layer: int, first: bool) -> float:
        """Gradients of this and all later layers, if they are the first."""
        return self._behind_and(layer) * self._reduced if first else 0.0

    def _behind_and(self, layer: int) -> float:
        """Weights in number, of this and all later layers."""
        return (sum(self._layers) - layer) * self._layer

    def _in_layer(self, layer: int) -> float:
        """In a layer's backward pass whose gradients are reduced."""
        return self._weights(layer) + self._weight * self._compute + self._behind(layer)

    def _reducing(self, layer: int) -> float:
        """Behind it, where its gradients are copied to be reduced."""
        return self._weights(layer) + self._layer * (self._compute + self._reduced)

    def _weights(self, layer: int) -> float:
        """Bytes of a layer at hand, and of what is fetched meanwhile; layer 0 is the embedding."""
        if not self._reshards:
            return sum(self._held.values()) * self._whole
        fetched = (self._layer if layer else self._table) if self._sharded else 0.0
        return (self._layer + fetched) * self._whole

    def _behind(self, layer: int) -> float:
        """Gradients of what ran before a layer, which are being reduced."""
        last = layer == sum(self._layers) - 1
        return (self._plain_head if last else self._layer) * self._reduced
