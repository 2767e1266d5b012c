"""Models in Hugging Face's format: a folder of weights read, and one written so that others can open it.

torchtitan loads and saves the tensors that its adapter names, and leaves out the rest on either side. So
each tensor of the model and of the folder is accounted for before a run starts, and `config.json` and the
tokenizer, which say what tensors of the same shapes mean, are compared. transformers, vLLM and
`checkpoint.initial_load_path` want both beside saved weights, as the run has them.
"""

from __future__ import annotations

import dataclasses
import filecmp
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from wlb_titan.corpus import Corpus
from wlb_titan.errors import UserError
from wlb_titan.prepare.tokenizer import CONFIG_FILE, TEMPLATE_FILE, CorpusTokenizer, tokenizer_files
from wlb_titan.runtime.checkpoints import HUGGING_FACE_INDEX, METADATA
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import has_latent_attention

KEY = "checkpoint.initial_load_path"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
LONGEST_HEADER = 100_000_000  # bytes, as of the format
ROUTER_BIAS = "moe.expert_bias_E"  # by which torchtitan evens out what experts get, beside the loss
MODEL_TYPES = {"llama3": "llama", "qwen3": "qwen3", "gpt_oss": "gpt_oss", "deepseek_v3": "deepseek_v3"}
"""torchtitan's packages of models, and transformers' names."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""Models whose config.json is written here."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of Qwen, gpt-oss and DeepSeek
ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "swiglu_alpha": 1.702}
FIXED |= {"rope_interleave": True, "topk_method": "noaux_tc"}  # of DeepSeek-V3
"""What torchtitan's models compute without a setting for it."""
DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What transformers takes where a config.json says nothing."""
WITHOUT_EFFECT = re.compile(
    "_.*|architectures|auto_map|.*_version|dtype|torch_dtype|.*_token_id|use_cache|initializer_range|return_dict|"
    "max_position_embeddings|max_window_layers|pretraining_tp|ep_size|rope_parameters|rope_scaling|type|"
    "id2label|label2id|router_aux_loss_coef|aux_loss_alpha|seq_aux|num_nextn_predict_layers|intermediate_size|"
    "max_length|num_beams|num_beam_groups|num_return_sequences|temperature|top_[kp]|typical_p|.*_penalty"
)
"""What a config.json says that no forward pass of a pre-trained model reads: names, ids, how to generate, how
weights begin, losses beside the model's. `intermediate_size` is described wherever a layer has it."""


