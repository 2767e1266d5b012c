"""Models in Hugging Face's format: a folder of weights read, and one written so that others can open it.

torchtitan loads and saves the tensors that its adapter names, and leaves out the rest on either side. So
all is compared before a run starts; docs/models.md ("Training on from published weights") says what.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.models.gpt_oss.model import GptOssModel
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from wlb_titan.corpus import Corpus
from wlb_titan.corpus.corpus import differing_ids
from wlb_titan.errors import UserError, refusing, regular_file
from wlb_titan.files import load
from wlb_titan.prepare.tokenizer import CONFIG_FILE, TEMPLATE_FILE, CorpusTokenizer, tokenizer_files
from wlb_titan.runtime.checkpoints import HUGGING_FACE_INDEX, METADATA
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.models.description import FIXED, ROPE, described, differences, read_description

KEY = "checkpoint.initial_load_path"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
POSITIONS = "max_position_embeddings"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
ROUTER_BIAS = "moe.expert_bias_E"  # by which torchtitan evens out what experts get, beside the loss
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""Models whose config.json is written here."""


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
    tied = model.enable_weight_tying
    unread = [r"rotary_emb\.inv_freq$", f"^{re.escape(HEAD)}$" if tied else "^$"]
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
    if differ := differing_tensors(folder, shapes, "|".join(unread)) or (untied(folder) if tied else []):
        raise UserError(
            f"{KEY}: the tensors in {str(folder)!r} are not the model's: "
            f"{'; '.join(differ[:3])}{', ...' * (len(differ) > 3)}. Copy what is missing, move away what "
            "does not belong there, or choose the base that matches them."
        )
    if (folder / TOKENIZER).is_file() and (differ := differing_ids(corpus.tokenizer_path, folder)):
        raise UserError(
            f"wlb.corpus.path: the corpus {str(corpus.path)!r} has another tokenizer than the weights in "
            f"{str(folder)!r}: {differ}. Prepare a corpus with `wlb-titan prepare NAME --tokenizer {folder}`."
        )


def differing_tensors(folder: Path, shapes: Mapping[str, list[int]], unread: str) -> list[str]:
    """How the tensors of a folder differ from a model's; those with the pattern `unread` need not be read."""
    stored: dict[str, list[int]] = {}
    twice = []
    file = folder / HUGGING_FACE_INDEX
    with refusing(lambda reason: UserError(f"{KEY}: {file} cannot be read: {reason}.")):
        named = load(dict[str, Any], file)["weight_map"].values() if file.is_file() else ()
        for file in sorted({*folder.glob("*.safetensors"), *(folder / name for name in named)}):
            with safe_open(regular_file(file), "np") as opened:
                more = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            twice += [f"{name} is in {file.name} and in another file" for name in more if name in stored]
            stored |= more
    return twice + [
        f"{name} is {stored.get(name, 'missing')} there and {shapes.get(name, 'read by nothing')} in the base"
        for name in shapes | stored
        if stored.get(name) != shapes.get(name) and (name in shapes or not re.search(unread, name))
    ]


def untied(folder: Path) -> list[str]:
    """Says so if a folder has an output matrix, which its model ties, that is not the embedding."""
    wrong = f"{KEY}: the tensors in {str(folder)!r} cannot be read"
    with refusing(lambda reason: UserError(f"{wrong}: {reason}.")), ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "pt")) for file in folder.glob("*.safetensors")]
        stored = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        if HEAD not in stored:
            return []
        head, embedding = (stored[name].get_tensor(name) for name in (HEAD, EMBEDDING))
        if head.dtype == embedding.dtype and torch.equal(head, embedding):
            return []
    untie = "to keep it, set tie_word_embeddings to false there, and choose a base that does not tie them"
    return [f"{HEAD} is not {EMBEDDING}, as config.json says ({untie})"]


