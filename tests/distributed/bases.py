"""Bases of the tests: models cut down to a size that trains on a CPU in a second."""

import dataclasses

from torchtitan.models.qwen3 import config_registry

from wlb_titan.runtime.registry import base_config


def llama():
    """The debug model with two of its four layers."""
    config = base_config("llama3_debug")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    return config


def scaled_llama():
    """The same with rotary positions as Llama 3.1 scales them, for a model that knew 64 tokens before."""
    config = llama()
    for layer in config.model_spec.model.layers:
        layer.attention.rope = dataclasses.replace(
            layer.attention.rope, theta=500000.0, scaling="llama", original_max_position_embeddings=64
        )
    return config


def qwen3():
    return _cut(config_registry.qwen3_debugmodel())


def qwen3_moe():
    """Two layers of four experts, of which a token visits two."""
    config = _cut(config_registry.qwen3_moe_debug())
    for layer in config.model_spec.model.layers:
        moe = layer.moe
        moe.num_experts = moe.router.num_experts = 4
        moe.router.gate.out_features = 4
        moe.router.top_k = 2
        experts = moe.routed_experts.inner_experts
        experts.num_experts, experts.hidden_dim = 4, 64
        dispatcher = moe.routed_experts.token_dispatcher
        dispatcher.num_experts, dispatcher.top_k = 4, 2
    return config


def _cut(config):
    model = config.model_spec.model
    model.layers = model.layers[:2]
    config.training.mixed_precision_param = "float32"
    config.validator.enable = False
    return config
