"""Kinds of activation checkpointing: what a layer keeps for its backward pass, and what it repeats there.

Bytes are those on one GPU for each token of the micro-batch on all context-parallel ranks together. So a rank
that holds one token in CP x TP counts a CP x TP-th of its bytes. In elements of the compute type:

    s   hidden state between blocks, divided by sequence parallelism     hidden / (CP x TP)
    g   the same gathered over the tensor-parallel ranks                 hidden / CP
    q   queries, and attention's output                                  query heads x head_dim / (CP x TP)
    k   keys, or values                                                  key heads x head_dim / (CP x TP)
    f   one inner activation of the MLP                                  feed_forward / (CP x TP)
    K   keys and values that a rank's documents have                     2 x key heads x head_dim / TP,
                                                                         times `KeyShares.held`
    G   those of them that are gathered, with its own share              the same, times `KeyShares.gathered`

A layer keeps from its forward pass to its backward pass (compare Korthikanti et al., Reducing Activation
Recomputation, section 4), besides attention's log-sum-exp in float32 (but for `full`) and the rotary factors
of the rank's tokens (with `none`):

    none        2 s + 2 g + 2 q + 4 f + K   residuals, the inputs of QKV and of the MLP as gathered, rotated
                                            queries, attention's output; both inner activations, gate, product
    keys        2 s + (q + 2 k) + q + 2 f   the layer's input; the outputs of all matrix products but w2's,
                + G                         and attention's; gathered K and V. Under tensor parallelism wo's
                                            output, the second s, is too wide and made again
    selective   s + (q + 2 k) + q + f       the layer's input; the outputs of every second matrix product,
                                            which are QKV and w1 (never w2), and attention's output
    full        s                           the layer's input

A backward pass recomputes what is missing, layer by layer. Its fullest moment is one of:

    gathering K and V again     2 g + G + 2 k
    rotating again              2 g + 4 (q + k), in float32, before K is there; by cos and sin 2 g + 8 q
    gathering the MLP's input   4 g, where tensor parallelism gathers: the collective's output and its copy
    the gradient of w2          3 g + 4 f: inputs of QKV and of the MLP, the output's gradient; w3's output,
                                silu, product and the product's gradient
    the gradient of silu        2 g + 5 f
    the gradients of w1, w3     4 g + f: two inputs, and the gradient of the MLP's input from each
    the gradient of attention   g + 2 q + K: the gradients of output and q, and those of K and V

All of them add two hidden states (the residual and the incoming gradient), q, the keys and values that
attention needs again, and the rotary factors of the rank's tokens. Heads in groups have outputs of their own,
which are put side by side: another q here, and with `none` one that is kept. QKV's output is only there while
q and k are rotated, as attention gets a copy of the values. Norms of queries and keys, where a model has
them, need their inputs, q + k, from then on, and with `none` from the forward pass on. With `full` a layer
also makes the outputs of attention, w1 and w2 again; with `none` and `keys` what is kept is not counted
again.

Compiled code also keeps what tensor parallelism reduces of wo's output, s, for `keys` and `selective`, which
else make it again with a reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, NamedTuple

import numpy as np

from wlb_titan.context.strategy import Exchange, KeyShares
from wlb_titan.cost.models import ModelShape
from wlb_titan.dimensions.degrees import Degrees

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySettings:
    """The settings that memory depends on, besides shape, degrees and lengths."""

    checkpointing: str = "selective"  # a name of `CHECKPOINTING`
    as_needed: bool = False  # whether the planner may choose other kinds (`Rates.mixes`)
    compiled: bool = False  # whether torch.compile decides what a layer keeps of its collectives
    parameter_bytes: int = 4  # of a weight as the optimizer keeps it, and of its gradient
    compute_bytes: int = 2  # of a weight or an activation in forward and backward
    optimizer_bytes: int = 8  # of a weight's state: AdamW has two moments in float32
    loss_chunks: int = 8  # pieces of a micro-batch whose logits exist one at a time
    window: int = 0  # tokens, for which every layer has a table of rotary factors
    rotary_bytes: int = 4  # of that table for each position and element of the head dim
    sequence_parallel: bool = True  # whether tensor parallelism divides the tokens of hidden states
    reshard: bool | None = None
    """Whether FSDP frees a layer's gathered weights after each pass. None is torchtitan's default: not under
    pipeline parallelism, where micro-batches add up gradients before they are reduced."""

    @property
    def recompute(self) -> Recompute:
        return CHECKPOINTING[self.checkpointing]

    def reduces_again(self, degrees: Degrees) -> bool:
        """Whether layers that repeat something repeat wo's reduction, which only compiled code keeps."""
        return degrees.tensor > 1 and not self.compiled

    def reshards(self, degrees: Degrees) -> bool:
        return degrees.pipeline == 1 if self.reshard is None else self.reshard


