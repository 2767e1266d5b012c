"""Bytes of a transformer layer's tokens, of the loss, and of weights: the arithmetic below `rank.py`.

`TokenBytes` has what grows with tokens, in the symbols of `layers/recompute.py`; `FsdpWhole` has the weights
and gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from wlb_titan.context.strategy import ALL_KEYS, Exchange, KeyShares, all_gather_exchange
from wlb_titan.cost.models import ModelShape, layer_parameters, rank_parameters
from wlb_titan.cost.told import ModelAccount, Weights
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.layers.rates import Rates
from wlb_titan.layers.recompute import FLOAT32, LayerBytes, MemorySettings, Peaks, Recompute


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes a token on one GPU, as the module describes them; of one layer, where a layer has them."""

    hidden: float  # s above
    hidden_gathered: float  # g
    kept: float  # from the forward to the backward pass
    forward: float  # while the forward pass runs, besides what is kept
    backward: float  # while the backward pass runs, besides what was kept, at its fullest moment
    attention: float  # the same at attention's gradients, which go into the cache of slices
    weights: float  # the same at the gradient of one of the MLP's weights
    waiting: float  # gradients of linear layers' and norms' outputs, between a split backward pass's halves
    loss: float  # besides its hidden states, at the softmax's fullest moment
    head: float  # the same at the head's gradient
    embedded: float  # kept of the embedding besides its output
    inputs: float  # token ids, positions and labels, int64, and the order of the keys
    cached: float  # K and V, which a slice leaves to those behind it
    cached_gradients: float  # in float32

    @property
    def kept_in_slices(self) -> float:
        """All that a layer may keep of a sliced document's token, besides the pass at hand."""
        return self.kept + self.cached + self.cached_gradients

    @classmethod
    def of(
        cls,
        model: ModelShape,
        degrees: Degrees,
        settings: MemorySettings,
        exchange: Exchange | None = None,
        keys: KeyShares = ALL_KEYS,
        kind: Recompute | None = None,
        account: ModelAccount | None = None,
        number: int = 0,
    ) -> TokenBytes:
        """By default all context-parallel ranks gather keys and values. `keys` are a rank's shares of a
        micro-batch's, or arrays of those of several, which makes arrays of bytes; of documents in slices all
        are cached. `kind` stands in for the settings' own, and the account's layer of this `number` for the
        formulas."""
        cp, tp = degrees.context, degrees.tensor
        exchange = exchange or all_gather_exchange(model, tp, cp)
        layer = LayerBytes(model, degrees, settings, exchange, keys)
        cached = exchange.keys * settings.compute_bytes
        recompute = kind or settings.recompute
        if account is None:
            kept, peaks = recompute.kept(layer), recompute.peaks(layer)
        else:
            own = account.layers[number].work.kinds[recompute.name]
            kept = own.kept - recompute.less_keys(layer)
            peaks = Peaks(own.forward, own.backward, own.attention, own.backward)
        # The logits and, in float32, log-softmax and gradients; the loss-parallel softmax has one copy more.
        softmax = settings.compute_bytes + (4 if tp > 1 else 3) * FLOAT32
        logits = model.vocabulary / (cp * tp * settings.loss_chunks)
        loss, head = logits * softmax, logits * settings.compute_bytes
        if settings.loss_chunks > 1:
            states = FLOAT32 * model.hidden / cp
            loss, head = states + max(loss, layer.g), states + head
        if account is not None:
            loss, head = account.loss
        return cls(
            hidden=layer.s,
            hidden_gathered=layer.g,
            kept=kept,
            **peaks._asdict(),
            waiting=2 * layer.s + 2 * layer.g + layer.q + 2 * layer.k + 2 * layer.f + layer.normed,
            loss=loss,
            head=head,
            embedded=0.0 if account is None else account.embedded,
            inputs=3 * 8 / cp + (8 if cp > 1 else 0),
            cached=cached,
            cached_gradients=cached * FLOAT32 / settings.compute_bytes,
        )


def token_bytes(
    rates: Rates, keys: KeyShares = ALL_KEYS, kind: Recompute | None = None, number: int = 0
) -> TokenBytes:
    """Bytes that a rank holds for each token of a micro-batch, as `TokenBytes.of` has them."""
    settings = rates.model, rates.degrees, rates.memory, rates.exchange
    return TokenBytes.of(*settings, keys, kind, rates.account, number)


def added_gradient(rates: Rates, kind: Recompute, number: int = 0) -> float:
    """Bytes of a weight's gradient in a pipeline's backward pass, which is added to the sum and gone. Without
    a pipeline it stays for its layer's reduction, and `FsdpWhole` has it."""
    if rates.degrees.pipeline == 1:
        return 0.0
    weights = largest_matrix(rates.model, rates.degrees)
    if rates.account is not None:
        weights = rates.account.layers[number].work.kinds[kind.name].gradients
    return weights * rates.memory.compute_bytes


