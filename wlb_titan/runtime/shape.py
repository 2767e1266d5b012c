"""The numbers of a torchtitan model that the workload model and the MFU need."""

from __future__ import annotations

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder

from wlb_titan.cost.models import ModelShape


def model_shape(model: Decoder.Config) -> ModelShape:
    """Reads them off the configuration; of experts, those that one token visits count."""
    attention = model.first_attention
    assert isinstance(attention, GQAttention.Config)
    layer = model.layers[0]
    if layer.moe is None:
        feed_forward = layer.feed_forward.w1.out_features
    else:
        feed_forward = layer.moe.router.top_k * layer.moe.routed_experts.inner_experts.hidden_dim
        if layer.moe.shared_experts is not None:
            feed_forward += layer.moe.shared_experts.w1.out_features
    return ModelShape(
        layers=len(model.layers),
        hidden=model.dim,
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or model.dim // attention.n_heads,
        feed_forward=feed_forward,
        vocabulary=model.vocab_size,
    )


def has_experts(model: Decoder.Config) -> bool:
    """Whether a layer of the model is a mixture of experts."""
    return any(layer.moe is not None for layer in model.layers)
