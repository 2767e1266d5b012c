"""`config check` opens the files that a TOML file names: corpora, mixtures of them, a folder of weights."""

import json
import re
import shutil
import struct

import datasets
import numpy as np
import pytest
import torch
from commands import invoke, said
from safetensors.torch import save_file

from wlb_titan.errors import UserError
from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus
from wlb_titan.runtime import hugging_face as hf
from wlb_titan.runtime.models.bases import base_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """`corpus` and `other` were prepared, with tokenizers of their own; `datasets` saved the others."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, words in (("corpus", "to be or not to be "), ("other", "all the world is a stage ")):
        (folder / f"{name}.jsonl").write_text((json.dumps({"text": words * 100}) + "\n") * 4)
        settings = PrepareSettings(source=f"jsonl:{folder / name}.jsonl", vocab_size=300)
        prepare_corpus(settings, folder / name)
    draw = np.random.default_rng(0).integers
    documents = {
        "short": [draw(0, 250, draw(2, 40)) for _ in range(300)],
        "long": [draw(0, 250, draw(2, 900)) for _ in range(60)],
        "wrong": [[5, 999]] * 20,
    }
    for name, ids in documents.items():
        datasets.Dataset.from_dict({"input_ids": ids}).save_to_disk(folder / name)
    return folder


@pytest.fixture
def write(corpora, tmp_path):
    """Writes a TOML file, with the folder of `corpora` for FOLDER."""

    def write(text):
        (tmp_path / "train.toml").write_text(text.replace("FOLDER", str(corpora)))
        return tmp_path / "train.toml"

    return write


def assert_refused(file, words):
    result = invoke("config", "check", file)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert re.search(words, result.stderr), result.stderr


SMALL = """
base = "llama3_debug"
training.seq_len = 256
training.global_batch_size = 4
wlb.corpus.tokenizer = "FOLDER/corpus/tokenizer"
"""
MIXTURE = """
[[wlb.corpus.sources]]
path = "FOLDER/short"
weight = 1.0
[[wlb.corpus.sources]]
path = "FOLDER/long"
name = "books"
weight = 3.0
long_length = 400
long_share = 0.9
"""


def test_plan_shows_what_a_mixture_does(write, tmp_path):
    path = write(SMALL + MIXTURE)
    said("config", "check", path)
    output = said("plan", path, "--policies", "plain,wlb_lazy", "--steps", 20, "--report", tmp_path / "r")
    output = " ".join(output.split())
    assert "a mixture of short, books: 360 documents" in output and "90.0% from the" in output
    assert "short: 25.0% of the tokens; has 300 documents" in output
    assert "books: 75.0% of the tokens; has 60 documents" in output
    assert "How a mixture of short, books packs" in (tmp_path / "r" / "report.html").read_text()
    said("simulate", path, "--cluster", "cpu", "--steps", 2, "--policies", "plain,wlb_lazy")


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        (MIXTURE.replace("FOLDER/long", "FOLDER/nowhere"), r"toml:11: .*s.1.path = .* There is no corpus"),
        (MIXTURE.replace("= 3.0", "= 1e300"), "the source short leaves .* less than 1e-06 of all"),
        (MIXTURE.replace("books", "a/b"), "name of the source 'a/b' becomes part of the names of metrics"),
        (MIXTURE.replace("0.9", "1.9"), "long_share = 1.9: should be less than 1"),
        (MIXTURE.replace("long_share = 0.9", ""), "only one of long_length and long_share"),
        (MIXTURE.replace('"books"', '"short"'), "The sources are called short, short"),
        (MIXTURE.replace("weight = 3", "weigth = 3"), r"Did you mean wlb.corpus.sources.1.weight\?"),
        ('wlb.corpus.path = "FOLDER/wrong"', r"Document 0 \(data-00000-of-00001.arrow\[0\]\)"),
        ('wlb.corpus.path = "FOLDER/long"\nwlb.corpus.column = "text"', "has no column 'text'"),
    ],
)
def test_mistakes_in_a_mixture_are_named_with_their_place(write, corpus, words):
    path = write(SMALL + corpus)
    assert_refused(path, words)
    if "nowhere" in corpus:
        assert re.search(words, invoke("plan", path).stderr)


LLAMA_8B = json.loads(
    """{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": false,
    "vocab_size": 128256}"""
)
SCALING = json.loads(
    """{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}"""
)
# As meta-llama/Llama-3.1-8B describes itself, and the same in the newer form.
LLAMA_3_1_8B = {**LLAMA_8B, "rope_theta": 500000.0, "rope_scaling": SCALING}
NEWER = {**LLAMA_8B, "rope_parameters": {**SCALING, "rope_theta": 500000.0}}
QWEN_30B_A3B = json.loads(
    """{"model_type": "qwen3_moe", "norm_topk_prob": true, "mlp_only_layers": [], "sliding_window": null,
    "use_sliding_window": false, "max_window_layers": 48, "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "tie_word_embeddings": false, "vocab_size": 151936}"""
)
LLAMA = "torchtitan.models.llama3.config_registry:llama3_8b"
QWEN = "torchtitan.models.qwen3.config_registry:qwen3_30b_a3b"