def on_meta(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return spec.model.build()


def exchanged(spec: ModelSpec, module: nn.Module | None = None) -> tuple[dict[str, list[int]], list[str]]:
    """The shapes of a model's tensors in Hugging Face's format, and which of its own do not go there and
    back; adapters of LoRA are not meant to. `module`: the model itself, if it is built already."""
    if spec.state_dict_adapter is None:
        return {}, ["its weights, as its base has no state_dict_adapter"]
    weights = dict((module or on_meta(spec)).state_dict())
    adapter = spec.state_dict_adapter(spec.model, None)
    exported = adapter.to_hf(dict(weights))
    shapes = {name: list(tensor.shape) for name, tensor in exported.items()}
    back = {name: tensor.shape for name, tensor in adapter.from_hf(exported).items()}
    lost = [name for name, tensor in weights.items() if back.get(name) != tensor.shape]
    return shapes, [name for name in lost if ".lora_" not in name]


def check_exchange(key: str, spec: ModelSpec, module: nn.Module | None = None) -> dict[str, list[int]]:
    """The shapes of `exchanged`; refuses the key of [checkpoint] for a model that loses a tensor. A router's
    bias may be lost: such a run trains without."""
    shapes, lost = exchanged(spec, module)
    if lost := [name for name in lost if not name.endswith(ROUTER_BIAS)]:
        raise UserError(
            f"checkpoint.{key}: Hugging Face's format, as the base's adapter knows it, has no place for "
            f"{len(lost)} tensors of the model, such as {lost[0]}; leave it out."
        )
    return shapes


def drop_router_bias(spec: ModelSpec) -> bool:
    """Leaves out a bias of routers that the model's format does not have; returns whether there was any."""
    biased = [layer for layer in spec.model.layers if layer.moe and layer.moe.load_balance_coeff is not None]
    small = dataclasses.replace(spec, model=dataclasses.replace(spec.model, layers=biased[:1]))
    if not biased or not any(name.endswith(ROUTER_BIAS) for name in exchanged(small)[1]):
        return False
    for layer in biased:
        layer.moe.load_balance_coeff = None
    return True


def check_weights(config: TrainerConfig, built: ModelSpec, corpus: Corpus) -> None:
    """Refuses a folder of weights of another model, or of another tokenizer than the corpus'. `built`: the
    model with the run's settings and the user's overrides."""
    model, checkpoint = config.model_spec.model, config.checkpoint
    folder = Path(checkpoint.initial_load_path or "")
    if not checkpoint.initial_load_path or not any(folder.glob("*.safetensors")):
        raise UserError(f"{KEY}: initial_load_in_hf reads a folder with *.safetensors, and this is not one.")
    try:
        description = read_description(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{KEY}: it does not say which model the weights belong to: {error}. Copy the config.json of the "
            "published model there."
        ) from error
    unread = [r"rotary_emb\.inv_freq$", r"^lm_head\.weight$" if model.enable_weight_tying else "^$"]
    for extra in range(description.get("num_nextn_predict_layers", 0)):  # transformers leaves them out, too
        unread.append(rf"^model\.layers\.{len(model.layers) + extra}\.")
    if checkpoint.initial_load_in_hf_quantized:
        description.pop("quantization_config", None)
        unread.append(r"\.weight_scale_inv$")
    elif method := description.get("quantization_config"):
        raise UserError(
            f"{KEY}: the weights in {str(folder)!r} are quantised ({str(method)[:80]}). Save them in "
            "bfloat16 (docs/models.md), or set checkpoint.initial_load_in_hf_quantized for DeepSeek-V3's."
        )
    if differ := differences(model, description):
        raise UserError(
            f"{KEY}: the weights in {str(folder)!r} belong to another model: {'; '.join(differ)}. Choose the "
            "base that matches them."
        )
    shapes = check_exchange("initial_load_in_hf", built)
    if differ := differing_tensors(folder, shapes, "|".join(unread)):
        raise UserError(
            f"{KEY}: the tensors in {str(folder)!r} are not the model's: "
            f"{'; '.join(differ[:3])}{', ...' * (len(differ) > 3)}. Copy what is missing, move away what "
            "does not belong there, or choose the base that matches them."
        )
    tokenizer, corpus_tokenizer = folder / TOKENIZER, corpus.tokenizer_path / TOKENIZER
    if tokenizer.is_file() and not filecmp.cmp(tokenizer, corpus_tokenizer, shallow=False):
        raise UserError(
            f"wlb.corpus.path: the corpus {str(corpus.path)!r} has another tokenizer than the weights in "
            f"{str(folder)!r}; prepare a corpus with `wlb-titan prepare NAME --tokenizer {folder}`."
        )


def differing_tensors(folder: Path, shapes: Mapping[str, list[int]], unread: str) -> list[str]:
    """How the tensors of a folder differ from a model's; those with the pattern `unread` need not be read."""
    stored: dict[str, list[int]] = {}
    twice = []
    file = folder / HUGGING_FACE_INDEX
    try:
        named = json.loads(file.read_text())["weight_map"].values() if file.is_file() else ()
        for file in sorted({*folder.glob("*.safetensors"), *(folder / name for name in named)}):
            more = shapes_in(file)
            twice += [f"{name} is in {file.name} and in another file" for name in more if name in stored]
            stored |= more
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"{file} cannot be read ({error!r})"]
    return twice + [
        f"{name} is {stored.get(name, 'missing')} there and {shapes.get(name, 'read by nothing')} in the base"
        for name in shapes | stored
        if stored.get(name) != shapes.get(name) and (name in shapes or not re.search(unread, name))
    ]


