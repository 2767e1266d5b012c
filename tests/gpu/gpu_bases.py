"""Bases of the GPU tests: two layers of real models, with the head dims that the kernels are made for."""

import bases
from torchtitan.models.deepseek_v3 import config_registry as deepseek_registry
from torchtitan.models.gpt_oss import config_registry as gpt_oss_registry
from torchtitan.models.qwen3 import config_registry as qwen3_registry
from watching import watched

from wlb_titan.runtime.registry import base_config


def llama():
    """12 heads of 128 and as many key heads."""
    return two_layers(base_config("llama2_550m"))


def qwen3():
    """16 heads of 128, two of them on a key head."""
    return two_layers(qwen3_registry.qwen3_0_6b())


def gpt_oss():
    """Heads of 64, eight of them on a key head; sinks; a layer with a window of 128 tokens and one without;
    four experts."""
    return two_layers(bases._few_experts(gpt_oss_registry.gpt_oss_20b()))


def deepseek_v3():
    """Keys of 192 and values of 128; a layer with four experts and one without."""
    return two_layers(bases._few_experts(deepseek_registry.deepseek_v3_16b()))
