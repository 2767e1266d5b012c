"""What the workload model reads off torchtitan's configurations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.job import Job
from wlb_titan.runtime.configured import model_shape
from wlb_titan.runtime.models.bases import base_config
from wlb_titan.runtime.one_rank.dry_run import Float32Linear

pytestmark = pytest.mark.slow

# Parameters that one token visits, as published, less the embedding's where it is among them; and facts.
MODELS = {
    "llama3.config_registry:llama3_8b": (
        8.03e9 - 128256 * 4096,
        {"experts": 0, "visits": 0.0, "routed_width": 0, "expert_weights": 0},
    ),
    "qwen3.config_registry:qwen3_30b_a3b": (
        3.35e9 - 151936 * 2048,
        {"experts": 128, "visits": 8, "routed_width": 8 * 768, "expert_weights": 128 * 3 * 2048 * 768},
    ),
    "gpt_oss.config_registry:gpt_oss_20b": (
        3.61e9,
        {"layers": 24, "windows": ((128, 12),), "v_head_dim": None},
    ),
    "deepseek_v3.config_registry:deepseek_v3_671b": (
        37.5e9 - 129280 * 7168,
        {"head_dim": 192, "v_head_dim": 128, "heads": 128, "kv_heads": 128, "experts": 256}
        | {"visits": 8 * 58 / 61},  # three layers are dense
    ),
    "muse_glimmer.config_registry:muse_glimmer_30b": (None, {"windows": ((2048, 39),)}),
}


@pytest.mark.parametrize("base", MODELS)
def test_weights_heads_windows_and_experts_are_those_of_the_published_models(base):
    shape = model_shape(base_config(f"torchtitan.models.{base}").model_spec.model)
    weights, facts = MODELS[base]
    assert weights is None or shape.linear_weights == pytest.approx(weights, rel=0.02)
    assert {name: getattr(shape, name) for name in facts} == facts


def test_frozen_weights_have_no_gradients():
    """LoRA's forward pass and its gradients of inputs are the model's."""
    whole, frozen = (model_shape(base_config(f"bases:{name}").model_spec.model) for name in ("llama", "lora"))
    assert frozen == replace(whole, frozen=True)
    assert whole.flops([100]) - frozen.flops([100]) == pytest.approx(2 * whole.linear_weights * 100)
    tokens, nothing = np.ones((1, 1)), np.zeros((1, 1))
    micro_batch = MicroBatches(tokens, *[nothing] * 5)
    passes = [pass_times(Job(window=64, micro_batches=1, model=m), micro_batch) for m in (whole, frozen)]
    assert passes[0].forward == passes[1].forward and passes[1].weights == 0 < passes[0].weights


def test_a_dry_run_s_router_computes_in_float32():
    """As under CUDA's autocast, of which that of CPUs warns that it does nothing."""
    gate = Float32Linear.Config(in_features=8, out_features=4).build().bfloat16()
    hidden = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    scores = gate(hidden)
    assert scores.dtype == torch.float32
    scores.sum().backward()
    assert hidden.grad.dtype == gate.weight.grad.dtype == torch.bfloat16
