"""A folder of weights is held against the model and the corpus before anything starts."""

import json

import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

pytestmark = pytest.mark.slow

use_cpu_without_accelerator()

LLAMA_8B = json.loads(
    """{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": false, "vocab_size": 128256}"""
)
SCALING = json.loads(
    """{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}"""
)
# As meta-llama/Llama-3.1-8B describes itself, and the same in the newer form.
LLAMA_3_1_8B = {**LLAMA_8B, "rope_theta": 500000.0, "rope_scaling": SCALING}
NEWER = {**LLAMA_8B, "rope_parameters": {**SCALING, "rope_theta": 500000.0}}
QWEN_30B_A3B = json.loads(
    """{"head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "tie_word_embeddings": false, "vocab_size": 151936}"""
)
LLAMA_BASE = "torchtitan.models.llama3.config_registry:llama3_8b"
QWEN_BASE = "torchtitan.models.qwen3.config_registry:qwen3_30b_a3b"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with a corpus, and another with another tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, words in (("corpus", "to be or not to be "), ("other", "all the world is a stage ")):
        (folder / f"{name}.jsonl").write_text((json.dumps({"text": words * 100}) + "\n") * 4)
        arguments = ["--source", f"jsonl:{folder / name}.jsonl#text", "--vocab-size", "300"]
        result = CliRunner().invoke(main, ["prepare", str(folder / name), *arguments])
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def check(corpora, tmp_path):
    """`wlb-titan config check` of a base that starts from a folder of weights, `tmp_path`/weights."""

    def check(base, description, tokenizer="corpus", tensors=True):
        weights = tmp_path / "weights"
        weights.mkdir()
        if description is not None:
            (weights / "config.json").write_text(json.dumps(description))
        if tensors:
            (weights / "model.safetensors").touch()
        if tokenizer:
            file = corpora / tokenizer / "tokenizer" / "tokenizer.json"
            (weights / "tokenizer.json").write_bytes(file.read_bytes())
        toml = tmp_path / "t.toml"
        toml.write_text(
            f'base = "{base}"\nwlb.corpus.path = "{corpora / "corpus"}"\n[checkpoint]\nenable = true\n'
            f'initial_load_in_hf = true\ninitial_load_path = "{weights}"\n'
        )
        return CliRunner().invoke(main, ["config", "check", str(toml)])

    return check


@pytest.mark.parametrize(
    "base, description",
    [(LLAMA_BASE, LLAMA_3_1_8B), (LLAMA_BASE, NEWER), (QWEN_BASE, QWEN_30B_A3B)],
    ids=["Llama 3.1 8B", "in the newer form", "Qwen3 30B-A3B"],
)
def test_the_published_models_fit_their_bases(check, base, description):
    result = check(base, description)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    "base, change, words",
    [
        # Llama 3, before 3.1
        (LLAMA_BASE, {"rope_scaling": None}, "rope_type is default there and llama3 in the base"),
        (
            *(LLAMA_BASE, {"num_hidden_layers": 16, "rms_norm_eps": 1e-6}),
            "num_hidden_layers is 16 there and 32 in the base; rms_norm_eps is 1e-06 there",
        ),
        (QWEN_BASE, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn there and"),
        (QWEN_BASE, {"num_experts": 64}, "num_experts is 64 there and 128"),
    ],
)
def test_weights_of_another_model_are_refused(check, base, change, words):
    description = {**(LLAMA_3_1_8B if base == LLAMA_BASE else QWEN_30B_A3B), **change}
    assert_refused(check(base, description), "initial_load_path = ", words)


@pytest.mark.parametrize(
    "folder, words",
    [
        ({"description": None}, ["Copy the config.json of the published model there"]),
        ({"tensors": False}, ["with *.safetensors"]),
        (
            {"tokenizer": "other"},
            ["wlb.corpus.path = ", "another tokenizer", "prepare NAME --tokenizer"],
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(check, folder, words):
    assert_refused(check(LLAMA_BASE, **{"description": LLAMA_3_1_8B, **folder}), *words)


def assert_refused(result, *words):
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("base", ["llama3_debug", "torchtitan.models.qwen3.config_registry:qwen3_debugmodel"])
def test_an_exported_model_has_the_same_logits_in_transformers(base, corpora, tmp_path):
    """Trained from nothing, so that config.json is written here; in float32."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from wlb_titan.corpus import Corpus
    from wlb_titan.corpus.tokenizer import CorpusTokenizer
    from wlb_titan.runtime.attention.module import DocumentMask
    from wlb_titan.runtime.hugging_face import complete_export
    from wlb_titan.runtime.models.bases import base_config

    config, corpus = base_config(base), Corpus.open(corpora / "corpus")
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_weights()
        for parameter in model.parameters():  # norms of one would hide which is which
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, None)
    save_file(
        {name: t.clone().contiguous() for name, t in adapter.to_hf(model.state_dict()).items()},
        tmp_path / "model.safetensors",
    )
    config.checkpoint.export_dtype = "float32"
    complete_export(tmp_path, config, corpus)
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
