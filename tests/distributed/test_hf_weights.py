"""Training goes on from weights of Hugging Face's format: losses and gradients are those of transformers'
Llama, document by document, which shares no code with torchtitan's adapter or model."""

import json
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from commands import invoke
from lab import CONFIG, layout, ranks
from pipeline_reference import differences
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from trainers import GRADIENTS
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, LlamaConfig, LlamaForCausalLM

from wlb_titan.config.documents import open_corpus, training_documents
from wlb_titan.corpus import Corpus
from wlb_titan.documents.mixture import is_held_out
from wlb_titan.runtime.dataloader import PlannedDataLoader
from wlb_titan.runtime.models.load import load_config

DESCRIPTION = json.loads(
    """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64}}"""
)
SAVED_IN_HF = ("--checkpoint.last_save_in_hf", "true", "--checkpoint.last_save_model_only", "true")
UNSCALED = {"rope_type": "default", "rope_theta": 500000.0}


def whole_rows(lab):
    """The documents of the lab's corpus, of which everything is learned."""
    corpus = Corpus.open(lab.corpus)
    documents = [corpus.tokens(row).tolist() for row in range(len(corpus))]
    return [{"input_ids": tokens, "labels": tokens} for tokens in documents]


def in_transformers(folder):
    """A model that has every tensor of the folder and no other."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def loading(folder):
    return "--checkpoint.initial_load_in_hf", "true", "--checkpoint.initial_load_path", str(folder)


@pytest.fixture(scope="module")
def published(lab):
    """A folder as it comes from the Hugging Face hub, with the tokenizer of the corpus."""
    folder = lab.folder / "published"
    folder.mkdir()
    # Such that attention is far from uniform, or a wrong rotation would hardly show in the loss.
    random, weights = torch.Generator().manual_seed(0), {}
    for name, weight in LlamaForCausalLM(LlamaConfig(**DESCRIPTION)).state_dict().items():
        noise = torch.randn(weight.shape, generator=random)
        weights[name] = 1 + 0.1 * noise if noise.ndim == 1 else noise * 2 * noise.shape[1] ** -0.5
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(DESCRIPTION))
    for file in (lab.corpus / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder, weights


def test_the_first_loss_is_that_of_the_published_weights(lab, published):
    folder, weights = published
    words = ("--base", "bases:scaled_llama", "--training.steps", "2", *loading(folder))
    alone = lab.experiment("hf_one_process", *words, *layout(), *SAVED_IN_HF)
    parallel = lab.experiment("hf_tp2", *words, *layout("tp2"))
    lab.run(1, [alone])
    lab.run(2, [parallel])
    step, _ = first_step(alone.words(), whole_rows(lab), "token")
    expected, _ = hugging_face(folder, step, "token")
    assert alone.losses()[0] == pytest.approx(expected, rel=1e-6)
    assert alone.losses()[1] < alone.losses()[0]
    assert parallel.losses() == pytest.approx(alone.losses(), rel=1e-6)
    saved = alone.folder / "checkpoint" / "step-2"
    theirs = AutoTokenizer.from_pretrained(saved)
    assert theirs.decode(theirs("w001 w002")["input_ids"]) == "w001 w002"
    model = in_transformers(saved)
    assert model.dtype == torch.float32
    moved = model.model.norm.weight - weights["model.norm.weight"]
    assert 0 < moved.abs().max() < 0.1, "the weights are not those that were trained"
    # What that is worth: without the scaling of the rotary positions the loss is another.
    unscaled, _ = hugging_face(folder, step, "token", rope_parameters=UNSCALED)
    assert unscaled != pytest.approx(expected, rel=1e-3)


@pytest.mark.long
def test_what_is_saved_in_that_format_loads_under_expert_parallelism(lab):
    base = ("--base", "bases:qwen3_moe", "--checkpoint.export_dtype", "float32")
    one_step = (*base, "--training.steps", "1")
    unchanged = ("--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0")
    saved = lab.experiment("seed", *one_step, *layout(), *unchanged, *SAVED_IN_HF)
    saved.folder = lab.folder / "saved_in_hf"
    lab.run(1, [saved])
    published = saved.folder / "checkpoint" / "step-1"
    experts = (*layout("cp2"), "--parallelism.expert_parallel_degree", "2")
    loaded = lab.experiment("loaded_from_hf", *one_step, *experts, *loading(published))
    lab.run(2, [loaded])
    assert loaded.losses() == pytest.approx(saved.losses(), rel=1e-5)


@pytest.mark.long
def test_a_checkpoint_is_exported_in_one_process_as_a_run_saves_it(lab, on_terminal):
    """Of ranks that had other layers or other shares of the weights, in another dtype than the run's."""
    words = (*SAVED_IN_HF, "--checkpoint.export_dtype", "bfloat16", "--checkpoint.interval", "1")
    words += ("--checkpoint.initial_load_path", "", "--lr_scheduler.total_steps", "2", "--training.steps")
    runs = {}
    for name in ("pp2 layers4", "dp2", "cp2 ep2 qwen3_moe"):
        runs[name] = [lab.experiment(f"{name} {steps}", *layout(name), *words, steps) for steps in "12"]
    lab.run(2, [run for pair in runs.values() for run in pair])
    for saved, run in runs.values():
        config, output = str(run.folder / "config.toml"), run.folder / "hugging_face" / "step-1"
        _, shown = on_terminal("export", config, 1)
        assert "Reading weights" in shown
        expected = saved.folder / "checkpoint" / "step-1"
        names = {path.name for path in expected.iterdir()}
        assert names == {path.name for path in output.iterdir()} and "config.json" in names
        (weights,) = (name for name in names if name.endswith(".safetensors"))
        for name in names - {weights}:
            assert json.loads((output / name).read_text()) == json.loads((expected / name).read_text()), name
        theirs, ours = load_file(expected / weights), load_file(output / weights)
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs)
        assert {weight.dtype for weight in ours.values()} == {torch.bfloat16}
        in_transformers(output)
    config, other = str(runs["dp2"][1].folder / "config.toml"), str(run.folder / "other")
    steps = runs["dp2"][1].folder / "checkpoint"
    entries = FileSystemReader(steps / "step-1").read_metadata().state_dict_metadata.items()
    nan = {name: torch.full(one.size, torch.nan) for name, one in entries if hasattr(one, "size")}
    dcp.save(nan, checkpoint_id=steps / "step-9", no_dist=True)
    others = ("1", "--output", other, "--checkpoint.last_save_in_hf", "false", "--base")
    for words, told in {
        ("1",): "--output: .*step-1 already exists; name another",
        ("9",): "STEP: .*step-9 cannot be exported: .* of its weights, such as .* are not finite. Name an",
        ("7",): "STEP: .*step-7 cannot be exported: it does not exist. In .* there is step-1, step-2",
        ("2",): "STEP: .*step-2 cannot be exported: it is in that format already",
        (*others, "bases:lora"): "base: .* such as LoRA's ",
        (*others, "bases:qwen3_moe"): "base: .* no place for 2 parts of the model, such as .*expert_bias",
        (*others, "bases:qwen3"): "The checkpoint .*step-1 cannot be loaded: ",
    }.items():
        result = invoke("export", config, *words)
        assert result.exit_code == 2 and re.search(told, result.stderr), (words, result.output)


