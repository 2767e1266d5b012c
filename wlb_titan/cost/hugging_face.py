"""The sizes of a model by the config.json that it has on Hugging Face's hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import UserError

DENSE = ("llama", "mistral", "qwen3")
EXPERTS = ("qwen3_moe",)


def read_config(path: Path) -> tuple[ModelShape, int]:
    """A model's sizes, and its longest context in tokens.

    Raises:
        UserError: the file cannot be read, or the model is of another kind than DENSE and EXPERTS.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error
    kind = read.get("model_type") if isinstance(read, dict) else None
    if kind not in (*DENSE, *EXPERTS):
        raise UserError(
            f"{path}: the model_type is {kind!r}, of which the sizes are not read; known are "
            f"{', '.join((*DENSE, *EXPERTS))}. Write a TOML file with a base instead."
        )
    if read.get("sliding_window") and read.get("use_sliding_window", kind == "mistral"):
        raise UserError(f"{path}: sliding_window is set, which is not read. Write a TOML file with a base.")
    try:
        return _shape(read, kind), int(read["max_position_embeddings"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path}: {error!r}: a size is missing or is no number.") from error


def _shape(read: dict[str, Any], kind: str) -> ModelShape:
    hidden, heads = int(read["hidden_size"]), int(read["num_attention_heads"])
    shape: dict[str, Any] = {
        "layers": int(read["num_hidden_layers"]),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(read.get("num_key_value_heads") or heads),
        "head_dim": int(read.get("head_dim") or hidden // heads),
        "vocabulary": int(read["vocab_size"]),
        "tied": bool(read.get("tie_word_embeddings", False)),
    }
    if kind in DENSE:
        return ModelShape(feed_forward=int(read["intermediate_size"]), **shape)
    if read.get("mlp_only_layers") or read.get("decoder_sparse_step", 1) != 1:
        raise ValueError("layers without experts are not read")
    experts, visits = int(read["num_experts"]), int(read["num_experts_per_tok"])
    width = int(read["moe_intermediate_size"])
    return ModelShape(
        feed_forward=visits * width,
        routed_width=visits * width,
        experts=experts,
        visits=float(visits),
        unvisited_weights=3 * hidden * width * (experts - visits),
        **shape,
    )