def largest_matrix(model: ModelShape, degrees: Degrees) -> float:
    """Weights of a dense decoder's layer's largest matrix, on one tensor-parallel rank."""
    return model.hidden * max(model.feed_forward, model.heads * model.head_dim) / degrees.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWeights:
    """Numbers of weights of a pipeline rank's stages; as gathered, a rank's share after tensor and expert
    parallelism, but for the first two."""

    all: int  # of all tensor-parallel and FSDP ranks
    trained: int  # those of them with gradients
    gathered: Mapping[int, float]  # of each stage
    gradients: Mapping[int, float]
    layers: Sequence[Weights]  # each, in order
    table: float
    head: float  # 0 on other ranks than the last stage's
    head_gradient: float
    ends: float  # of `gathered`, what is in no layer
    tied: bool  # embedding and head are one table, and this rank has both

    @classmethod
    def of(cls, model: ModelShape, degrees: Degrees, layers: Sequence[int], stages: Sequence[int]) -> Self:
        """By the shape of a dense decoder's layers."""
        tensor, last = degrees.tensor, len(layers) - 1 in stages
        table = model.hidden * model.vocabulary / tensor
        # A rank gathers its share of a layer: of experts by expert parallelism, else by tensor parallelism.
        experts = model.expert_weights if degrees.expert > 1 else 0
        less = experts / tensor - experts / degrees.expert
        layer = layer_parameters(model) / tensor - less
        gathered = {s: rank_parameters(model, layers, [s]) / tensor - layers[s] * less for s in stages}
        matrix = largest_matrix(model, degrees)
        own = sum(layers[stage] for stage in stages)
        everything = rank_parameters(model, layers, stages)
        return cls(
            all=everything,
            trained=everything,
            gathered=gathered,
            gradients=gathered,
            layers=[Weights(0, layer, 0, layer, matrix, 0, 0)] * own,
            table=table,
            head=table if last else 0.0,
            head_gradient=table if last else 0.0,
            ends=sum(gathered.values()) - own * layer,
            tied=model.tied and 0 in stages and last,
        )

    @classmethod
    def told(
        cls,
        account: ModelAccount,
        model: ModelShape,
        layers: Sequence[int],
        stages: Sequence[int],
        kinds: Sequence[str],
    ) -> Self:
        """By the account of the layers, which may be of these kinds of recomputation."""
        first, last = 0 in stages, len(layers) - 1 in stages
        own = {stage: [layer.under(kinds) for layer in account.of_stage(layers, stage)] for stage in stages}
        every = [weights for of_stage in own.values() for weights in of_stage]
        table, head = account.ends
        ends = {0: [table], len(layers) - 1: [head, *[table] * (model.tied and not first)]}
        if len(layers) == 1:
            ends = {0: [table, head]}
        outer = [weights for stage in stages for weights in ends.get(stage, ())]
        matrix = table if model.tied else head  # of the head

        def of_stages(name: str) -> dict[int, float]:
            both = {stage: [*own[stage], *ends.get(stage, ())] for stage in stages}
            return {stage: sum(getattr(w, name) for w in weights) for stage, weights in both.items()}

        return cls(
            all=sum(int(weights.all) for weights in [*every, *outer]),
            trained=sum(int(weights.trained) for weights in [*every, *outer]),
            gathered=of_stages("gathered"),
            gradients=of_stages("gradients"),
            layers=every,
            table=table.gathered,
            head=matrix.gathered if last else 0.0,
            head_gradient=matrix.matrix if last else 0.0,
            ends=sum(weights.gathered for weights in outer),
            tied=model.tied and first and last,
        )