GPT_OSS = json.loads(
    """{"vocab_size": 512, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "sliding_window": 24, "rms_norm_eps": 1e-5}"""
)


@pytest.mark.long
def test_gpt_oss_trains_from_published_weights_and_is_exported_whole(lab):
    """Experts' weights too: loss and gradient norm are transformers', as near as bfloat16 gets, and what is
    saved without a learning rate is what was loaded."""
    folder = lab.folder / "published_gpt_oss"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**GPT_OSS), attn_implementation="eager").bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else noise * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for file in (lab.corpus / "tokenizer").iterdir():
        shutil.copy(file, folder)
    words = ("--base", "bases:gpt_oss", *loading(folder), "--checkpoint.export_dtype", "bfloat16")
    still = ("--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0", "--training.steps", "1")
    alone = lab.experiment("gpt_oss_alone", *words, *still, *layout(), *SAVED_IN_HF)
    cp2 = lab.experiment("gpt_oss_cp2", *words, *still, *layout("cp2 ep2"))
    lab.run(1, [alone])
    lab.run(2, [cp2])
    step, _ = first_step(alone.words(), whole_rows(lab), "token")
    expected, gradients = hugging_face(folder, step, "token", AutoModelForCausalLM, dtype=torch.float32)
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    for run in (alone, cp2):
        assert run.losses()[0] == pytest.approx(expected, rel=3e-3)
        assert run.metrics()[0]["grad_norm"] == pytest.approx(norm, rel=0.03)
    saved = alone.folder / "checkpoint" / "step-1"
    (file,) = saved.glob("*.safetensors")
    before, after = load_file(folder / "model.safetensors"), load_file(file)
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    in_transformers(saved)


