"""`wlb-titan config check` and `show` on torchtitan's own configuration."""

import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ROOT, invoke
from lab import make_corpus

from wlb_titan.runtime.models.load import load_config
from wlb_titan.runtime.pipeline.build import stage_names

pytestmark = pytest.mark.slow


# What stands below the line `base = "llama3_debug"`, after a bar words, and indented what the message says.
WRONG = """
training.sequence_len = 4096
    t.toml:2: training.sequence_len = 4096: there is no such key. ... Did you mean training.seq_len?
optimizer.lr = 3e-4
    t.toml:2: optimizer.lr = 0.0003: ... Did you mean optimizer.param_groups.0.optimizer_kwargs.lr?
[paralelism]; tensor_parallel_degree = 2
    t.toml:2: [paralelism]: ... Did you mean parallelism?
wlb.policy = "plain/per_documents"
    t.toml:2: wlb.policy =  ... Did you mean 'per_document'?
compile.enable_async_tensor_parallel = true
    t.toml:2: compile.enable_async_tensor_parallel = true: CompileConfig rejects this: Async TP
[checkpoint]; interval = 0; enable = true
    t.toml:3: checkpoint.interval = 0: CheckpointManager rejects this: Checkpoint interval
[training]; disable_cuda_graphs = false; [parallelism]; pipeline_parallel_degree = 2
    t.toml:3: training.disable_cuda_graphs = false: TrainerConfig rejects this: CUDA graphs do not support
hf_assets_path = "tokenizer"
    t.toml:2: hf_assets_path = "tokenizer": this has no effect ... wlb.corpus.path
loss.class = "torchtitan.components.loss:MSELoss"
    t.toml:2: loss.class = ... MSELoss takes no labels that are token ids
training.gc_freq = 0
    t.toml:2: training.gc_freq = 0: it is a number of steps, at least 1
optimizer.param_groups.0.pattern = "["
    t.toml:2: optimizer.param_groups.0.pattern = "[": it is not a valid regular expression
optimizer.param_groups.0.pattern = "zzz"
    t.toml:2: optimizer.param_groups.0.pattern = "zzz": it matches no parameter of the model
optimizer.param_groups.0.pattern = "norm"
    optimizer.param_groups: no pattern matches
compile.enable = true; compile.backend = "foo"
    t.toml:3: compile.backend = "foo": torch has no such backend; it has ... inductor
optimizer.param_groups.0.pattern = "tok_embeddings"; parallelism.pipeline_parallel_degree = 2; \
optimizer.param_groups.0.optimizer_name = "AdamW"
    optimizer.param_groups: no pattern matches layers.0 ... of stage 0; add a last group
parallelism.expert_parallel_degree = 2; parallelism.data_parallel_shard_degree = 2
    t.toml:2: parallelism.expert_parallel_degree = 2: the model has no experts; set it to 1
loss.class = "torchtitan.tools.profiler:Profiler"
    t.toml:2: loss.class =  ...
    Profiler' is not a configuration of the kind torchtitan.components.loss:BaseLoss
optimizer.param_groups.1.optimizer_kwargs.lr = 1.0
    t.toml:2: optimizer.param_groups.1: ... has 1 element(s)
wlb.policy = "plain//best"; parallelism.pipeline_parallel_degree = 2; \
parallelism.pipeline_parallel_schedule = "LoopedBFS"; training.local_batch_size = 8
    t.toml:2: wlb.policy = "plain/per_sequence/best": ... not for LoopedBFS ... 'as_packed'
training.disable_cuda_graphs = false
    t.toml:2: training.disable_cuda_graphs = false: a CUDA graph replays one length
wlb.device = "cpu"; wlb.attention.implementation = "triton"
    t.toml:3: wlb.attention.implementation = "triton":  ... needs a CUDA device, and runs on cpu
training.mixed_precision_param = "bfloat16"; wlb.attention.implementation = "gluon"
    t.toml:3: wlb.attention.implementation = "gluon":  ... head dims (64, 128), but q has 32
training.mixed_precision_param = "float32"; wlb.attention.implementation = "triton"
    t.toml:2: training.mixed_precision_param = "float32":  ... set it to "bfloat16"
parallelism.context_parallel_load_balancer = "ptrr"
    t.toml:2: parallelism.context_parallel_load_balancer =  ... no effect ... wlb.policy
validator.class = "torchtitan.components.validate:Validator"
    t.toml:2: validator.class =  ... is not a configuration of the kind wlb_titan.runtime.validator:Validator
validator.freq = 5
    t.toml:2: validator.freq = 5: this has no effect ... wlb.validation.every
validator.dataloader.dataset = "c4"
    t.toml:2: [validator.dataloader] ... no effect ... wlb.validation.hold_out
tokenizer.class = "torchtitan.components.tokenizer:HuggingFaceTokenizer"
    t.toml:2: [tokenizer] ... no effect ... wlb.corpus.path
checkpoint.initial_load_path = "/weights"
    t.toml:2: checkpoint.initial_load_path =  ... checkpoint.enable is false
override.imports = ["toys_override.with_varlen"]
    t.toml:2: override.imports = ["toys_override.with_varlen"]: the model has  ...
    layers.0.attention.inner_attention and 3 more: torchtitan.models.common.attention:Varlen
override.imports = ["nowhere.at_all"]
    t.toml:2: override.imports =  ... nowhere
wlb.policy = "slim"; wlb.packing.micropacks = 1; parallelism.pipeline_parallel_degree = 2
    t.toml:3: wlb.packing.micropacks = 1: 1 MicroPacks are fewer than the 2 pipeline stages
wlb.policy = "slim"; wlb.packing.asymmetric = true; parallelism.pipeline_parallel_degree = 2
    t.toml:3: wlb.packing.asymmetric = true: ... here are 2 pipeline ranks and
wlb.policy = "slim"; parallelism.pipeline_parallel_degree = 2; \
parallelism.pipeline_parallel_layers_per_stage = 1
    t.toml:1: parallelism.pipeline_parallel_schedule = "1F1B" ... 1 stage per rank
[parallelism]; pipeline_parallel_degree = 2; pipeline_parallel_schedule = "Interleaved1F1B"; \
pipeline_parallel_layers_per_stage = 1 | --base bases:lora
    t.toml:3: parallelism.pipeline_parallel_degree = 2: LoRA trains nothing in the stage of tok_embeddings
wlb.policy = "slim"; parallelism.data_parallel_shard_degree = 4; parallelism.expert_parallel_degree = 2 \
| --base torchtitan.models.qwen3.config_registry:qwen3_moe_debug
    t.toml:4: parallelism.expert_parallel_degree = 2: 2 ranks share experts ... several data-parallel ranks
parallelism.data_parallel_shard_degree = 3; parallelism.expert_parallel_degree = 2; \
training.local_batch_size = 1 | --base torchtitan.models.qwen3.config_registry:qwen3_moe_debug
    t.toml:3: parallelism.expert_parallel_degree = 2: ... 2 does not divide TP 1 x CP 1 x 3
lr_scheduler.total_steps = 2; training.steps = 5; lr_scheduler.warmup_steps = 1
    t.toml:2: lr_scheduler.total_steps = 2: a schedule of 2 steps ... Set it to 5 or more
lr_scheduler.total_steps = 20; training.steps = 5; lr_scheduler.warmup_steps = 30
    t.toml:2: lr_scheduler.total_steps = 20:  ... 30 of warm-up ... Set it to 31 or more
wlb.policy = "slim/ulysses"; wlb.packing.dp_merge = true; \
parallelism.pipeline_parallel_degree = 2; parallelism.context_parallel_degree = 2
    t.toml:3: wlb.packing.dp_merge = true: Data-parallel ranks cannot share ... ulysses, which
wlb.policy = "slim"; activation_checkpoint.class = "FullAC"; \
parallelism.pipeline_parallel_degree = 2; parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
    t.toml:5: parallelism.pipeline_parallel_schedule =  ... under ZBVZeroBubble a document's backward passes
wlb.validation.path = "a"; wlb.validation.hold_out = 0.1
    t.toml:2: [wlb.validation]: ValidationSettings rejects this: path names
wlb.epochs = 2; wlb.corpus.sources = [{path = "a"}]
    t.toml:2: wlb.epochs = 2: WlbSettings rejects this: the sources of a mixture end at different times
dump_folder = "."
    t.toml:2: dump_folder = ".": the command runs in
dump_folder = "outputs/corpus/run"
    t.toml:2: ... the run reads outputs/corpus
dump_folder = "gs://bucket/run"
    t.toml:2: dump_folder = "gs://bucket/run": name a folder of this machine
checkpoint.folder = "s3://bucket/run"
    t.toml:2: checkpoint.folder = "s3://bucket/run": name a folder of this machine
checkpoint.enable = true; checkpoint.initial_load_path = "memory://weights"
    t.toml:3: checkpoint.initial_load_path = "memory://weights": name a folder of this machine
wlb.validation.path = "hf://datasets/some"
    t.toml:2: wlb.validation.path = "hf://datasets/some": name a folder of this machine
dump_folder = "a\\u0000b"
    t.toml:2: ... strings may not contain zero bytes
checkpoint.folder = "../x"
    t.toml:2: checkpoint.folder = "../x":  ... is not inside
checkpoint.exclude_from_loading = ["modl"]
    t.toml:2: ... "modl" is not one of optimizer
wlb.policy = "//"
    t.toml:2: wlb.policy = "//": '//' names no policy
| --base toys_of_nobody:tiny
    command line: base = "toys_of_nobody:tiny": ... start with PYTHONPATH=FOLDER
| --verbose
    command line: --verbose is neither an option
| --base llama3_debgu
    command line: base = "llama3_debgu": ... Known bases: llama3_debug
| --training.steps
    command line: --training.steps has no value
| --debug.deterministic --training.steps=5
    for a switch --debug.deterministic true or
| training.steps=5
    command line: 'training.steps=5': expected --section.key VALUE
| --extends x.toml
    command line: --extends x.toml: only a TOML file can extend another
[parallelism]; pipeline_parallel_degree = 2; context_parallel_degree = 2 | --world-size 6
    t.toml:1: parallelism: 6 processes ... context_parallel_degree = 2 (t.toml:4)
[[wlb.dimensions]]; name = "appart"; degree = 2
    t.toml:3: wlb.dimensions.0.name ... no dimension of parallelism
[[wlb.dimensions]]; name = "tensor"; degree = 2
    t.toml:3: wlb.dimensions.0.name ... tensor_parallel_degree
[[wlb.dimensions]]; degree = 2
    wlb.dimensions.0.name ... No dimension is named
[[wlb.dimensions]]; name = "toys:Apart"; degree = 2; [[wlb.dimensions]]; name = "toys:Apart"; degree = 2
    t.toml:6: wlb.dimensions.1.name ... already
[[wlb.dimensions]]; name = "toys:Apart"; degree = 3 | --world-size 8
    t.toml:1: ... 8 processes do not fit ... dimensions.0.degree 3
[[wlb.dimensions]]; name = "toys:Apart"; degree = 0
    t.toml:4: wlb.dimensions.0.degree
[[wlb.dimensions]]; name = "toys:Apart"; degree = 2; [checkpoint]; enable = true; interval = 3
    t.toml:7: checkpoint.interval = 3 ... apart meet
[[wlb.dimensions]]; name = "toys_wrong:Moved"; degree = 2
    t.toml:3: wlb.dimensions.0.name =  ... toys_runtime:OldAxis ... does not fit this wlb_titan: \
    after_optimizer(self, trainer) is called as after_optimizer(self, trainer: 'Trainer', *, meets
wlb.policy = "plain/toys_wrong:Attended"
    t.toml:2: wlb.policy =  ... toys_wrong:OldAttention ... fit this wlb_titan: __call__(self, q, k, v,
"""

