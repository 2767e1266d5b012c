"""Bases of the tests: models cut down to a size that trains on a CPU in a second."""

import copy
import dataclasses
import functools

import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.deepseek_v3 import config_registry as deepseek_registry
from torchtitan.models.gpt_oss import config_registry as gpt_oss_registry
from torchtitan.models.muse_glimmer import config_registry as muse_registry
from torchtitan.models.qwen3 import config_registry as qwen3_registry

from wlb_titan.runtime.models.bases import base_config

VOCABULARY = 512


def trained_by(trainer, base):
    """A base with a trainer of the tests."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(trainer.Config):
        pass

    Config._owner = trainer
    return Config(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})


def llama(layers=2):
    """The debug model in small. Activation checkpointing would take a third of a step."""
    config = base_config("llama3_debug")
    model = config.model_spec.model
    model.layers = [copy.deepcopy(model.layers[i % 4]) for i in range(layers)]
    config.activation_checkpoint = None
    return small_vocabulary(config)


def small_vocabulary(config):
    model = config.model_spec.model
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    return config


def __getattr__(name):
    """`layers8`: `llama` with so many."""
    if not name.startswith("layers"):
        raise AttributeError(name)
    return functools.partial(llama, int(name.removeprefix("layers")))


def lora():
    """`llama` with adapters: all else is frozen."""
    return _adapted(llama())


def _adapted(config):
    model = config.model_spec.model
    config.model_spec.model = LoRAConverter(LoRAConverter.Config(rank=4, alpha=8.0)).convert(model)
    return config


def float8(**settings):
    """`llama` whose layers multiply in float8, emulated."""
    config, settings = llama(), {"emulate": True, "filter_fqns": ["lm_head"], **settings}
    converter = Float8LinearConverter.Config(**settings).build()
    config.model_spec.model = converter.convert(config.model_spec.model)
    return config


def float8_lora():
    """With adapters, which are not in float8."""
    return _adapted(float8())


def float8_kernels():
    """The same by kernels, which CPUs have for fake tensors only, as others are too slow."""
    return float8(emulate=False)


def float8_head():
    """With the head, whose tokens come in the loss's chunks."""
    return float8(filter_fqns=[])


def scaled_llama():
    """The same with rotary positions as Llama 3.1 scales them, for a model that knew 64 tokens before."""
    config = llama()
    for layer in config.model_spec.model.layers:
        scaled = {"theta": 500000.0, "scaling": "llama", "original_max_position_embeddings": 64}
        layer.attention.rope = dataclasses.replace(layer.attention.rope, **scaled)
    return config


def qwen3():
    return _cut(qwen3_registry.qwen3_debugmodel())


def qwen3_moe():
    """Two layers of four experts, of which a token visits two."""
    return few_experts(_cut(qwen3_registry.qwen3_moe_debug()))


def gpt_oss():
    """Sinks; a layer with a window of 24 tokens, and one without; experts, which take bfloat16 only, whose
    products are slow on most CPUs: 8 heads of its 64, two on a key head."""
    config = small_vocabulary(few_experts(_cut(gpt_oss_registry.gpt_oss_debugmodel_flex())))
    attention = config.model_spec.model.layers[0].attention
    assert attention.sliding_window_size is not None
    attention.sliding_window_size = 24
    config.training.mixed_precision_param = "bfloat16"
    for attention in (layer.attention for layer in config.model_spec.model.layers):
        linear, dim = attention.qkv_linear, attention.head_dim
        attention.n_heads, attention.n_kv_heads = linear.n_heads, linear.n_kv_heads = 8, 4
        linear.wqkv.out_features, attention.wo.in_features = (8 + 2 * 4) * dim, 8 * dim
        # Sinks that begin at zero would hide how they are read.
        attention.param_init["sinks"] = functools.partial(torch.nn.init.normal_, std=1.0)
    return config


def muse_glimmer():
    """A layer with a window of 24 tokens, and one without a window and without rotary positions."""
    config = muse_registry.muse_glimmer_debugmodel()
    layers = config.model_spec.model.layers
    assert layers[3].attention.window_size is None
    config.model_spec.model.layers = layers = [layers[2], layers[3]]
    layers[0].attention.window_size = 24
    return _cut(config)


def deepseek_v3():
    """Multi-head latent attention in a layer without experts and in one with them."""
    config = few_experts(_cut(deepseek_registry.deepseek_v3_debugmodel()))
    assert [layer.moe is None for layer in config.model_spec.model.layers] == [True, False]
    return config


def few_experts(config):
    """Four experts, of which a token visits two."""
    for layer in config.model_spec.model.layers:
        if layer.moe is None:
            continue
        moe, experts = layer.moe, layer.moe.routed_experts.inner_experts
        dispatcher = moe.routed_experts.token_dispatcher
        experts.hidden_dim = 64
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = 4
        experts.num_experts = dispatcher.num_experts = 4
        moe.router.top_k = dispatcher.top_k = 2
    return config


def _cut(config):
    config.training.mixed_precision_param = "float32"
    return two_layers(config)


def two_layers(config):
    model = config.model_spec.model
    model.layers = model.layers[:2]
    config.validator.enable = False
    return config