def test_a_run_that_is_started_again_goes_on_from_its_own_checkpoint(lab, published):
    folder, _ = published
    kept = ("--checkpoint.last_save_model_only", "false", "--lr_scheduler.total_steps", "3")
    words = ("--base", "bases:scaled_llama", *kept, *loading(folder), *layout(), "--training.steps")
    run, whole = lab.experiment("hf_again", *words, "1"), lab.experiment("hf_whole", *words, "3")
    lab.run(1, [run, whole])
    run.overrides = [*run.overrides[:-1], "3"]
    lab.run(1, [run])
    assert run.losses() == whole.losses() and len(run.losses()) == 3


MASKED = {  # name as of `lab.layout` -> the conversations, and what weighs the same
    "pp2 cp2 plain": ("dense", "token"),  # cuts documents
    "dp2 cp2 wlb_lazy": ("sparse", "token"),
    "tp2": ("dense", "conversation"),
    "pp2 slim8": ("dense", "conversation"),
}


def first_step(words, rows, weight):
    """Of each document of the first step: its tokens and labels, and how many labels all of it has; `rows`
    are those of the corpus. And the step itself."""
    loaded = load_config(CONFIG, words)
    config, job = loaded.config, loaded.job
    corpus = open_corpus(config.wlb.corpus)
    documents = training_documents(config.wlb, corpus)
    loading = PlannedDataLoader.Config(corpus=corpus, documents=documents, job=job, loss_weight=weight)
    loader = PlannedDataLoader(loading)
    step = next(iter(loader))
    loader.close()
    pieces = {}
    for micro_batch in step.plan.packs:
        for id_, start, length, _, row in micro_batch.documents.tolist():
            stop = start + length
            if micro_batch.slices is None:
                pieces[id_, start] = row, start, stop
            else:  # slices of one document, which attend to what is before them
                pieces[id_] = row, 0, max(stop, pieces.get(id_, (0, 0, 0))[2])
    found = []
    for row, start, stop in pieces.values():
        tokens, labels = rows[row]["input_ids"], rows[row]["labels"]
        targets = [*labels, -100][start + 1 : stop + 1]
        found.append((tokens[start:stop], targets, sum(label != -100 for label in labels[1:])))
    return found, step