FOUND = re.findall(r"^(\S.*)\n((?:    .*\n)+)", WRONG, re.MULTILINE)
BASE = 'base = "llama3_debug"\n'


def run(words: str):
    return invoke("config", *words.split())


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("written", "said"), FOUND, ids=[written for written, _ in FOUND])
def test_what_is_wrong_is_told_in_one_paragraph(here, written, said):
    lines, _, words = written.partition("|")
    (here / "t.toml").write_text(BASE + lines.strip().replace("; ", "\n"))
    result = run(f"check t.toml {words}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert [part for part in " ".join(said.split()).split(" ... ") if part not in result.stderr] == []


def test_what_is_right_is_told_in_a_line(here, monkeypatch):
    make_corpus(here / "texts", here / "corpus")
    content = BASE + 'wlb.corpus.path = "corpus"\nparallelism.pipeline_parallel_degree = 2'
    (here / "t.toml").write_text(content)
    result = run("check t.toml --training.seq_len 2048 --world-size 8 --training.steps=7")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "OK t.toml: model llama debug, TP 1 x CP 1 x PP 2 x DP 4 = 8 processes, seq_len 2048, 7 steps, "
        "policy plain/per_sequence, attention torch_cpu, allocator expandable_segments:True\n"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    said = run("check t.toml --training.mixed_precision_param bfloat16 --base qwen3_8b").stdout
    assert "gluon on Hopper and torch on other GPUs, allocator max_split_size_mb:64\n" in said
    said = run("check t.toml --wlb.attention.implementation reference").stdout
    assert "attention reference, allocator" in said
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # fixed segments, as torch has them
    assert run("check t.toml").stdout.endswith("attention torch_cpu, allocator \n")
    assert run("check --wlb.device cpu --config t.toml").stdout.endswith("attention torch_cpu\n")
    assert run("check --config=t.toml --gpus 8").stderr.endswith("--help lists the command's own options.\n")
    assert "DP 1 = 2 processes or a multiple," in run("check t.toml").stdout
    (here / "own.toml").write_text(content + '\n[[wlb.dimensions]]\nname = "toys:Apart"\ndegree = 2')
    said = run("check own.toml --world-size 8 --wlb.epochs 1").stdout
    assert "PP 2 x DP 2 x APART 2 = 8 processes" in said and "1 epoch," in said
    said = run("check t.toml --activation_checkpoint.class MemoryBudgetAC --compile.enable true")
    assert said.exit_code == 0
    assert "Warning: activation_checkpoint.class: MemoryBudgetAC is used" in said.stderr


def test_what_is_shown_has_its_origin_and_loads_to_the_same(here):
    (here / "t.toml").write_text(BASE + "\n[training]\nseq_len = 2048")
    words = "--training.steps 5 --wlb.policy wlb --wlb.packing.thresholds [64] --changed"
    changed = [" ".join(line.split()) for line in run(f"show t.toml {words}").stdout.splitlines()]
    assert "thresholds = [64] # command line; at least 2" in changed
    assert changed[2:4] == ["[training]", "seq_len = 2048 # t.toml:4; at least 2 and at most 134217728"]
    assert changed[4] == "steps = 5 # command line; at least 1"
    everything = run("show t.toml --training.steps 5").stdout
    assert "lr = 0.003" in everything
    (here / "shown.toml").write_text(everything)
    shown, written = load_config("shown.toml"), load_config("t.toml", ["--training.steps=5"])
    assert without_model(shown) == without_model(written)


@pytest.mark.parametrize("path", ["weights", "../x/weights", "/weights", "s3://bucket/weights", "none"])
def test_weights_are_looked_for_from_the_folder_of_the_command_on(here, path):
    (here / "t.toml").write_text(f'{BASE}\ncheckpoint.enable = true\ncheckpoint.initial_load_path = "{path}"')
    found = load_config("t.toml").config.checkpoint.initial_load_path
    expected = {"none": None, "s3://bucket/weights": path}
    assert found == expected.get(path, os.path.normpath(here / path))


def without_model(resolved):
    """The configuration but for the model, whose initialisers are functions and so never equal."""
    return replace(resolved.config, model_spec=None)


@pytest.mark.parametrize("file", ROOT.glob("train_configs/*.toml"), ids=lambda path: path.stem)
@pytest.mark.long
def test_the_files_that_come_with_the_project_are_saved_as_they_are(here, file):
    resolved = load_config(file)
    (here / "saved.toml").write_text(resolved.to_toml())
    again = load_config("saved.toml")
    assert without_model(again) == without_model(resolved)
    assert list(again.provenance) == list(resolved.provenance)


@pytest.mark.parametrize("file", ROOT.glob("train_configs/llama2_*.toml"), ids=lambda path: path.stem)
def test_stages_of_table_1_are_as_equal_as_layers_allow(file):
    config = load_config(file).config
    stages = stage_names(config.parallelism, config.model_spec.model)
    layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    assert len(stages) % config.parallelism.pipeline_parallel_degree == 0
    assert max(layers) - min(layers) <= (1 if sum(layers) % len(layers) else 0)


EXAMPLES = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_documentation_load(here, example):
    if "extends" in example:
        (here / "train.toml").write_text(EXAMPLES[0])
    elif "base =" not in example:
        example = BASE + example
    (here / "example.toml").write_text(example)
    load_config("example.toml")


def test_the_documentation_says_of_every_key_of_torchtitan_whether_it_is_followed(here):
    """Keys that lie in an element of a list or in a section below one are under their section's."""
    classes = '[activation_checkpoint]\nclass = "SelectiveDocumentAC"\n[loss]\nclass = "ChunkedLossWrapper"'
    (here / "t.toml").write_text(f"{BASE}{classes}")
    shown = tomllib.loads(load_config("t.toml").to_toml())
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `\[(\w+)\]` \|(.*)", page, re.MULTILINE)
    listed = {section: set(re.findall(r"`(\w+)`", row)) for section, row in rows}
    sections = {name: keys for name, keys in shown.items() if isinstance(keys, dict) and name != "wlb"}
    assert sections.keys() <= listed.keys()
    missing = {name: sorted(keys.keys() - listed[name]) for name, keys in sections.items()}
    assert not any(missing.values()), missing
