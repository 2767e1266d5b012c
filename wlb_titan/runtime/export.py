"""Files that a folder of saved weights needs besides, so that other programs open it as a model.

torchtitan writes `*.safetensors` and their index (`checkpoint.last_save_in_hf`). transformers and vLLM, and
`checkpoint.initial_load_path`, want `config.json`, the tokenizer and the settings of generation beside them:
copied from where the weights came, or written for models that are trained from nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from wlb_titan.corpus import Corpus
from wlb_titan.corpus.tokenizer import CorpusTokenizer
from wlb_titan.runtime.checks.weights import described
from wlb_titan.runtime.config import TrainerConfig

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.*", "vocab.*", "merges.txt")
LLAMA = ("llama", "LlamaForCausalLM")
KINDS = {"llama": LLAMA, "llama3": LLAMA, "qwen3": ("qwen3", "Qwen3ForCausalLM")}
"""Dense models whose config.json is written here: torchtitan's name, and transformers' two."""
ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def complete_export(folder: Path, config: TrainerConfig, corpus: Corpus) -> None:
    """Writes beside the weights in a folder what makes a model of them.

    The ranks' own shards, of which torchtitan has put the weights together, go: they are as large again.
    """
    if any(folder.glob("*.safetensors")):
        shutil.rmtree(folder / "sharded", ignore_errors=True)
    assert config.model_spec is not None
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
    model.pop("dtype", None)  # as newer versions call it
    (folder / CONFIG).write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
    logger.info(f"{folder} is a model in Hugging Face's format, with its tokenizer")


def model_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json of a model that is trained from nothing; None if its kind is not known."""
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
