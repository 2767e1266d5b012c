"""Exports of runs in Hugging Face's format: what is written, when it is done, and what it may lose."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from wlb_titan.corpus import Corpus
from wlb_titan.errors import UserError
from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus
from wlb_titan.prepare.tokenizer import CorpusTokenizer
from wlb_titan.runtime import hugging_face as hf
from wlb_titan.runtime.checkpoints import beginning
from wlb_titan.runtime.models.bases import base_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A prepared corpus, with its tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "texts.jsonl").write_text((json.dumps({"text": "to be or not to be " * 100}) + "\n") * 4)
    settings = PrepareSettings(source=f"jsonl:{folder / 'texts.jsonl'}", vocab_size=300)
    return prepare_corpus(settings, folder / "corpus").path


@pytest.mark.parametrize("base", ["llama3_debug", "torchtitan.models.qwen3.config_registry:qwen3_debugmodel"])
def test_an_exported_model_has_the_same_logits_in_transformers(base, prepared, tmp_path):
    """Trained from nothing, so that config.json is written here; in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from wlb_titan.runtime.attention.module import DocumentMask

    config, corpus = base_config(base), Corpus.open(prepared)
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights()
        for parameter in model.parameters():  # norms of one would hide which is which
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, None)
    weights = {name: t.clone().contiguous() for name, t in adapter.to_hf(model.state_dict()).items()}
    save_file(weights, tmp_path / "model.safetensors")
    config.checkpoint.export_dtype = "float32"
    hf.begin_export(tmp_path, hf.export_files(config, corpus))
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.dtype == torch.float32
    ids = torch.tensor([corpus.tokens(0, 0, 24).tolist()])
    mask = DocumentMask(torch.tensor([[0, 24, 0, 24]], dtype=torch.int32))
    with torch.no_grad():
        expected = model(ids, torch.arange(24)[None], mask)
        found = theirs(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(ids[0], clean_up_tokenization_spaces=False).startswith("to be or not")
    assert theirs.generation_config.eos_token_id == CorpusTokenizer(corpus.tokenizer_path).end_of_text_id


def step_5(tmp_path, base="llama3_debug"):
    """The settings of a run that exports its fifth step, and that step's folder."""
    config = base_config(base)
    config.dump_folder, config.training.steps = str(tmp_path), 5
    exported = {"last_save_in_hf": True, "last_save_model_only": True}
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=True, **exported)
    return config, tmp_path / "checkpoint" / "step-5"


def test_a_killed_export_is_made_again_and_only_a_whole_one_is_done(prepared, tmp_path):
    """Killed at any moment until torch has written the index of the weights."""
    config, folder = step_5(tmp_path)
    for _ in range(2):
        hf.begin_export(folder, hf.export_files(config, Corpus.open(prepared)))
        assert beginning(config).step == -1
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(UserError, match="has completed its 5 steps"):
        beginning(config)
    hf.complete_export(folder)
    weights = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    settings = {"config.json", "generation_config.json", "tokenizer.json"}
    names = {file.name for file in folder.iterdir()}
    assert weights | settings <= names and "sharded" not in names


@pytest.mark.parametrize("biased", [True, False])
def test_a_bias_that_the_export_loses_is_named(prepared, tmp_path, recwarn, biased):
    """A run that trained with it is started again with an export, for which the model has none."""
    config, folder = step_5(tmp_path, "torchtitan.models.qwen3.config_registry:qwen3_moe_debug")
    names = [name for name in hf.on_meta(config.model_spec).state_dict() if "layers.1." in name]
    bias = next(name for name in names if name.endswith(hf.ROUTER_BIAS))
    assert hf.drop_router_bias(config.model_spec)
    kept = {name: torch.ones(1) for name in names if biased or name != bias}
    dcp.save(kept, checkpoint_id=folder, no_dist=True)
    config.checkpoint.load_step = 5
    hf.export_files(config, Corpus.open(prepared))
    said = f"1 biases of routers, such as {bias}, for which Hugging Face's format of qwen3 has no place"
    assert any(said in str(warning.message) for warning in recwarn) is biased


def loading(weights, **checkpoint):
    """The settings of a run that begins with a folder of weights."""
    config = base_config("llama3_debug")
    begins = {"initial_load_in_hf": True, "initial_load_path": str(weights), **checkpoint}
    config.checkpoint = dataclasses.replace(config.checkpoint, **begins)
    return config


def test_an_export_says_what_the_run_says(prepared, tmp_path, caplog):
    """Tokens that end and pad a text, the chat template and the tokenizer are the corpus', where it has any,
    and there are as many positions as were trained; all else is as it was. Both folders may be deleted."""
    for name in ("corpus", "weights"):
        shutil.copytree(prepared, tmp_path / name)
    corpus, weights = tmp_path / "corpus" / "tokenizer", tmp_path / "weights" / "tokenizer"
    end = {"__type": "AddedToken", "content": "<|endoftext|>"}
    tokens = {"eos_token": "<|endoftext|>", "pad_token": end, "bos_token": None}
    (corpus / "tokenizer_config.json").write_text(json.dumps(tokens))
    (corpus / "chat_template.jinja").write_text("the run's")
    (weights / "chat_template.jinja").write_text("of before")
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "top_k": 20}))
    before = {"model_type": "llama", "eos_token_id": 7, "bos_token_id": 5, "dtype": "float16"}
    before["max_position_embeddings"] = 128
    (weights / "config.json").write_text(json.dumps(before | {"quantization_config": {}}))
    config = loading(weights, export_dtype="bfloat16")
    config.training.seq_len = 512
    opened = Corpus.open(tmp_path / "corpus")
    with caplog.at_level("INFO"):
        files = hf.export_files(config, opened)
    (end,) = {CorpusTokenizer(corpus).end_of_text_id}
    shutil.rmtree(corpus), shutil.rmtree(weights)
    hf.begin_export(tmp_path / "export", files)
    saved = {file.name: file.read_text() for file in (tmp_path / "export").iterdir()}
    ids = {"eos_token_id": end, "pad_token_id": end}
    assert json.loads(saved["generation_config.json"]) == ids | {"top_k": 20}
    kept = {"model_type": "llama", "max_position_embeddings": 512, "torch_dtype": "bfloat16"}
    assert json.loads(saved["config.json"]) == kept | ids | {"bos_token_id": 5}
    assert saved["chat_template.jinja"] == "the run's"
    assert json.loads(saved["tokenizer_config.json"]) == tokens
    assert f"eos_token_id = {end} in config.json, which was 7" in caplog.text
    assert "max_position_embeddings = 512 in config.json, which was 128" in caplog.text
    assert "tokenizer_config.json; chat_template.jinja; eos_token_id" in caplog.text


def test_a_chat_template_of_the_weights_stays_where_the_corpus_has_none(prepared, tmp_path):
    weights = shutil.copytree(prepared / "tokenizer", tmp_path / "weights")
    (weights / "config.json").write_text('{"model_type": "llama"}')
    (weights / "additional_chat_templates").mkdir()
    texts = {"chat_template.jinja": "of before", "additional_chat_templates/tool_use.jinja": "with tools"}
    for name, text in texts.items():
        (weights / name).write_text(text)
    hf.begin_export(tmp_path / "export", hf.export_files(loading(weights), Corpus.open(prepared)))
    assert {name: (tmp_path / "export" / name).read_text() for name in texts} == texts
