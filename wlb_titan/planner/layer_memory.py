"""What a transformer layer and the loss hold of each token: the arithmetic below `memory.py`.

All figures are bytes on one GPU for each token of the micro-batch, of all context-parallel ranks together: a
rank that holds one token in CP x TP counts a CP x TP-th of its bytes. In elements of the compute type:

    s   hidden state between blocks, divided by sequence parallelism     hidden / (CP x TP)
    g   the same gathered over the tensor-parallel ranks                 hidden / CP
    q   queries, and attention's output                                  query heads x head_dim / (CP x TP)
    k   keys, or values                                                  key heads x head_dim / (CP x TP)
    f   one inner activation of the MLP                                  feed_forward / (CP x TP)
    K   keys and values of the whole micro-batch                         2 x key heads x head_dim / TP

Kept by a layer from its forward pass to its backward pass (compare Korthikanti et al., Reducing Activation
Recomputation, section 4), with attention's log-sum-exp in float32 in the first two:

    none        2 s + 2 g + 2 q + 4 f + K   residuals, the inputs of QKV and of the MLP as gathered, rotated
                                            queries, attention's output; both inner activations, gate, product
    selective   s + (q + 2 k) + q + f       the layer's input; the outputs of every second matrix product,
                                            which are QKV and w1 (never w2), and attention's output
    full        s                           the layer's input

A backward pass recomputes what is missing, layer by layer, and makes gradients. Its fullest moment is one of:

    gathering K and V again     2 g + K + 2 k
    rotating again              2 g + 4 (q + k), in float32, before K is there
    gathering the MLP's input   4 g, where tensor parallelism gathers: the collective's output and its copy
    the gradient of w2          3 g + 4 f: inputs of QKV and of the MLP, the output's gradient; w3's output,
                                silu, product and the product's gradient
    the gradient of silu        2 g + 5 f
    the gradients of w1, w3     4 g + f: two inputs, and the gradient of the MLP's input from each
    the gradient of attention   g + 2 q + K: the gradients of output and q, and those of K and V

and besides, in all of them, two hidden states (the residual and the gradient that comes in), q, the keys and
values that attention needs again, and the rotary factors of the rank's tokens. With `full` a layer also makes
attention's output, w1's and w2's outputs again; with `none` what is kept is not counted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wlb_titan.planner.analytic import ModelShape
from wlb_titan.planner.degrees import Degrees

if TYPE_CHECKING:
    from wlb_titan.planner.memory import MemorySettings

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes a token on one GPU, as the module describes them.

    Attributes:
        hidden, gathered: s and g above.
        kept: of one layer from its forward pass to its backward pass.
        forward: of the layer whose forward pass runs, besides what it keeps.
        backward: of the layer whose backward pass runs, besides what it kept.
        loss: of the loss, besides the hidden states of which it is.
        inputs: token ids, positions and labels, int64, and the order of the keys.
    """

    hidden: float
    gathered: float
    kept: float
    forward: float
    backward: float
    loss: float
    inputs: float

    @classmethod
    def of(cls, model: ModelShape, degrees: Degrees, settings: MemorySettings) -> TokenBytes:
        """Of a model at some degrees."""
        cp, tp, size = degrees.context, degrees.tensor, settings.compute_bytes
        g = model.hidden * size / cp
        s = g / tp if settings.sequence_parallel else g
        q = model.heads * model.head_dim * size / (cp * tp)
        k = model.kv_heads * model.head_dim * size / (cp * tp)
        f = model.feed_forward * size / (cp * tp)
        all_keys = 2 * k * cp if cp > 1 else k
        log_sum_exp = FLOAT32 * model.heads / (cp * tp)
        rotary = FLOAT32 * model.head_dim / cp
        products = {"none": 4, "selective": 1, "full": 0}[settings.checkpointing]

        qkv = q + 2 * k
        kept = s
        if settings.checkpointing == "selective":
            kept += qkv + q + f + log_sum_exp
        elif settings.checkpointing == "none":
            # Values that are a view of QKV's output keep the whole of it.
            kept += s + 2 * g + 2 * q + 4 * f + log_sum_exp + all_keys + (qkv if cp == 1 else 0)

        key_gradients = all_keys if cp > 1 else 2 * k
        if settings.checkpointing == "none":
            forward = g
            backward = 2 * s + max(g + f, 3 * f, 2 * g + f, 2 * q + 2 * key_gradients)
        else:
            inner = (1 - products) * f  # w1's output, where it is not kept
            again = 0.0 if products else 2 * q + log_sum_exp + (2 * k if cp == 1 else 0)
            at_hand = 2 * s + q + rotary
            forward = s + max(2 * g + 3 * f + inner, g + q + 2 * all_keys, g + 5 * q + 4 * k)
            backward = at_hand + max(
                again + 2 * g + 4 * (q + k),
                again
                + all_keys
                + max(
                    2 * g + (all_keys + 2 * k if cp > 1 else 0),
                    (4 * g if tp > 1 and settings.sequence_parallel else 0),
                    inner + 3 * g + 4 * f,
                    inner + (g + 3 * g + 3 * f if not products else 0),
                    inner + 2 * g + 5 * f,
                    inner + 4 * g + f,
                    g + 2 * q + key_gradients,
                ),
            )
        logits = model.vocabulary / (cp * tp * settings.loss_chunks) * (size + (4 if tp > 1 else 3) * FLOAT32)
        whole_gradient = FLOAT32 * model.hidden / cp if settings.loss_chunks > 1 else 0.0
        return cls(
            hidden=s,
            gathered=g,
            kept=kept,
            forward=forward,
            backward=backward,
            loss=whole_gradient + max(logits, g if whole_gradient else 0.0),
            inputs=3 * 8 / cp + (8 if cp > 1 else 0),
        )
