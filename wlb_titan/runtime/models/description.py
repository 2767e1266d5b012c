"""A config.json: what a model's description says, compared with a base."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE

from wlb_titan.runtime.configured import model_shape

MODEL_TYPES = {"llama3": "llama", "qwen3": "qwen3", "gpt_oss": "gpt_oss", "deepseek_v3": "deepseek_v3"}
"""torchtitan's packages of models, and transformers' names."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of Qwen, gpt-oss and DeepSeek
ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "swiglu_alpha": 1.702}
FIXED |= {"rope_interleave": True, "topk_method": "noaux_tc"}  # of DeepSeek-V3
"""What torchtitan's models compute without a setting for it."""
WITHOUT_EFFECT = re.compile(
    "_.*|architectures|auto_map|.*_version|dtype|torch_dtype|.*_token_id|use_cache|initializer_range|return_dict|"
    "max_position_embeddings|max_window_layers|pretraining_tp|ep_size|rope_parameters|rope_scaling|type|"
    "id2label|label2id|router_aux_loss_coef|aux_loss_alpha|seq_aux|num_nextn_predict_layers|intermediate_size|"
    "max_length|num_beams|num_beam_groups|num_return_sequences|temperature|top_[kp]|typical_p|.*_penalty"
)
"""What a config.json says that no forward pass of a pre-trained model reads: names, ids, how to generate, how
weights begin, losses beside the model's. `intermediate_size` is described wherever a layer has it."""


def differences(model: Decoder.Config, description: Mapping[str, Any]) -> list[str]:
    """Where a description, as of `read_description`, differs from a model. A name that is not known here
    passes with false, 0 or nothing: the feature is not used."""
    expected = FIXED | described(model)
    return [
        f"{name} is {value} there and {expected.get(name, 'unknown')} in the base"
        for name, value in description.items()
        if (value != expected[name] if name in expected else value and not WITHOUT_EFFECT.fullmatch(name))
    ]


def described(model: Decoder.Config) -> dict[str, Any]:
    """A model's values in a config.json, under their names there."""
    shape, attention = model_shape(model), model.first_attention
    rope = attention.rope
    dense = [layer.moe is None for layer in model.layers]
    windows = [layer.attention.inner_attention.window for layer in model.layers]
    values = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocabulary,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": attention.wo.bias,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": next(filter(None, windows), None),
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": shape.tied,
        "rope_theta": rope.theta,
        "rope_type": {"none": "default", "llama": "llama3", "yarn": "yarn"}[rope.scaling],
    }
    package = type(model).__module__.removeprefix("torchtitan.models.").split(".")[0]
    if package in MODEL_TYPES:
        mixed = package == "qwen3" and not all(dense)
        values["model_type"] = MODEL_TYPES[package] + "_moe" * mixed
    if latent := shape.v_head_dim is not None:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values |= {name: getattr(attention, name) for name in names}
        values |= {"q_lora_rank": attention.q_lora_rank or None, "qk_head_dim": shape.head_dim}
        values["head_dim"] = attention.qk_rope_head_dim
    if rope.scaling == "llama":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        values |= {"factor": rope.scaling_factor, **{name: getattr(rope, name) for name in names}}
    elif rope.scaling == "yarn":
        values |= {name: getattr(rope, name) for name in ("beta_fast", "beta_slow", "truncate")}
        values |= {"factor": rope.rope_factor, "original_max_position_embeddings": rope.original_seq_len}
        values["initial_context_length"] = rope.original_seq_len
        values |= dict.fromkeys(("mscale", "mscale_all_dim"), attention.mscale) if latent else {}
    for layer in model.layers:
        if layer.moe is None:
            values["intermediate_size"] = layer.feed_forward.w1.out_features
        else:
            values |= _described_experts(layer.moe)
    if not all(dense):  # dense layers are the first ones
        values |= {"first_k_dense_replace": sum(dense), "mlp_only_layers": [*range(sum(dense))]}
        values |= dict.fromkeys(("decoder_sparse_step", "moe_layer_freq"), 1)
    return values


def _described_experts(moe: MoE.Config) -> dict[str, Any]:
    router, experts, shared = moe.router, moe.routed_experts.inner_experts, moe.shared_experts
    values = dict.fromkeys(EXPERTS, moe.num_experts) | {
        "num_experts_per_tok": router.top_k,
        "experts_per_token": router.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "n_shared_experts": shared.w1.out_features // experts.hidden_dim if shared else 0,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
        "scoring_func": router.score_func,
        "n_group": router.num_expert_groups or 1,
        "topk_group": router.num_limited_groups or 1,
    }
    if limit := getattr(experts, "swiglu_limit", None):  # gpt-oss
        values |= {"swiglu_limit": limit, "intermediate_size": experts.hidden_dim}
    return values


def read_description(path: Path) -> dict[str, Any]:
    """A config.json as transformers reads it, with its defaults for what is left out; values for rotary
    positions are at the top level. A ValueError says why it cannot be read."""
    from transformers import CONFIG_MAPPING  # which takes a second

    config = json.loads(path.read_text(encoding="utf-8"))
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"{path} has no model_type that transformers knows, but {kind!r}")
    try:
        theirs = CONFIG_MAPPING[kind].from_dict(config)
    except Exception as error:  # of their checks, or of nonsense
        raise ValueError(f"transformers cannot read {path}: {' '.join(str(error).split())}") from error
    values = theirs.to_dict()
    values |= {
        alias: values.pop(name, None) for alias, name in theirs.attribute_map.items() if alias in config
    }
    values |= values.pop("rope_parameters", None) or {}
    return {"truncate": True} | values if values.get("rope_type") == "yarn" else values
