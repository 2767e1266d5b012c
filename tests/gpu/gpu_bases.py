"""Bases of the GPU tests: two layers of real models, with the head dims that the kernels are made for."""

from functools import partial

import bases
from bases import muse_glimmer, qwen3_moe  # noqa: F401
from torchtitan.config import ParallelismConfig
from torchtitan.models.deepseek_v3 import config_registry as deepseek_registry
from torchtitan.models.gpt_oss import config_registry as gpt_oss_registry
from torchtitan.models.qwen3 import config_registry as qwen3_registry
from trainers import watched

from wlb_titan.runtime.models.bases import base_config


def llama():
    """12 heads of 128, each with keys of its own."""
    return _small(base_config("llama2_550m"))


def qwen3():
    """16 heads of 128, two of them on a key head."""
    return _small(qwen3_registry.qwen3_0_6b())


def qwen3_30b_a3b():
    """Four layers of the real model, all experts on one GPU."""
    config = qwen3_registry.qwen3_30b_a3b()
    config.model_spec.model.layers = config.model_spec.model.layers[:4]
    config.parallelism = ParallelismConfig()
    return config


def gpt_oss():
    """64 heads of 64, eight on a key head, with sinks; layers with a window of 128 tokens, and without."""
    return _small(bases.few_experts(gpt_oss_registry.gpt_oss_20b()))


def deepseek_v3():
    """16 heads with keys of 192 and values of 128; a layer without experts, and one with them."""
    return _small(bases.few_experts(deepseek_registry.deepseek_v3_16b()))


def __getattr__(name):
    """`watched_gpt_oss`: the same whose trainer writes what its steps wait for."""
    if not name.startswith("watched_"):
        raise AttributeError(name)
    return partial(watched, partial(base_config, f"gpu_bases:{name.removeprefix('watched_')}"))


def _small(config):
    """Two layers, no more tokens than the corpus has, one process."""
    config = bases.two_layers(config)
    config.parallelism = ParallelismConfig()  # theirs spreads experts
    return bases.small_vocabulary(config)