class FsdpWhole:
    """Bytes of whole weights (for passes) and gradients (until reduced) on a pipeline rank, beside shards.

    Under pipeline parallelism micro-batches add up gradients before they are reduced: weights stay gathered
    in the compute type, and gradients add up in the reduction's type from a stage's first backward pass on,
    each as it is made (`added_gradient`).

    Without it one layer is whole at a time, and with several sharding ranks the one that is fetched
    meanwhile. At a backward pass's fullest moment there is one weight's gradient, the MLP's. A layer's
    gradients are all there when they are copied to be reduced. The copy, in the reduction's type, stays
    during the next layer's backward pass. With a sharding degree of 1 only a step's last backward pass
    reduces: before it gradients add up in the reduction's type, and layers stay whole until their next
    forward pass.

    The chunked loss makes the head's gradient in each chunk, in both types, and adds it up. Where embedding
    and head are one table, FSDP then has it once more in the compute type, and a shard of its gradient.
    """

    def __init__(
        self, weights: RankWeights, degrees: Degrees, settings: MemorySettings, layers: Sequence[int]
    ) -> None:
        self._pipelined, self._shards = degrees.pipeline > 1, degrees.sharding_ranks
        self._layers, self._last = sum(layers), len(layers) - 1
        self._reshards = settings.reshards(degrees)
        self._compute, self._reduced = settings.compute_bytes, settings.parameter_bytes
        # A lone rank's shards are whole weights if they have the compute type.
        self._whole = self._compute if self._shards > 1 or self._compute != self._reduced else 0
        self._weights, self._table = weights, weights.table
        self._experts_are_whole = degrees.expert == degrees.sharding_ranks * degrees.tensor > 1
        self._layer = max((layer.gathered for layer in weights.layers), default=0.0)
        head = weights.head_gradient
        self._chunked_head, self._plain_head = (head, 0.0) if settings.loss_chunks > 1 else (0.0, head)
        self._whole_head = weights.head
        self._tied = 0.0  # bytes of the table beside the first layer's
        if weights.tied:
            self._tied = self._chunked_head * (self._compute + self._reduced / self._shards)

    def in_pipeline(self, went_back: Collection[int], *, in_loss: bool = False) -> float:
        """In a pass through a pipeline's stage; `went_back` has the stages with gradients."""
        weights = self._weights
        head = self._chunked_head * self._reduced
        result = head * (1 + in_loss + 2 / self._shards)
        result += sum(weights.gradients[stage] for stage in went_back) * self._reduced
        if self._last in went_back:
            result -= head
        if not self._reshards:
            return result + sum(weights.gathered.values()) * self._whole
        # The layer at hand, the one fetched ahead, and the model's ends.
        return result + (2 * self._layer + weights.ends) * self._whole

    def in_loss(self, token: TokenBytes, went_back: Collection[int]) -> Iterator[tuple[float, float]]:
        """Bytes a token of the loss, and of weights and gradients: at softmax and at the head's gradient."""
        if self._pipelined:
            whole = self.in_pipeline(went_back, in_loss=True)
            yield token.loss, whole
            # A chunk's gradient of the head, in both types, is added to the others'.
            yield token.head, whole + self._chunked_head * (self._compute + self._reduced)
            return
        head = self._chunked_head or self._plain_head
        whole = (self._whole_head * self._whole if self._reshards else self.weights(0)) + self._tied
        yield token.loss, whole + self._chunked_head * self._reduced
        copied = max(self._compute, (self._shards > 1) * 2 * self._reduced / self._shards)
        # A head without a gradient is gathered again for that of its input, and copied out.
        again = 2 * self._whole_head * self._whole * (self._shards > 1 and self._reshards)
        yield token.head, max(whole + head * (2 * self._reduced + copied), again)

    @property
    def in_forward(self) -> float:
        """Without a pipeline: of weights, in a forward pass."""
        return max(self.weights(layer) for layer in range(min(1, self._layers - 1), self._layers))

    def weights(self, layer: int) -> float:
        """Without a pipeline: the layer at hand and what is fetched meanwhile, the embedding for layer 0."""
        if not self._reshards:
            return sum(self._weights.gathered.values()) * self._whole
        fetched = (self._ahead(layer - 1) if layer else self._table) * (self._shards > 1)
        return (self._weights.layers[layer].gathered + fetched) * self._whole

    def _ahead(self, layer: int) -> float:
        """A layer's weights that are fetched ahead: no experts where a rank has theirs whole, as expert
        parallelism takes all sharding ranks."""
        weights = self._weights.layers[layer]
        return weights.gathered - weights.experts * self._experts_are_whole

    def in_backward(self, layer: int, *, behind: bool, first: bool, last: bool) -> float:
        """Without a pipeline: at the fullest moment of a layer's backward pass or, `behind` it, while
        gradients are copied or added up; in a step's `first` or `last` backward pass."""
        of_layers, own = self._weights.layers, self._weights.layers[layer]
        at_hand = own.gradients if behind else own.matrix
        if self._shards > 1 or last:  # gradients are reduced
            # Of what is being reduced.
            last_layer = layer == self._layers - 1
            before = self._plain_head if last_layer else of_layers[layer + 1].gradients
            reduced = at_hand if behind else before
            return self.weights(layer) + at_hand * self._compute + reduced * self._reduced
        # Weights of this and all later layers, and in the first pass their gradients.
        kept = self._whole * sum(weights.gathered for weights in of_layers[layer:])
        added = self._reduced * sum(weights.gradients for weights in of_layers[layer + (not behind) :])
        return (kept if self._reshards else self.weights(layer)) + at_hand * self._compute + added * first
