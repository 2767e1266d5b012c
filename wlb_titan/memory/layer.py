"""Bytes that a transformer layer and the loss hold of each token: the arithmetic below `peak.py`.

All figures are bytes on one GPU for each token of the micro-batch, of all context-parallel ranks together: a
rank that holds one token in CP x TP counts a CP x TP-th of its bytes. In elements of the compute type:

    s   hidden state between blocks, divided by sequence parallelism     hidden / (CP x TP)
    g   the same gathered over the tensor-parallel ranks                 hidden / CP
    q   queries, and attention's output                                  query heads x head_dim / (CP x TP)
    k   keys, or values                                                  key heads x head_dim / (CP x TP)
    f   one inner activation of the MLP                                  feed_forward / (CP x TP)
    K   keys and values that a rank's documents have                     2 x key heads x head_dim / TP,
                                                                         times `KeyShares.held`
    G   those of them that come from other ranks, with its own share     the same, times `KeyShares.gathered`

Kept by a layer from its forward pass to its backward pass (compare Korthikanti et al., Reducing Activation
Recomputation, section 4), with attention's log-sum-exp in float32 in the first two, and in the first the
rotary factors of the rank's tokens:

    none        2 s + 2 g + 2 q + 4 f + K   residuals, the inputs of QKV and of the MLP as gathered, rotated
                                            queries, attention's output; both inner activations, gate, product
    selective   s + (q + 2 k) + q + f       the layer's input; the outputs of every second matrix product,
                                            which are QKV and w1 (never w2), and attention's output
    full        s                           the layer's input

A backward pass recomputes what is missing, layer by layer, and makes gradients. Its fullest moment is one of:

    gathering K and V again     2 g + G + 2 k
    rotating again              2 g + 4 (q + k), in float32, before K is there
    gathering the MLP's input   4 g, where tensor parallelism gathers: the collective's output and its copy
    the gradient of w2          3 g + 4 f: inputs of QKV and of the MLP, the output's gradient; w3's output,
                                silu, product and the product's gradient
    the gradient of silu        2 g + 5 f
    the gradients of w1, w3     4 g + f: two inputs, and the gradient of the MLP's input from each
    the gradient of attention   g + 2 q + K: the gradients of output and q, and those of K and V

and besides, in all of them, two hidden states (the residual and the gradient that comes in), q, the keys and
values that attention needs again, and the rotary factors of the rank's tokens. Only while q and k are rotated
QKV's output is still there: attention gets a copy of the values. With `full` a layer also makes attention's
output, w1's and w2's outputs again; with `none` what is kept is not counted again.
"""

from __future__ import annotations

from dataclasses import dataclass