def export_files(config: TrainerConfig, corpus: Corpus) -> dict[str, bytes]:
    """What is saved beside weights, by name: the corpus' tokenizer, chat template and special tokens, and as
    many positions as the run trains; all else as in the folder that the run began from. Read at the start, as
    a run may outlive both."""
    checkpoint, folder = config.checkpoint, Path(config.checkpoint.initial_load_path or "")
    places = tokenizer_files(folder) | {CONFIG: folder / CONFIG} if checkpoint.initial_load_in_hf else {}
    own = tokenizer_files(corpus.tokenizer_path)
    special = CorpusTokenizer(corpus.tokenizer_path).special_ids()
    if lost := _dropped_bias(config):
        warnings.warn(
            f"The checkpoint has {len(lost)} biases of routers, such as {lost[0]}, for which Hugging Face's "
            f"format of {config.model_spec.name} has no place: from here on tokens choose other experts, in "
            "the export as well. To keep them, stop this run, and set checkpoint.last_save_in_hf to false.",
            stacklevel=2,
        )
    before = {name: path.read_bytes() for name, path in places.items()}
    files = {name: path.read_bytes() for name, path in own.items()}
    if TEMPLATE_FILE not in files and "chat_template" not in _table(own[CONFIG_FILE]):
        files |= {name: content for name, content in before.items() if name.endswith(".jinja")}
    changed = [name for name in files if files[name] != before.get(name, files[name])]
    generation = _table((places | own).get(GENERATION))
    model = _table(places[CONFIG]) if places else model_config(config.model_spec)
    for file, values in ((GENERATION, generation), (CONFIG, model or {})):
        for name, number in special.items():
            was = values.get(name)
            if number not in (was if isinstance(was, list) else [was]):
                values[name] = number
                changed += [f"{name} = {number} in {file}, which was {was}"] * bool(before)
    if places and (was := read_description(places[CONFIG]).get(POSITIONS, 0)) < config.training.seq_len:
        model[POSITIONS] = config.training.seq_len
        changed.append(f"{POSITIONS} = {config.training.seq_len} in {CONFIG}, which was {was}")
    files[GENERATION] = _written(generation)
    if changed:
        logger.info(f"The export takes from the run, not from {folder}: {'; '.join(changed)}")
    if model is None:
        warnings.warn(
            f"The export will have no {CONFIG}: the name by which transformers knows a model like "
            f"{config.model_spec.name} is not known here. Copy the published model's file there.",
            stacklevel=2,
        )
        return files
    for name in ("dtype", "quantization_config", "num_nextn_predict_layers"):  # of the loaded weights
        model.pop(name, None)
    return files | {CONFIG: _written({**model, "torch_dtype": checkpoint.export_dtype})}


def _table(file: Path | None) -> dict[str, Any]:
    with refusing(lambda reason: UserError(f"{file} cannot be read: {reason}.")):
        return dict(load(dict[str, Any], file)) if file else {}


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
        POSITIONS: spec.model.first_attention.rope.max_seq_len,
        "hidden_act": FIXED["hidden_act"],
    }


EXPERTS = {"gate_up_proj": "mlp1_weight_EGD", "gate_up_proj_bias": "mlp1_bias_EG"}
EXPERTS |= {"down_proj": "mlp2_weight_EDF", "down_proj_bias": "mlp2_bias_ED"}
THEIRS, OURS = "model.layers.{}.mlp.experts.", "layers.{}.moe.routed_experts.inner_experts."
TURNED = (".experts.gate_up_proj", ".experts.down_proj")


class GptOssAdapter(GptOssStateDictAdapter):
    """torchtitan's of gpt-oss, which in 0.3.0 has former names of the experts' weights and passes over them,
    with those of today, and with transformers' for weights that are not quantised. There they are (experts,
    in, out)."""

    def __init__(self, model_config: GptOssModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        kept = {theirs: ours for theirs, ours in self.from_hf_map.items() if not theirs.startswith(THEIRS)}
        self.from_hf_map = kept | {THEIRS + theirs: OURS + ours for theirs, ours in EXPERTS.items()}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return _turned(super().to_hf(state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return super().from_hf(_turned(hf_state_dict))


def _turned(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(TURNED) else tensor
        for name, tensor in tensors.items()
    }
