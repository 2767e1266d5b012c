"""gpt-oss in Hugging Face's format."""

from __future__ import annotations

from typing import Any

from torchtitan.models.gpt_oss.model import GptOssModel
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

NAMES = {"gate_up_proj": "mlp1_weight_EGD", "gate_up_proj_bias": "mlp1_bias_EG"}
NAMES |= {"down_proj": "mlp2_weight_EDF", "down_proj_bias": "mlp2_bias_ED"}
THEIRS, OURS = "model.layers.{}.mlp.experts.", "layers.{}.moe.routed_experts.inner_experts."
TURNED = (".experts.gate_up_proj", ".experts.down_proj")


class GptOssAdapter(GptOssStateDictAdapter):
    """torchtitan's, which in 0.3.0 has former names of the experts' weights and passes over them, with those
    of today, and with transformers' for weights that are not quantised. There they are (experts, in, out)."""

    def __init__(self, model_config: GptOssModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        kept = {theirs: ours for theirs, ours in self.from_hf_map.items() if not theirs.startswith(THEIRS)}
        self.from_hf_map = kept | {THEIRS + theirs: OURS + ours for theirs, ours in NAMES.items()}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return _turned(super().to_hf(state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return super().from_hf(_turned(hf_state_dict))


def _turned(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(TURNED) else tensor
        for name, tensor in tensors.items()
    }