class LayerBytes:
    """The module's symbols in bytes, and what follows from them."""

    def __init__(
        self,
        model: ModelShape,
        degrees: Degrees,
        settings: MemorySettings,
        exchange: Exchange,
        shares: KeyShares,
    ) -> None:
        cp, tp, size = degrees.context, degrees.tensor, settings.compute_bytes
        all_keys = exchange.keys * size
        self.shared_keys = cp > 1  # whether context-parallel ranks exchange K and V
        self.gathers = tp > 1 and settings.sequence_parallel  # hidden states, by tensor-parallel ranks
        self.g = model.hidden * size / cp
        self.s = self.g / tp if self.gathers else self.g
        # What is kept of wo's reduction by compiled code, and of its output or else that reduction.
        self.compiled = self.s if settings.compiled and tp > 1 else 0.0
        self.reduced = self.compiled if tp > 1 else self.g
        self.q = model.heads * model.head_dim * size / (cp * tp)
        self.k = model.kv_heads * model.head_dim * size / (cp * tp)
        self.qkv = self.q + 2 * self.k
        self.f = model.feed_forward * size / (cp * tp)
        # K; without context parallelism the rotated keys and a copy of the values.
        self.keys = all_keys * shares.held if self.shared_keys else 2 * self.k
        # What collectives bring of them, before it is put in order.
        self.gathering = all_keys * shares.gathered if self.shared_keys else 2 * self.k
        self.key_gradients = all_keys * shares.held
        self.absent_keys, self.absent_gathering = all_keys - self.keys, all_keys - self.gathering
        self.sent = exchange.sent * size if self.shared_keys else 0.0  # to the others before attention
        self.outputs = exchange.outputs * size  # and queries, of tokens that are not the rank's own
        self.joined = exchange.joined * size
        self.exchanged = sum(move.kept for move in exchange.moves) * size  # by `selective`
        self.log_sum_exp = FLOAT32 * model.heads / (cp * tp)
        # QKV's output, attention's, and what its exchange keeps: of kinds that repeat no attention.
        self.around_attention = self.qkv + self.q + self.outputs + self.exchanged + self.log_sum_exp
        self.rotary = settings.rotary_bytes * model.head_dim / cp
        # Inputs of the norms of queries and keys, for their gradients.
        self.normed = self.q + self.k if model.qk_norm else 0.0
        # With copies in float32 while both are rotated: as complex numbers, or one by one by cos and sin.
        by_cos_sin = settings.rotary_bytes == 2 * FLOAT32
        self.rotating = self.normed + (8 * self.q if by_cos_sin else 4 * (self.q + self.k))


class Peaks(NamedTuple):
    """Bytes a token of one layer, besides those it keeps, where its passes are fullest."""

    forward: float
    backward: float
    attention: float  # at attention's gradients, which go into the cache of slices
    weights: float  # at the gradient of one of the MLP's weights


class Recompute(ABC):
    """A kind of activation checkpointing of a transformer layer."""

    name: ClassVar[str]
    splits_backward: ClassVar[bool] = False
    """Whether gradients of inputs and of weights can be computed apart; repeated layers are there once."""

    repeats_moves: ClassVar[bool] = True
    """Whether context parallelism moves again what it does not keep."""

    repeats_all: ClassVar[bool] = False
    """Whether the whole forward pass is repeated, attention included."""

    @abstractmethod
    def kept(self, layer: LayerBytes) -> float:
        """Bytes a token from the forward to the backward pass."""

    def less_keys(self, layer: LayerBytes) -> float:
        """Bytes a token that a layer keeps less than with all keys."""
        return 0.0

    @abstractmethod
    def peaks(self, layer: LayerBytes) -> Peaks: ...

    def repeated(self, model: ModelShape, reduces_again: bool) -> float | None:
        """The share of a layer's matrix products that is repeated beside all element-wise operators, if wo's
        reduction is repeated or not; None: none of both, or the whole pass."""
        return None


