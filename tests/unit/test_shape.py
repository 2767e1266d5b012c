"""What the workload model reads off torchtitan's configurations."""

import pytest

from wlb_titan.runtime.configured import model_shape
from wlb_titan.runtime.models.bases import base_config

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
