"""Kinds of activation checkpointing: what a layer keeps for its backward pass, and what it repeats there.

In the symbols of `layer.py` a layer keeps from its forward pass to its backward pass (compare Korthikanti et
al., Reducing Activation Recomputation, section 4), besides attention's log-sum-exp in float32 (but for
`full`) and the rotary factors of the rank's tokens (with `none`):

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
attention needs again, and the rotary factors of the rank's tokens. QKV's output is only there while q and k
are rotated, as attention gets a copy of the values. Norms of queries and keys, where a model has them, need
their inputs, q + k, from then on, and with `none` from the forward pass on. With `full` a layer also makes
the outputs of attention, w1 and w2 again; with `none` and `keys` what is kept is not counted again.

Compiled code also keeps what tensor parallelism reduces of wo's output, s, for `keys` and `selective`, which
else make it again with a reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from wlb_titan.job import Job
    from wlb_titan.memory.layer import LayerBytes


class Moments(NamedTuple):
    """Bytes a token of one layer, besides those it keeps, where its passes are fullest."""

    forward: float
    backward: float
    attention: float  # at attention's gradients, which go into the cache of slices


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
    def moments(self, layer: LayerBytes) -> Moments: ...

    def seconds(self, job: Job, tensor: float) -> float:
        """What a layer repeats for each token, but for attention and its exchange; `tensor`: seconds a token
        that a layer waits for tensor parallelism in one pass."""
        return 0.0


class KeepAll(Recompute):
    """`none`: nothing is repeated."""

    name = "none"
    splits_backward, repeats_moves = True, False

    def kept(self, layer: LayerBytes) -> float:
        attention = 2 * layer.q + 2 * layer.outputs + layer.keys + layer.log_sum_exp + layer.rotary
        return 2 * layer.s + 2 * layer.g + attention + layer.normed + 4 * layer.f

    def less_keys(self, layer: LayerBytes) -> float:
        return layer.absent_keys if layer.shared_keys else 0.0

    def moments(self, layer: LayerBytes) -> Moments:
        s, g, q, f = layer.s, layer.g, layer.q, layer.f
        attention = 2 * s + 2 * q + 2 * layer.key_gradients - 4 * f  # the MLP's activations are free
        # What the MLP keeps is freed while gradients of its products are made.
        return Moments(g + s * layer.gathers, s + max(2 * f, 2 * g), attention)


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

    def moments(self, layer: LayerBytes) -> Moments:
        kept, f = layer.qkv + self._gathered(layer) + layer.reduced, layer.f
        return _repeating(layer, attended=-kept, w1=-f, at_attention=-2 * f, regathers=False)

    def seconds(self, job: Job, tensor: float) -> float:
        wo = job.model.heads * job.model.head_dim if job.memory.reduces_again(job.degrees) else 0
        return _repeated_seconds(job, wo, tensor)


class Selective(Recompute):
    """`selective`: every second matrix product and the element-wise operators, with the gathers they need."""

    name = "selective"

    def kept(self, layer: LayerBytes) -> float:
        return layer.s + layer.compiled + layer.around_attention + layer.f

    def moments(self, layer: LayerBytes) -> Moments:
        # QKV's output is no longer needed, and at attention's gradients w1's neither.
        return _repeating(layer, attended=-layer.qkv, at_attention=-layer.f)

    def seconds(self, job: Job, tensor: float) -> float:
        model = job.model
        # Keys, the attention's output and the MLP's second product, of all seven.
        widths = (model.kv_heads + model.heads) * model.head_dim + model.feed_forward
        return _repeated_seconds(job, widths, tensor)


class Full(Recompute):
    """`full`: the whole layer."""

    name = "full"
    repeats_all = True

    def kept(self, layer: LayerBytes) -> float:
        return layer.s

    def moments(self, layer: LayerBytes) -> Moments:
        w2 = layer.f + 4 * layer.g + 3 * layer.f  # its output, which early stop spares `selective`
        output = layer.q + layer.log_sum_exp  # attention's
        return _repeating(layer, rotating=layer.qkv, attended=output, w1=layer.f, w2=w2)


def _repeated_seconds(job: Job, widths: int, tensor: float) -> float:
    """Seconds a token of what a backward pass repeats: matrix products, by their widths; all element-wise
    operators; and of tensor parallelism's four collectives two gathers, and the reduction behind wo."""
    model, token = job.model, job.token
    products = widths / (2 * (model.kv_heads + model.heads) * model.head_dim + 3 * model.feed_forward)
    collectives = 3 / 4 if job.memory.reduces_again(job.degrees) else 1 / 2
    return token.matrices * products + token.elements + tensor * collectives


def _repeating(
    layer: LayerBytes,
    *,
    attended: float,
    rotating: float = 0.0,
    w1: float = 0.0,
    w2: float = 0.0,
    at_attention: float = 0.0,
    regathers: bool = True,
) -> Moments:
    """The fullest moments where layers are repeated: the module's, with what a kind holds more or less of
    after attention, while it rotates, of w1 and w2, and at attention's gradients."""
    s, g, q, f = layer.s, layer.g, layer.q, layer.f
    gathered = g + q + layer.keys + layer.gathering
    forward = s + np.maximum(np.maximum(2 * g + 3 * f + w1, gathered), g + q + layer.rotating)
    moments = [
        2 * g + (layer.gathering + layer.sent if layer.shared_keys and regathers else 0.0),
        4 * g if layer.gathers else 0.0,
        w1 + 3 * g + 4 * f,
        w2,
        w1 + 2 * g + 5 * f,
        w1 + 4 * g + f,
    ]
    at_hand = 2 * s + q + layer.rotary
    held = at_hand + layer.keys + layer.normed + attended
    attention = held + g + 2 * q + 2 * layer.outputs + layer.key_gradients + at_attention
    rotated = at_hand + 2 * g + layer.rotating + rotating
    backward = reduce(np.maximum, [rotated, *(held + moment for moment in moments), attention])
    return Moments(forward, backward, attention)


KINDS: tuple[Recompute, ...] = (KeepAll(), KeepProducts(), Selective(), Full())
"""From the one that keeps most."""

CHECKPOINTING: dict[str, Recompute] = {kind.name: kind for kind in KINDS}
"""By the names that reports use."""