def shapes_in(file: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a *.safetensors file, by name, read from its header alone."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, LONGEST_HEADER)))
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if (size := file.stat().st_size) < end:
        raise ValueError(f"it has {size:,} bytes instead of {end:,}")
    return {name: entry["shape"] for name, entry in header.items()}


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
    attention = model.first_attention
    rope = attention.rope
    dense = [layer.moe is None for layer in model.layers]
    windows = [layer.attention.inner_attention.window for layer in model.layers]
    values = {
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "vocab_size": model.vocab_size,
        "num_attention_heads": attention.n_heads,
        "attention_bias": attention.wo.bias,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": next(filter(None, windows), None),
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.enable_weight_tying,
        "rope_theta": rope.theta,
        "rope_type": {"none": "default", "llama": "llama3", "yarn": "yarn"}[rope.scaling],
    }
    package = type(model).__module__.removeprefix("torchtitan.models.").split(".")[0]
    if package in MODEL_TYPES:
        mixed = package == "qwen3" and not all(dense)
        values["model_type"] = MODEL_TYPES[package] + "_moe" * mixed
    if latent := has_latent_attention(model):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values |= {name: getattr(attention, name) for name in names}
        values |= {"q_lora_rank": attention.q_lora_rank or None, "num_key_value_heads": attention.n_heads}
        values["head_dim"] = attention.qk_rope_head_dim
        values["qk_head_dim"] = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    else:
        values["num_key_value_heads"] = attention.n_kv_heads or attention.n_heads
        values["head_dim"] = attention.head_dim or model.dim // attention.n_heads
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
    """A config.json, with its values for rotary positions, which moved between versions, at the top level.
    What is null is left to transformers, or is a feature that the model does without."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = isinstance(config, dict) and (config.get("rope_parameters") or config.get("rope_scaling") or {})
    if not isinstance(rope, dict):
        raise ValueError(f"{path} does not describe a model")
    values = DEFAULTS | {name: value for name, value in {**config, **rope}.items() if value is not None}
    values["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if values["rope_type"] == "yarn":
        values.setdefault("truncate", True)
    values |= {name: None for name in ("sliding_window", "q_lora_rank") if config.get(name, 0) is None}
    return values if config.get("use_sliding_window", True) else values | {"sliding_window": None}


def export_files(config: TrainerConfig, corpus: Corpus) -> dict[str, bytes]:
    """What is saved beside weights, by name: the corpus' tokenizer, chat template and special tokens; all
    else as in the folder that the run began from. Read at the start, as a run may outlive both."""
    checkpoint, folder = config.checkpoint, Path(config.checkpoint.initial_load_path or "")
    places = tokenizer_files(folder) | {CONFIG: folder / CONFIG} if checkpoint.initial_load_in_hf else {}
    if lost := _dropped_bias(config):
        logger.warning(
            f"The checkpoint has {len(lost)} biases of routers, such as {lost[0]}, for which Hugging Face's "
            f"format of {config.model_spec.name} has no place: from here on tokens choose other experts, in "
            "the export as well. To keep them, stop this run, and set checkpoint.last_save_in_hf to false."
        )
    before = {name: path.read_bytes() for name, path in places.items()}
    files = {name: path.read_bytes() for name, path in tokenizer_files(corpus.tokenizer_path).items()}
    if TEMPLATE_FILE not in files and "chat_template" not in json.loads(files[CONFIG_FILE]):
        files |= {name: content for name, content in before.items() if name.endswith(".jinja")}
    changed = [name for name in files if files[name] != before.get(name, files[name])]
    generation = json.loads(files.get(GENERATION) or before.get(GENERATION, b"{}"))
    model = json.loads(before[CONFIG]) if before else model_config(config.model_spec)
    special = CorpusTokenizer(corpus.tokenizer_path).special_ids()
    for file, values in ((GENERATION, generation), (CONFIG, model or {})):
        for name, number in special.items():
            was = values.get(name)
            if number not in (was if isinstance(was, list) else [was]):
                values[name] = number
                changed += [f"{name} = {number} in {file}, which was {was}"] * bool(before)
    files[GENERATION] = _written(generation)
    if changed:
        logger.info(f"The export takes from the corpus, not from {folder}: {'; '.join(changed)}")
    if model is None:
        logger.warning(
            f"The export will have no {CONFIG}: the name by which transformers knows a model like "
            f"{config.model_spec.name} is not known here. Copy the published model's file there."
        )
        return files
    for name in ("dtype", "quantization_config", "num_nextn_predict_layers"):  # of the loaded weights
        model.pop(name, None)
    return files | {CONFIG: _written({**model, "torch_dtype": checkpoint.export_dtype})}


def _written(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _dropped_bias(config: TrainerConfig) -> list[str]:
    """The biases that the checkpoint has from which the run goes on, if the model has none (any more)."""
    checkpoint, folder = config.checkpoint, Path(config.checkpoint.initial_load_path or "")
    if checkpoint.load_step >= 0:
        folder = Path(config.dump_folder) / checkpoint.folder / f"step-{checkpoint.load_step}"
    moes = [layer.moe for layer in config.model_spec.model.layers if layer.moe]
    if any(moe.load_balance_coeff is not None for moe in moes) or not (folder / METADATA).is_file():
        return []
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [name for name in names if name.endswith(ROUTER_BIAS)]


def begin_export(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes `export_files` before the weights: a folder with these and their index, by which a later run
    takes it for done, lacks nothing."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def complete_export(folder: Path) -> None:
    """Deletes the ranks' shards, which are as large as the weights that were made from them."""
    if any(folder.glob("*.safetensors")):
        shutil.rmtree(folder / "sharded", ignore_errors=True)
    if (folder / CONFIG).is_file():
        logger.info(f"{folder} is a model in Hugging Face's format, with its tokenizer")


def model_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json of a model that is trained from scratch; None if its kind is not known."""
    values = described(spec.model)
    if values.get("model_type") not in ARCHITECTURES:
        return None
    rope = {name: values.pop(name) for name in ROPE if name in values}
    return {
        "architectures": [ARCHITECTURES[values["model_type"]]],
        **values,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "max_position_embeddings": spec.model.first_attention.rope.max_seq_len,
        "hidden_act": FIXED["hidden_act"],
    }
