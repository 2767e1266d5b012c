"""What the workload model reads off torchtitan's configurations."""

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.runtime.job import model_shape  # noqa: E402
from wlb_titan.runtime.models.registry import base_config  # noqa: E402

pytestmark = pytest.mark.slow

# Parameters that one token visits, as published, less the embedding's where it is among them.
ACTIVE = {
    "llama3.config_registry:llama3_8b": 8.03e9 - 128256 * 4096,
    "qwen3.config_registry:qwen3_30b_a3b": 3.35e9 - 151936 * 2048,
    "gpt_oss.config_registry:gpt_oss_20b": 3.61e9,
    "deepseek_v3.config_registry:deepseek_v3_671b": 37.5e9 - 129280 * 7168,
}


@pytest.mark.parametrize("base", ACTIVE)
def test_weights_are_those_of_the_published_models(base):
    shape = model_shape(base_config(f"torchtitan.models.{base}").model_spec.model)
    assert shape.linear_weights == pytest.approx(ACTIVE[base], rel=0.02)


def test_windows_and_head_dims():
    shape = model_shape(base_config("torchtitan.models.gpt_oss.config_registry:gpt_oss_20b").model_spec.model)
    assert shape.windows == ((128, 12),) and shape.layers == 24 and shape.v_head_dim is None
    name = "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_671b"
    shape = model_shape(base_config(name).model_spec.model)
    assert (shape.head_dim, shape.v_head_dim, shape.heads, shape.kv_heads) == (192, 128, 128, 128)
    name = "torchtitan.models.muse_glimmer.config_registry:muse_glimmer_30b"
    assert model_shape(base_config(name).model_spec.model).windows == ((2048, 39),)


def test_experts():
    shape = model_shape(base_config("torchtitan.models.qwen3.config_registry:qwen3_30b_a3b").model_spec.model)
    assert (shape.experts, shape.visits, shape.routed_width) == (128, 8.0, 8 * 768)
    assert shape.expert_weights == 128 * 3 * 2048 * 768
    name = "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_671b"
    shape = model_shape(base_config(name).model_spec.model)
    assert shape.experts == 256 and shape.visits == pytest.approx(8 * 58 / 61)  # three layers are dense
    llama = model_shape(base_config("torchtitan.models.llama3.config_registry:llama3_8b").model_spec.model)
    assert (llama.experts, llama.visits, llama.routed_width, llama.expert_weights) == (0, 0.0, 0, 0)