class KeepAll(Recompute):
    """`none`: nothing is repeated."""

    name = "none"
    splits_backward, repeats_moves = True, False

    def kept(self, layer: LayerBytes) -> float:
        attention = 2 * layer.q + 2 * layer.outputs + layer.keys + layer.log_sum_exp + layer.rotary
        return 2 * layer.s + 2 * layer.g + attention + layer.joined + layer.normed + 4 * layer.f

    def less_keys(self, layer: LayerBytes) -> float:
        return layer.absent_keys if layer.shared_keys else 0.0

    def peaks(self, layer: LayerBytes) -> Peaks:
        s, g, q, f = layer.s, layer.g, layer.q, layer.f
        attention = 2 * s + 2 * q + 2 * layer.key_gradients - 4 * f  # the MLP's activations are free
        # What the MLP keeps is freed while gradients of its products are made.
        return Peaks(g + s * layer.gathers, s + max(2 * f, 2 * g), attention, s + max(f, 2 * g))


class KeepProducts(Recompute):
    """`keys`: element-wise operators, with what tensor parallelism gathers for them."""

    name = "keys"
    repeats_moves = False

    def kept(self, layer: LayerBytes) -> float:
        return layer.s + layer.reduced + layer.around_attention + 2 * layer.f + self._gathered(layer)

    def less_keys(self, layer: LayerBytes) -> float:
        return layer.absent_gathering if layer.shared_keys else 0.0

    def _gathered(self, layer: LayerBytes) -> float:
        return layer.gathering if layer.shared_keys else 0.0

    def peaks(self, layer: LayerBytes) -> Peaks:
        kept, f = layer.qkv + self._gathered(layer) + layer.reduced, layer.f
        return _repeating(layer, attended=-kept, w1=-f, at_attention=-2 * f, regathers=False)

    def repeated(self, model: ModelShape, reduces_again: bool) -> float:
        return _of_products(model, model.heads * model.head_dim * reduces_again)


class Selective(Recompute):
    """`selective`: every second matrix product and the element-wise operators, with the gathers they need."""

    name = "selective"

    def kept(self, layer: LayerBytes) -> float:
        return layer.s + layer.compiled + layer.around_attention + layer.f

    def peaks(self, layer: LayerBytes) -> Peaks:
        # QKV's output is no longer needed, and at attention's gradients w1's neither.
        return _repeating(layer, attended=-layer.qkv, at_attention=-layer.f)

    def repeated(self, model: ModelShape, reduces_again: bool) -> float:
        # Keys, the attention's output and the MLP's second product, of all seven.
        return _of_products(model, (model.kv_heads + model.heads) * model.head_dim + model.feed_forward)


class Full(Recompute):
    """`full`: the whole layer."""

    name = "full"
    repeats_all = True

    def kept(self, layer: LayerBytes) -> float:
        return layer.s

    def peaks(self, layer: LayerBytes) -> Peaks:
        w2 = layer.f + 4 * layer.g + 3 * layer.f  # its output, which early stop spares `selective`
        output = layer.q + layer.log_sum_exp  # attention's
        return _repeating(layer, rotating=layer.qkv, attended=output, w1=layer.f, w2=w2)


def _of_products(model: ModelShape, widths: int) -> float:
    """The share of matrix products of so many columns or rows in those of a layer."""
    return widths / (2 * (model.kv_heads + model.heads) * model.head_dim + 3 * model.feed_forward)


def _repeating(
    layer: LayerBytes,
    *,
    attended: float,
    rotating: float = 0.0,
    w1: float = 0.0,
    w2: float = 0.0,
    at_attention: float = 0.0,
    regathers: bool = True,
) -> Peaks:
    """The fullest moments where layers are repeated: the module's, with what a kind holds more or less of
    after attention, while it rotates, of w1 and w2, and at attention's gradients."""
    s, g, q, f = layer.s, layer.g, layer.q, layer.f
    gathered = g + q + layer.keys + layer.gathering
    forward = s + np.maximum(np.maximum(2 * g + 3 * f + w1, gathered), g + q + layer.rotating)
    weights = w1 + np.maximum(3 * g + 4 * f, 4 * g + f)
    moments = [
        2 * g + (layer.gathering + layer.sent if layer.shared_keys and regathers else 0.0),
        4 * g if layer.gathers else 0.0,
        weights,
        w2,
        w1 + 2 * g + 5 * f,
    ]
    at_hand = 2 * s + q + layer.joined + layer.rotary
    held = at_hand + layer.keys + layer.normed + attended
    attention = held + g + 2 * q + 2 * layer.outputs + layer.key_gradients + at_attention
    rotated = at_hand + 2 * g + layer.rotating + rotating
    backward = reduce(np.maximum, [rotated, *(held + moment for moment in moments), attention])
    return Peaks(forward, backward, attention, held + weights)


KINDS: tuple[Recompute, ...] = (KeepAll(), KeepProducts(), Selective(), Full())
"""From the one that keeps most."""

CHECKPOINTING: dict[str, Recompute] = {kind.name: kind for kind in KINDS}
"""By the names that reports use."""
