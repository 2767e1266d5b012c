"""Models in Hugging Face's format: a folder of weights read, and one written so that others can open it.

torchtitan compares tensors by name and shape only (`*.safetensors`). So `config.json`, which has the base of
the rotary positions, and the tokenizer are compared before weights are loaded. transformers, vLLM and
`checkpoint.initial_load_path` want both beside saved weights: they are copied from where the weights came, or
written for models that are trained from scratch.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from wlb_titan.corpus import Corpus
from wlb_titan.corpus.tokenizer import CorpusTokenizer
from wlb_titan.errors import UserError
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.job import has_latent_attention

KEY = "checkpoint.initial_load_path"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.*", "vocab.*", "merges.txt")
LLAMA = ("llama", "LlamaForCausalLM")
KINDS = {"llama": LLAMA, "llama3": LLAMA, "qwen3": ("qwen3", "Qwen3ForCausalLM")}
"""Dense models whose config.json is written here: torchtitan's name, and transformers' two."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of Qwen, gpt-oss and DeepSeek
ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_weights(model: Decoder.Config, folder: Path, corpus: Corpus) -> None:
    """Refuses a folder of weights of another model, or of another tokenizer than the corpus'."""
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{KEY}: there is no folder {str(folder)!r} with *.safetensors.")
    try:
        theirs = read_description(folder / CONFIG)
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
    tokenizer, own = folder / TOKENIZER, corpus.tokenizer_path / TOKENIZER
    if tokenizer.is_file() and not filecmp.cmp(tokenizer, own, shallow=False):
        raise UserError(
            f"wlb.corpus.path: the corpus {str(corpus.path)!r} has another tokenizer than the weights in "
            f"{str(folder)!r}; prepare one with `wlb-titan prepare NAME --tokenizer {folder}`."
        )


def differences(model: Decoder.Config, theirs: dict[str, Any]) -> list[str]:
    """Where a description, as of `read_description`, differs from a model."""
    return [
        f"{name} is {theirs[name]} there and {value} in the base"
        for name, value in described(model).items()
        if name in theirs and theirs[name] != value
    ]


def described(model: Decoder.Config) -> dict[str, Any]:
    """A model's values in a config.json, under their names there."""
    attention = model.first_attention
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
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        values |= {"factor": rope.scaling_factor, **{name: getattr(rope, name) for name in names}}
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
    """A config.json, with its values for rotary positions, which moved between versions, at the top level."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = {name: value for name, value in {**config, **rope}.items() if value is not None}
    values["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return values


def complete_export(folder: Path, config: TrainerConfig, corpus: Corpus) -> None:
    """Adds a config and a tokenizer to weights, and deletes the ranks' shards, which are as large again."""
    if any(folder.glob("*.safetensors")):
        shutil.rmtree(folder / "sharded", ignore_errors=True)
    checkpoint, published = config.checkpoint, None
    if checkpoint.initial_load_in_hf and checkpoint.initial_load_path:
        published = Path(checkpoint.initial_load_path)
    for place in [*([published] if published else []), corpus.tokenizer_path]:
        for pattern in TOKENIZER_FILES:
            for file in filter(Path.is_file, place.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
    if published:
        model = json.loads((published / CONFIG).read_text(encoding="utf-8"))
        if (published / GENERATION).is_file():
            shutil.copyfile(published / GENERATION, folder / GENERATION)
    else:
        tokenizer = CorpusTokenizer(corpus.tokenizer_path)
        generation = {"eos_token_id": tokenizer.end_of_text_id}
        (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        model = model_config(config.model_spec)
        if model is None:
            logger.warning(
                f"{folder} has no {CONFIG}: how transformers calls a model like "
                f"{config.model_spec.name} is not known here. Copy that of the published model there."
            )
            return
        model["eos_token_id"] = tokenizer.end_of_text_id
    model = {**model, "torch_dtype": checkpoint.export_dtype}
    model.pop("dtype", None)  # its name in newer versions
    (folder / CONFIG).write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
    logger.info(f"{folder} is a model in Hugging Face's format, with its tokenizer")


def model_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json of a model that is trained from scratch; None if its kind is not known."""
    values = described(spec.model)
    if spec.name not in KINDS or "moe_intermediate_size" in values:
        return None
    kind, architecture = KINDS[spec.name]
    rope = {name: values.pop(name) for name in ROPE if name in values}
    return {
        "architectures": [architecture],
        "model_type": kind,
        **values,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "max_position_embeddings": spec.model.first_attention.rope.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
    }