def write_zeros(file, shapes):
    """Tensors of zeros, of which the file system keeps none."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with file.open("r+b") as out:
        out.truncate(8 + len(text) + end)


@pytest.fixture
def initial_load(corpora, write, tmp_path):
    """The TOML of a base that starts from a folder of weights."""

    def initial_load(base, description, tokenizer="corpus", tensors=True, index=()):
        weights = tmp_path / "weights"
        weights.mkdir()
        if description is not None:
            (weights / "config.json").write_text(json.dumps(description))
        if tensors:
            write_zeros(weights / "model.safetensors", hf.exchanged(base_config(base).model_spec)[0])
        if index:
            (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        file = corpora / tokenizer / "tokenizer" / "tokenizer.json"
        (weights / "tokenizer.json").write_bytes(file.read_bytes())
        checkpoint = f'enable = true\ninitial_load_in_hf = true\ninitial_load_path = "{weights}"\n'
        return write(f'base = "{base}"\nwlb.corpus.path = "FOLDER/corpus"\n[checkpoint]\n{checkpoint}')

    return initial_load


@pytest.mark.parametrize(
    ("base", "description"),
    [(LLAMA, LLAMA_3_1_8B), (LLAMA, NEWER), (QWEN, QWEN_30B_A3B)],
    ids=["Llama 3.1 8B", "in the newer form", "Qwen3 30B-A3B"],
)
def test_the_published_models_fit_their_bases(initial_load, base, description):
    said("config", "check", initial_load(base, description))


LAYERS = {"num_hidden_layers": 16, "rms_norm_eps": 1e-6}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"rope_scaling": None}, "rope_type is default there and llama3 in the base"),  # Llama 3.0
        (LLAMA, LAYERS, "num_hidden_layers is 16 there and 32 in the base; rms_norm_eps is 1e-06 there"),
        (QWEN, YARN, "rope_type is yarn there and"),
        (QWEN, {"num_experts": 64}, "num_experts is 64 there and 128"),
    ],
)
def test_weights_of_another_model_are_refused(initial_load, base, changes, words):
    published = LLAMA_3_1_8B if base == LLAMA else QWEN_30B_A3B
    assert_refused(initial_load(base, published | changes), f"initial_load_path = .*{words}")


QUANTISED = LLAMA_3_1_8B | {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ({"description": None}, "Copy the config.json of the published model there"),
        ({"tensors": False}, r"with \*.safetensors"),
        ({"index": {"lm_head.weight": "2.safetensors"}}, "weights/2.safetensors cannot be read: No such"),
        ({"description": QUANTISED}, "are quantised .*fp8"),
        ({"tokenizer": "other"}, "wlb.corpus.path = .*another tokenizer.*Prepare .* NAME --tokenizer"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(initial_load, folder, words):
    assert_refused(initial_load(**{"base": LLAMA, "description": LLAMA_3_1_8B, **folder}), words)


MISSING = "'<a>' is missing in .* and 2.. in .*/tokenizer"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer_config.json", {"chat_template": "of the run", "eos_token": "be"}, ""),
        ("tokenizer.json", {"padding": None, "post_processor": None}, ""),
        ("tokenizer_config.json", {"extra_special_tokens": ["<a>"]}, MISSING),
        ("special_tokens_map.json", {"additional_special_tokens": ["<a>"]}, MISSING),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, "normalizer of tokenizer.json differ"),
    ],
)
def test_tokenizers_are_compared_by_the_ids_that_texts_get(corpora, tmp_path, file, change, words):
    ours, theirs = corpora / "corpus" / "tokenizer", tmp_path / "tokenizer"
    shutil.copytree(ours, theirs)
    before = json.loads((theirs / file).read_text()) if (theirs / file).exists() else {}
    (theirs / file).write_text(json.dumps(before | change, indent=1))
    (theirs / "config.json").write_text(json.dumps(LLAMA_8B))  # of which transformers would add tokens
    assert re.match(words or "$", hf.differing_ids(ours, theirs))


def test_what_an_export_lacks_is_named_before_the_start(corpora, write, tmp_path):
    tokenizer, config = tmp_path / "tokenizer", "tokenizer_config.json"
    shutil.copytree(corpora / "corpus" / "tokenizer", tokenizer)
    checkpoint = "checkpoint = { enable = true, last_save_in_hf = true, last_save_model_only = true }"
    small = SMALL.replace("FOLDER/corpus/tokenizer", str(tokenizer))
    path = write(f'{small}\nwlb.corpus.path = "FOLDER/short"\n{checkpoint}')
    said("config", "check", path)
    (tokenizer / "generation_config.json").write_text("[1]")
    assert_refused(path, "generation_config.json cannot be read")
    (tokenizer / config).unlink()
    assert_refused(path, f"{config} names no eos_token")


QWEN_0_6B = "torchtitan.models.qwen3.config_registry:qwen3_0_6b"
DEEPSEEK = "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_671b"
GPT_OSS = "torchtitan.models.gpt_oss.config_registry:gpt_oss_20b"


ROTARY = (*hf.ROPE, "rope_theta", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (QWEN, {"norm_topk_prob": False}),
        (QWEN, {"decoder_sparse_step": 2}),
        (QWEN, {"mlp_only_layers": [0]}),
        (QWEN, {"use_sliding_window": True, "sliding_window": 4096}),
        (QWEN, {"n_shared_experts": 1}),
        (QWEN_0_6B, {"attention_bias": True}),
        (QWEN_0_6B, {"hidden_act": "gelu"}),
        (QWEN_0_6B, {"partial_rotary_factor": 0.5}),
        (QWEN_0_6B, {"attention_dropout": 0.1}),
        (QWEN_0_6B, {"model_type": "qwen2"}),
        (QWEN_0_6B, {"query_pre_attn_scalar": 256}),  # of another family
        (DEEPSEEK, {"q_lora_rank": None}),
        (DEEPSEEK, {"routed_scaling_factor": 1.0}),
        (DEEPSEEK, {"scoring_func": "softmax"}),
        (DEEPSEEK, {"topk_group": 1}),
        (DEEPSEEK, {"mscale": 0.5}),
        (DEEPSEEK, {"first_k_dense_replace": 0}),
        (DEEPSEEK, {"rope_interleave": False}),
        (GPT_OSS, {"truncate": None}),  # true where nothing is said
        (GPT_OSS, {"swiglu_limit": 5.0}),
        (GPT_OSS, {"sliding_window": None}),
        (GPT_OSS, {"layer_types": ["full_attention"] * 24}),
    ],
    ids=str,
)
def test_what_changes_a_model_is_named(base, change, tmp_path):
    model = base_config(base).model_spec.model
    for changes in ({}, change):
        config = hf.described(model) | changes
        config["rope_scaling"] = {name: config.pop(name) for name in ROTARY if name in config}
        (tmp_path / "config.json").write_text(json.dumps(config))
        differs = hf.differences(model, hf.read_description(tmp_path / "config.json"))
        named = [words.split()[0] for words in differs]
        assert named == sorted(changes, key=named.index)


def test_what_transformers_writes_of_published_models_fits(tmp_path):
    """Every key that its configurations have, and those of files that others wrote."""
    import transformers as theirs

    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    wide = {"rope_theta": 1e6, "rope_type": "default"}
    llama = theirs.LlamaConfig(**LLAMA_8B, rope_parameters=NEWER["rope_parameters"])
    sizes = {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True}
    qwen = theirs.Qwen3MoeConfig(**sizes, rope_parameters=wide)
    # torchtitan's base has other norms than what is published, which is told.
    deepseek = theirs.DeepseekV3Config(rms_norm_eps=1e-5, rope_parameters=yarn)
    others = {"_name_or_path": "x", "torch_dtype": "bfloat16", "pad_token_id": 3, "auto_map": {"A": "x"}}
    gpt_oss = theirs.GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    for base, config in ((LLAMA, llama), (QWEN, qwen), (DEEPSEEK, deepseek), (GPT_OSS, gpt_oss)):
        for keys in (config.to_dict(), config.to_diff_dict()):
            (tmp_path / "config.json").write_text(json.dumps(keys | others))
            described_there = hf.read_description(tmp_path / "config.json")
            assert hf.differences(base_config(base).model_spec.model, described_there) == []


@pytest.mark.parametrize("base", [LLAMA, QWEN, QWEN_0_6B, DEEPSEEK, GPT_OSS])
def test_a_key_that_is_left_out_has_the_value_that_transformers_gives_it(tmp_path, base):
    from transformers import AutoConfig

    model, file = base_config(base).model_spec.model, tmp_path / "config.json"
    values = hf.described(model)
    rope = {name: values.pop(name) for name in ROTARY if name in values}
    other = []
    for name in values.keys() - {"model_type", "num_hidden_layers"}:
        left = {key: value for key, value in values.items() if key != name}
        file.write_text(json.dumps({**left, "rope_parameters": rope}))
        theirs = getattr(AutoConfig.from_pretrained(tmp_path), name, values[name])
        named = [words.split()[0] for words in hf.differences(model, hf.read_description(file))]
        assert (name in named) == (theirs != values[name]), f"{name}: {theirs} of transformers, {named}"
        other += [name] * (name in named)
    assert ("norm_topk_prob" in other) == (base == QWEN)


TWO = {"a": [2, 3], "b": [4]}


@pytest.mark.parametrize(
    ("files", "index", "words"),
    [
        ([TWO], None, None),
        ([{"a": [2, 3]}, {"b": [4]}], {"a": "0.safetensors", "b": "1.safetensors"}, None),
        ([TWO | {"layers.0.rotary_emb.inv_freq": [8]}], None, None),
        ([{"a": [2, 3]}], None, "b is missing there"),
        ([{"a": [2, 3], "b": [5]}], None, r"b is \[5\] there and \[4\] in the base"),
        ([TWO | {"c.bias": [1]}], None, "c.bias is .* there and read by nothing in the base"),
        ([TWO, {"b": [4]}], None, "b is in 1.safetensors and in another file"),
    ],
)
def test_every_tensor_of_a_folder_is_accounted_for(tmp_path, files, index, words):
    for number, shapes in enumerate(files):
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    differ = hf.differing_tensors(tmp_path, TWO, r"rotary_emb\.inv_freq$")
    assert not differ if words is None else re.search(words, *differ)


def test_a_tied_matrix_that_is_another_is_named(tmp_path):
    """Also where it lies in another file than the embedding."""
    embedding = torch.arange(6.0).reshape(3, 2)
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "0.safetensors")
    assert hf.untied(tmp_path) == []
    for head in (embedding.clone(), embedding + 1e-6, embedding.bfloat16(), embedding[:2].clone()):
        save_file({"lm_head.weight": head}, tmp_path / "1.safetensors")
        assert bool(hf.untied(tmp_path)) != (head.dtype == torch.float32 and torch.equal(head, embedding))


def test_a_file_that_is_cut_off_is_named(tmp_path):
    save_file({"a": torch.zeros(9)}, file := tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=f"{file} cannot be read"):
        hf.differing_tensors(tmp_path, {"a": [9]}, "^$")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        hf.differing_tensors(tmp_path, {"a": [9]}, "^$")
