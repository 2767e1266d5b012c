"""The numbers of a torchtitan model that the workload model and the MFU need."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchtitan.models.common.attention import BaseAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear

from wlb_titan.cost.models import ModelShape


def model_shape(model: Decoder.Config) -> ModelShape:
    """Reads them off the configuration: the mean layer's MLP, and of experts those that one token visits."""
    attention = model.first_attention
    assert attention is not None
    if has_latent_attention(model):
        kv_heads = attention.n_heads
        head_dim, v_head_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    else:
        kv_heads = attention.n_kv_heads or attention.n_heads
        head_dim, v_head_dim = attention.head_dim or model.dim // attention.n_heads, None
    windows = Counter(layer.attention.inner_attention.window for layer in model.layers)
    return ModelShape(
        layers=len(model.layers),
        hidden=model.dim,
        heads=attention.n_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=sum(map(_feed_forward, model.layers)) // len(model.layers),
        vocabulary=model.vocab_size,
        unvisited_weights=sum(_unvisited(layer, model.dim) for layer in model.layers) // len(model.layers),
        experts=max((layer.moe.num_experts for layer in model.layers if layer.moe is not None), default=0),
        routed_width=sum(map(_routed_width, model.layers)) // len(model.layers),
        visits=sum(layer.moe.router.top_k for layer in model.layers if layer.moe is not None)
        / len(model.layers),
        v_head_dim=v_head_dim,
        projections=_projections(attention),
        windows=tuple((window, layers) for window, layers in windows.items() if window is not None),
        tied=model.enable_weight_tying,
    )


def has_latent_attention(model: Decoder.Config) -> bool:
    """Whether keys and values come from a latent vector (multi-head latent attention)."""
    return hasattr(model.first_attention, "kv_lora_rank")


def _feed_forward(layer: Any) -> int:
    """Inner width of a layer's MLP, or of the experts that a token visits."""
    if layer.moe is None:
        return layer.feed_forward.w1.out_features
    shared = layer.moe.shared_experts
    return _routed_width(layer) + (shared.w1.out_features if shared is not None else 0)


def _routed_width(layer: Any) -> int:
    """The part of `_feed_forward` in routed experts."""
    if layer.moe is None:
        return 0
    width: int = layer.moe.router.top_k * layer.moe.routed_experts.inner_experts.hidden_dim
    return width


def _unvisited(layer: Any, hidden: int) -> int:
    """Weights of a layer's experts that a token does not visit."""
    if layer.moe is None:
        return 0
    unvisited = layer.moe.num_experts - layer.moe.router.top_k
    return unvisited * 3 * hidden * layer.moe.routed_experts.inner_experts.hidden_dim


def _projections(attention: BaseAttention.Config) -> int:
    """Weights of an attention layer's matrix products."""
    linears = [linear for _, linear, _, _ in attention.traverse(Linear.Config)]
    if isinstance(qkv := getattr(attention, "qkv_linear", None), QKVLinear.Config):
        linears.append(qkv.wkv)  # which stands for keys and for values
    return sum(linear.in_features * linear.out_features for linear in linears)


def has_experts(model: Decoder.Config) -> bool:
    """Whether a layer of the model is a mixture of experts."""
    return any(layer.moe is not None for layer in model.layers)
