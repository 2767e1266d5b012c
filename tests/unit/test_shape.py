"""What the workload model reads off torchtitan's configurations."""

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.runtime.job import model_shape  # noqa: E402
from wlb_titan.runtime.models.bases import base_config  # noqa: E402

pytestmark = pytest.mark.slow

LLAMA = "llama3.config_registry:llama3_8b"
QWEN = "qwen3.config_registry:qwen3_30b_a3b"
GPT_OSS = "gpt_oss.config_registry:gpt_oss_20b"
DEEPSEEK = "deepseek_v3.config_registry:deepseek_v3_671b"
MUSE = "muse_glimmer.config_registry:muse_glimmer_30b"

# Parameters that one token visits, as published, less the embedding's where it is among them.
ACTIVE = {
    LLAMA: 8.03e9 - 128256 * 4096,
    QWEN: 3.35e9 - 151936 * 2048,
    GPT_OSS: 3.61e9,
    DEEPSEEK: 37.5e9 - 129280 * 7168,
}
FACTS = {
    LLAMA: {"experts": 0, "visits": 0.0, "routed_width": 0, "expert_weights": 0},
    QWEN: {"experts": 128, "visits": 8, "routed_width": 8 * 768, "expert_weights": 128 * 3 * 2048 * 768},
    GPT_OSS: {"layers": 24, "windows": ((128, 12),), "v_head_dim": None},
    DEEPSEEK: {
        **{"head_dim": 192, "v_head_dim": 128, "heads": 128, "kv_heads": 128},
        **{"experts": 256, "visits": 8 * 58 / 61},  # three layers are dense
    },
    MUSE: {"windows": ((2048, 39),)},
}


def shape_of(base):
    return model_shape(base_config(f"torchtitan.models.{base}").model_spec.model)


@pytest.mark.parametrize("base", ACTIVE)
def test_weights_are_those_of_the_published_models(base):
    assert shape_of(base).linear_weights == pytest.approx(ACTIVE[base], rel=0.02)


@pytest.mark.parametrize("base", FACTS)
def test_heads_windows_and_experts(base):
    shape = shape_of(base)
    assert {name: getattr(shape, name) for name in FACTS[base]} == FACTS[base]
