"""Weights of Hugging Face's format: whether a folder of them is the model that a configuration trains.

torchtitan loads tensors by name and shape. What has neither, such as the base of the rotary positions, would
go unnoticed if it differed, and the corpus could be of another tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torchtitan.models.common.decoder import Decoder

from wlb_titan.corpus import Corpus
from wlb_titan.errors import UserError
from wlb_titan.runtime.job import has_latent_attention

KEY = "checkpoint.initial_load_path"
TOKENIZER = "tokenizer.json"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as Qwen, gpt-oss and DeepSeek call them


def check_weights(model: Decoder.Config, folder: Path, corpus: Corpus) -> None:
    """Compares a folder of weights with the model and the corpus.

    Args:
        folder: as it comes from the Hugging Face hub: config.json, *.safetensors, tokenizer.json.
        corpus: whose tokenizer must be that of the weights.

    Raises:
        UserError: something is missing or differs; the message begins with the key concerned.
    """
    if not folder.is_dir():
        raise UserError(f"{KEY}: there is no folder {str(folder)!r}.")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{KEY}: the folder {str(folder)!r} has no *.safetensors.")
    try:
        theirs = read_description(folder / "config.json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{KEY}: which model the weights are of cannot be seen: {error}. Copy the config.json of the "
            "published model there."
        ) from error
    if differ := differences(model, theirs):
        raise UserError(
            f"{KEY}: the weights in {str(folder)!r} are of another model: {'; '.join(differ)}. Choose "
            "the base that is theirs."
        )
    tokenizer = folder / TOKENIZER
    if tokenizer.is_file() and _digest(tokenizer) != _digest(corpus.tokenizer_path / TOKENIZER):
        raise UserError(
            f"wlb.corpus.path: the corpus {str(corpus.path)!r} has another tokenizer than the weights in "
            f"{str(folder)!r}; prepare one with `wlb-titan prepare NAME --tokenizer {folder}`."
        )


def differences(model: Decoder.Config, theirs: dict[str, Any]) -> list[str]:
    """What a model's description, as of `read_description`, says otherwise than a base."""
    return [
        f"{name} is {theirs[name]} there and {value} in the base"
        for name, value in described(model).items()
        if name in theirs and theirs[name] != value
    ]


def described(model: Decoder.Config) -> dict[str, Any]:
    """What of a model a config.json tells, under the names that it has there."""
    attention = model.first_attention
    assert attention is not None
    rope = attention.rope
    values = {
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "vocab_size": model.vocab_size,
        "num_attention_heads": attention.n_heads,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.enable_weight_tying,
        "rope_theta": rope.theta,
        "rope_type": {"none": "default", "llama": "llama3", "yarn": "yarn"}[rope.scaling],
    }
    if has_latent_attention(model):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values |= {name: getattr(attention, name) for name in names}
        values["q_lora_rank"] = attention.q_lora_rank or None
    else:
        values["num_key_value_heads"] = attention.n_kv_heads or attention.n_heads
        values["head_dim"] = attention.head_dim or model.dim // attention.n_heads
    windows = {layer.attention.inner_attention.window for layer in model.layers} - {None}
    if len(windows) == 1:
        values["sliding_window"] = windows.pop()
    if rope.scaling == "llama":
        values |= {
            "factor": rope.scaling_factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    elif rope.scaling == "yarn":
        values |= {
            "factor": rope.rope_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "original_max_position_embeddings": rope.original_seq_len,
        }
    for layer in model.layers:
        if layer.moe is None:
            values["intermediate_size"] = layer.feed_forward.w1.out_features
        else:
            values |= dict.fromkeys(EXPERTS, layer.moe.num_experts)
            values["num_experts_per_tok"] = layer.moe.router.top_k
            values["moe_intermediate_size"] = layer.moe.routed_experts.inner_experts.hidden_dim
    return values


def read_description(path: Path) -> dict[str, Any]:
    """A config.json with what it says of the rotary positions, which has moved between versions, on top."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = {name: value for name, value in {**config, **rope}.items() if value is not None}
    values["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return values


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