def hugging_face(folder, step, weight, kind=LlamaForCausalLM, **description):
    """Loss and gradients of Hugging Face's model, or one of another description, document by document."""
    description = {"dtype": torch.float64, "attn_implementation": "eager", **description}
    model = kind.from_pretrained(folder, **description)
    weights = [1 / total if weight == "conversation" else 1 for *_, total in step if total]
    learned = [sum(target != -100 for target in targets) for _, targets, total in step if total]
    divisor = np.dot(learned, weights)
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, targets, total in step:
        scores = model(torch.tensor([tokens])).logits[0]
        own = F.cross_entropy(scores, torch.tensor(targets), reduction="sum")
        loss = loss + own / (max(total, 1) if weight == "conversation" else 1) / divisor
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in model.named_parameters()}


def written(experiment):
    """The gradients of its first step in Hugging Face's names and order: as if they were weights."""
    spec = load_config(CONFIG, experiment.words()).config.model_spec
    model = spec.model.build()
    gradients = torch.load(experiment.folder / GRADIENTS)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(gradients, strict=False)
    return spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())


def test_masked_losses_and_gradients_are_hugging_face_s(lab, published, conversations):
    folder, _ = published
    experiments = {}
    for name, (learned, weight) in MASKED.items():
        words = ("--base", "trainers:probed", "--training.steps", "1", "--checkpoint.enable", "true")
        data = (*lab.reading(conversations[learned]), "--wlb.loss_weight", weight)
        experiments[name] = lab.experiment(f"masked {name}", *words, *data, *loading(folder), *layout(name))
    for processes in (4, 2):
        lab.run(processes, [own for name, own in experiments.items() if ranks(name) == processes])
    for name, (learned, weight) in MASKED.items():
        rows = datasets.load_from_disk(conversations[learned])
        step, served = first_step(experiments[name].words(), rows, weight)
        loss, gradients = hugging_face(folder, step, weight)
        norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
        record = experiments[name].metrics()[0]
        error, worst = differences(written(experiments[name]), gradients)
        assert record["loss"] == pytest.approx(loss, rel=1e-6), name
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-5), name
        assert error < 1e-5, f"{name}: {worst}"
        assert record["labels"] == pytest.approx(served.labels) and served.labels > 0
        if learned == "sparse":
            learns = [(item.labels != -100).any() for item in served.items]
            assert not all(learns), "every micro-batch learns something"


def test_validation_losses_are_hugging_face_s_over_what_is_held_out(lab, published, conversations):
    """Of each source of a mixture and of all, with other policies, degrees and seeds."""
    folder, _ = published
    names = ("dense", "few")
    sources = ", ".join(f'{{path = "{conversations[name]}", name = "{name}"}}' for name in names)
    words = ("--base", "bases:scaled_llama", *loading(folder), "--training.steps", "1")
    words += ("--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0", "--training.seq_len", "1024")
    words += ("--wlb.validation.hold_out", "0.1", "--wlb.corpus.sources", f"[{sources}]", *lab.reading(None))
    reseeded = ("--wlb.corpus.seed", "5")
    runs = {}
    for name, more in {"dp1 plain": (), "dp2 wlb_lazy": reseeded, "pp2 slim4": ("--debug.seed", "5")}.items():
        runs[name] = lab.experiment(f"validated {name}", *words, *layout(name), *more)
    for processes in (1, 2):
        lab.run(processes, [run for name, run in runs.items() if ranks(name) == processes])
    expected, everything, first = {}, [], 0
    for name in names:
        rows = datasets.load_from_disk(conversations[name])
        held_out = np.flatnonzero(is_held_out(np.arange(first, first + len(rows)), 0.1)).tolist()
        first, documents = first + len(rows), []
        for ids, labels in ((rows[n]["input_ids"], rows[n]["labels"][1:]) for n in held_out):
            documents.append((ids[:-1], labels, sum(label != -100 for label in labels)))
        expected[f"validation_loss/{name}"], _ = hugging_face(folder, documents, "token")
        everything += documents
    expected["loss"], _ = hugging_face(folder, everything, "token")
    for name, run in runs.items():
        (record,) = run.validation()
        assert record == pytest.approx({"step": 1, **expected}, rel=1e-6), name