from wlb_titan.context import ALL_KEYS, Exchange, KeyShares, gathered
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import ModelShape
from wlb_titan.memory.settings import MemorySettings

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes a token on one GPU, as the module describes them.

    Attributes:
        hidden, gathered: s and g above.
        kept: bytes of one layer from its forward pass to its backward pass.
        offloaded: bytes of it that lie in the host's memory meanwhile and would be kept otherwise.
        forward: bytes of the layer whose forward pass runs, besides what it keeps.
        backward: bytes of the layer whose backward pass runs, besides what it kept, at its fullest moment.
        attention: the same at the moment of attention's gradients, which go into the cache of slices.
        waiting: bytes of one layer between the two halves of a split backward pass, besides what it kept:
            the gradients of its linear layers' and norms' outputs.
        loss: bytes of the loss, besides the hidden states of which it is, at its softmax's fullest moment.
        head: the same at the moment of the head's gradient.
        inputs: token ids, positions and labels, int64, and the order of the keys.
        cached: K and V of one layer, which a slice leaves to those behind it.
        cached_gradients: their gradients, added up in float32.
    """

    hidden: float
    gathered: float
    kept: float
    offloaded: float
    forward: float
    backward: float
    attention: float
    waiting: float
    loss: float
    head: float
    inputs: float
    cached: float
    cached_gradients: float

    @property
    def held(self) -> float:
        """Bytes of one layer and a document in slices: all that it may hold of a token at once besides the
        pass at hand."""
        return self.kept + self.cached + self.cached_gradients

    @classmethod
    def of(
        cls,
        model: ModelShape,
        degrees: Degrees,
        settings: MemorySettings,
        exchange: Exchange | None = None,
        keys: KeyShares = ALL_KEYS,
    ) -> TokenBytes:
        """Of a model at some degrees; without an `exchange` all ranks gather keys and values.

        A rank has `keys` of those of a micro-batch; of documents in slices all are cached.
        """
        cp, tp = degrees.context, degrees.tensor
        exchange = exchange or gathered(model, tp, cp)
        layer = _Layer.of(model, degrees, settings, exchange, keys)
        cached = exchange.keys * settings.compute_bytes
        forward, backward, attention = layer.passes(settings.checkpointing)
        kept = layer.kept(settings.checkpointing)
        offloaded = kept * settings.offload
        moving = 2 * offloaded  # the layer at hand, and the one that travels meanwhile
        # The logits and, in float32, log-softmax and gradients; the loss-parallel softmax has one copy more.
        softmax = settings.compute_bytes + (4 if tp > 1 else 3) * FLOAT32
        logits = model.vocabulary / (cp * tp * settings.loss_chunks)
        loss, head = logits * softmax, logits * settings.compute_bytes
        if settings.loss_chunks > 1:
            states = FLOAT32 * model.hidden / cp
            loss, head = states + max(loss, layer.g), states + head
        return cls(
            hidden=layer.s,
            gathered=layer.g,
            kept=kept - offloaded,
            offloaded=offloaded,
            forward=forward + moving,
            backward=backward + moving,
            attention=attention + moving,
            waiting=2 * layer.s + 2 * layer.g + layer.q + 2 * layer.k + 2 * layer.f,
            loss=loss,
            head=head,
            inputs=3 * 8 / cp + (8 if cp > 1 else 0),
            cached=cached,
            cached_gradients=cached * FLOAT32 / settings.compute_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """The module's symbols in bytes, and what follows from them.

    Attributes:
        s, g, q, k, f: as above.
        keys: K; without context parallelism the rotated keys and a copy of the values.
        gathering: what collectives bring of them, before it is in order.
        key_gradients: gradients of K and V, as attention gives them.
        sent: what a rank sends to the others before attention.
        outputs: queries, and as many outputs, of the tokens that attention works on, where they are others
            than the rank's own.
        exchanged: what `selective` keeps of the ranks' exchange.
        log_sum_exp: log-sum-exp of attention, in float32.
        rotary: factors of the rank's tokens.
        shared_keys: whether context-parallel ranks exchange K and V.
        gathers: whether tensor-parallel ranks gather hidden states.
    """

    s: float
    g: float
    q: float
    k: float
    f: float
    keys: float
    gathering: float
    key_gradients: float
    sent: float
    outputs: float
    exchanged: float
    log_sum_exp: float
    rotary: float
    shared_keys: bool
    gathers: bool

    @classmethod
    def of(
        cls,
        model: ModelShape,
        degrees: Degrees,
        settings: MemorySettings,
        exchange: Exchange,
        held: KeyShares,
    ) -> _Layer:
        cp, tp, size = degrees.context, degrees.tensor, settings.compute_bytes
        g = model.hidden * size / cp
        k = model.kv_heads * model.head_dim * size / (cp * tp)
        all_keys = exchange.keys * size
        gathers = tp > 1 and settings.sequence_parallel
        return cls(
            s=g / tp if gathers else g,
            g=g,
            q=model.heads * model.head_dim * size / (cp * tp),
            k=k,
            f=model.feed_forward * size / (cp * tp),
            keys=2 * k if cp == 1 else all_keys * held.held,
            gathering=2 * k if cp == 1 else all_keys * held.gathered,
            key_gradients=all_keys * held.held,
            sent=0.0 if cp == 1 else exchange.sent * size,
            outputs=exchange.outputs * size,
            exchanged=exchange.kept * size,
            log_sum_exp=FLOAT32 * model.heads / (cp * tp),
            rotary=settings.rotary_bytes * model.head_dim / cp,
            shared_keys=cp > 1,
            gathers=gathers,
        )

    def kept(self, checkpointing: str) -> float:
        s, g, q, f = self.s, self.g, self.q, self.f
        if checkpointing == "none":
            attention = 2 * q + 2 * self.outputs + self.keys + self.log_sum_exp + self.rotary
            return 2 * s + 2 * g + attention + 4 * f
        if checkpointing == "selective":
            return s + self.qkv + q + self.outputs + self.exchanged + f + self.log_sum_exp
        return s

    @property
    def qkv(self) -> float:
        """The output of QKV."""
        return self.q + 2 * self.k

    def passes(self, checkpointing: str) -> tuple[float, float, float]:
        """What is at hand at the fullest moment of a forward and of a backward pass, and in the backward pass
        at that of attention's gradients, besides what is kept."""
        s, g, q, k, f = self.s, self.g, self.q, self.k, self.f
        gradients = g + 2 * q + 2 * self.outputs + self.key_gradients
        if checkpointing == "none":
            attention = 2 * s + 2 * q + 2 * self.key_gradients - 4 * f  # the MLP's activations are free
            return g, 2 * s + max(3 * f, 2 * g + f), attention
        full = checkpointing == "full"
        w1 = f if full else 0.0
        output = q + self.log_sum_exp if full else 0.0  # attention's, made again
        forward = s + max(2 * g + 3 * f + w1, g + q + self.keys + self.gathering, g + 5 * q + 4 * k)
        moments = [
            2 * g + (self.gathering + self.sent if self.shared_keys else 0.0),
            4 * g if self.gathers else 0.0,
            w1 + 3 * g + 4 * f,
            w1 + 4 * g + 3 * f if full else 0.0,  # w2's output, which early stop spares `selective`
            w1 + 2 * g + 5 * f,
            w1 + 4 * g + f,
        ]
        at_hand = 2 * s + q + self.rotary
        rotating = at_hand + 2 * g + 4 * (q + k) + (self.qkv if full else 0.0)
        # QKV's output is no longer needed, and at attention's gradients w1's neither.
        attended = at_hand + output + self.keys - (0.0 if full else self.qkv)
        attention = attended + gradients - (0.0 if full else f)
        return forward, max(rotating, attended + max(moments), attention), attention
