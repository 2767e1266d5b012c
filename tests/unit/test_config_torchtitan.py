"""`wlb-titan config check` and `show` on torchtitan's own configuration: right and wrong files."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main
from wlb_titan.config.build import dotted
from wlb_titan.runtime.models.load import load_config

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]

# What stands below the line `base = "llama3_debug"`, after a bar words, and indented what the message says.
WRONG = """
training.sequence_len = 4096
    t.toml:2: training.sequence_len = 4096: there is no such key. ... Did you mean training.seq_len?
training.context_parallel_degree = 2
    t.toml:2: training.context_parallel_degree = 2: ... parallelism.context_parallel_degree?
optimizer.lr = 3e-4
    t.toml:2: optimizer.lr = 0.0003: ... Did you mean optimizer.param_groups.0.optimizer_kwargs.lr?
[paralelism]; tensor_parallel_degree = 2
    t.toml:2: [paralelism]: ... Did you mean parallelism?
wlb.packing.policy = "fancy"
    t.toml:2: wlb.packing.policy = "fancy": no packing policy is called 'fancy' ... plain, fixed_greedy
wlb.sharding.policy = "per_documents"
    t.toml:2: wlb.sharding.policy =  ... Did you mean 'per_document'?
wlb.packing.policy = "plain"; wlb.packing.max_delay = 3
    t.toml:3: wlb.packing.max_delay = 3 ... policy = "plain" does not have it, but wlb_lazy
compile.enable_async_tensor_parallel = true
    t.toml:2: compile.enable_async_tensor_parallel = true: CompileConfig rejects this: Async TP
[checkpoint]; interval = 0; enable = true
    t.toml:3: checkpoint.interval = 0: CheckpointManager rejects this: Checkpoint interval
[training]; disable_cuda_graphs = false; [parallelism]; pipeline_parallel_degree = 2
    t.toml:3: training.disable_cuda_graphs = false: TrainerConfig rejects this: CUDA graphs do not support
[[training]]; steps = 3
    t.toml:2: [[training]]: an array
hf_assets_path = "tokenizer"
    t.toml:2: hf_assets_path = "tokenizer": this has no effect ... wlb.corpus.path
loss.class = "torchtitan.tools.profiler:Profiler"
    t.toml:2: loss.class =  ...
    Profiler' is no configuration of the kind torchtitan.components.loss:BaseLoss
optimizer.param_groups.1.optimizer_kwargs.lr = 1.0
    t.toml:2: optimizer.param_groups.1: ... has 1 element(s)
training.seq_len = 1025
    t.toml:2: training.seq_len = 1025: ... do not divide
wlb.pipeline.order = "best"; parallelism.pipeline_parallel_degree = 2; \
parallelism.pipeline_parallel_schedule = "LoopedBFS"; training.local_batch_size = 8
    t.toml:2: wlb.pipeline.order = "best": ... the schedule is LoopedBFS ... 'longest_first'
training.disable_cuda_graphs = false
    t.toml:2: training.disable_cuda_graphs = false: a CUDA graph replays one length
wlb.device = "cpu"; wlb.attention.implementation = "triton"
    t.toml:3: wlb.attention.implementation = "triton":  ... needs a CUDA device, and runs on cpu
training.mixed_precision_param = "bfloat16"; wlb.attention.implementation = "gluon"
    t.toml:3: wlb.attention.implementation = "gluon":  ... head dims (64, 128), but q has 32
training.mixed_precision_param = "float32"; wlb.attention.implementation = "triton"
    t.toml:2: training.mixed_precision_param = "float32":  ... set it to "bfloat16"
parallelism.context_parallel_load_balancer = "ptrr"
    t.toml:2: parallelism.context_parallel_load_balancer =  ... no effect ... wlb.sharding.policy
validator.class = "torchtitan.components.validate:Validator"
    t.toml:2: validator.class =  ... is no configuration of the kind wlb_titan.runtime.validator:Validator
checkpoint.initial_load_path = "/weights"
    t.toml:2: checkpoint.initial_load_path =  ... checkpoint.enable is false
override.imports = ["toys_override.with_varlen"]
    t.toml:2: override.imports = ["toys_override.with_varlen"]: the model has  ...
    layers.0.attention.inner_attention and 3 more: torchtitan.models.common.attention:Varlen
override.imports = ["nowhere.at_all"]
    t.toml:2: override.imports =  ... nowhere
wlb.packing.policy = "slim"; wlb.packing.micropacks = 1; parallelism.pipeline_parallel_degree = 2
    t.toml:3: wlb.packing.micropacks = 1: 1 MicroPacks are fewer than the 2 pipeline stages
wlb.packing.policy = "slim"; wlb.packing.asymmetric = true; parallelism.pipeline_parallel_degree = 2
    t.toml:3: wlb.packing.asymmetric = true: ... It is for jobs that need a pipeline and full checkpointing
wlb.packing.policy = "slim"; wlb.packing.dp_merge = true; wlb.sharding.policy = "ulysses"; \
parallelism.pipeline_parallel_degree = 2; parallelism.context_parallel_degree = 2
    t.toml:3: wlb.packing.dp_merge = true: Data-parallel ranks cannot share ... ulysses, which
wlb.packing.policy = "slim"; activation_checkpoint.class = "FullAC"; \
parallelism.pipeline_parallel_degree = 2; parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
    t.toml:5: parallelism.pipeline_parallel_schedule =  ... ZBVZeroBubble, in whose order
wlb.validation.path = "a"; wlb.validation.hold_out = 0.1
    t.toml:2: [wlb.validation]: ValidationSettings rejects this: with path
wlb.epochs = 2; wlb.corpus.sources = [{path = "a"}]
    t.toml:2: wlb.epochs = 2: WlbSettings rejects this: sources come round at different times
wlb.corpus.path = "nowhere"
    t.toml:2: ... nowhere ... wlb-titan prepare
| --base llama3_debgu
    command line: base = "llama3_debgu": ... Known bases: llama3_debug
| --training.steps many
    command line: training.steps = "many": expected an integer, at least 1
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
[[wlb.dimensions]]; name = "toys:Apert"; degree = 2
    t.toml:3: wlb.dimensions.0.name ... cannot be imported
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
[[wlb.dimensions]]; name = "toys:Apart"; degre = 2
    t.toml:4: wlb.dimensions.0.degre ... degree
[[wlb.dimensions]]; name = "toys:Apart"; degree = 2; [checkpoint]; enable = true; interval = 3
    t.toml:7: checkpoint.interval = 3 ... apart meet
"""

FOUND = re.findall(r"^(\S.*)\n((?:    .*\n)+)", WRONG, re.MULTILINE)
SAID = {written: " ".join(said.split()) for written, said in FOUND}
BASE = 'base = "llama3_debug"\n'


def run(command: str):
    return CliRunner().invoke(main, f"config {command}")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("written", SAID)
def test_what_is_wrong_is_told_in_one_paragraph(here, written):
    lines, _, words = written.partition("|")
    (here / "t.toml").write_text(BASE + lines.strip().replace("; ", "\n"))
    result = run(f"check t.toml {words}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert [part for part in SAID[written].split(" ... ") if part not in result.stderr] == [], result.stderr


def test_what_is_right_is_told_in_a_line(here):
    (here / "text").mkdir()
    for number in range(20):
        (here / "text" / f"{number}.txt").write_text("to be or not to be " * 50)
    prepared = CliRunner().invoke(main, "prepare corpus --source text:text --vocab-size 300")
    assert prepared.exit_code == 0, prepared.output
    content = BASE + 'wlb.corpus.path = "corpus"\nparallelism.pipeline_parallel_degree = 2'
    (here / "t.toml").write_text(content)
    result = run("check t.toml --training.seq_len 2048 --world-size 8 --training.steps=7")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "OK t.toml: model llama debug, TP 1 x CP 1 x PP 2 x DP 4 = 8 processes, seq_len 2048, 7 steps, "
        "packing plain, sharding per_sequence\n"
    )
    assert "DP 1 = 2 processes or a multiple," in run("check t.toml").stdout
    (here / "own.toml").write_text(content + '\n[[wlb.dimensions]]\nname = "toys:Apart"\ndegree = 2')
    said = run("check own.toml --world-size 8 --wlb.epochs 1").stdout
    assert "PP 2 x DP 2 x APART 2 = 8 processes" in said and "1 epoch," in said


def test_what_is_shown_has_its_origin_and_loads_to_the_same(here):
    (here / "t.toml").write_text(BASE + "\n[training]\nseq_len = 2048")
    result = run("show t.toml --training.steps 5 --changed")
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == [
        *('base = "llama3_debug" # t.toml:1', "", "[training]"),
        *(
            "seq_len = 2048 # t.toml:4; at least 2 and at most 134217728",
            "steps = 5 # command line; at least 1",
        ),
    ]
    everything = run("show t.toml --training.steps 5").stdout
    assert "lr = 0.003" in everything
    (here / "shown.toml").write_text(everything)
    shown, written = load_config("shown.toml"), load_config("t.toml", ["--training.steps=5"])
    assert without_model(shown) == without_model(written)


def without_model(resolved):
    """The configuration but for the model, whose initialisers are functions and so never equal."""
    return dataclasses.replace(resolved.config, model_spec=None)


FILES = sorted(REPOSITORY.glob("train_configs/*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_files_that_come_with_the_project_are_saved_as_they_are(here, file):
    resolved = load_config(file)
    (here / "saved.toml").write_text(resolved.to_toml())
    again = load_config("saved.toml")
    assert without_model(again) == without_model(resolved)
    assert list(again.provenance) == list(resolved.provenance)


def test_the_balanced_file_changes_the_balance_only():
    plain, balanced = (
        load_config(REPOSITORY / "train_configs" / f"llama2_7b_128k{ending}.toml")
        for ending in ("", "_balanced")
    )
    before, after = ({dotted(entry.path): entry.value for entry in one.entries} for one in (plain, balanced))
    wlb = {"wlb.packing.policy", "wlb.sharding.policy", "wlb.pipeline.order"}
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert changed == {*wlb, "dump_folder", "parallelism.pipeline_parallel_schedule"}


@pytest.mark.parametrize("file", REPOSITORY.glob("train_configs/llama2_*.toml"), ids=lambda path: path.stem)
def test_stages_of_table_1_are_as_equal_as_layers_allow(file):
    from wlb_titan.runtime.pipeline.schedules import stage_names

    config = load_config(file).config
    stages = stage_names(config.parallelism, config.model_spec.model)
    layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    assert len(stages) % config.parallelism.pipeline_parallel_degree == 0
    assert max(layers) - min(layers) <= (1 if sum(layers) % len(layers) else 0)


def test_neither_the_package_nor_the_command_imports_torch():
    code = (
        "import sys, wlb_titan.config, wlb_titan.config.settings, wlb_titan.commands.config; "
        "print([m for m in ('torch', 'torchtitan', 'datasets', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


EXAMPLES = re.findall(r"```toml\n(.*?)```", (REPOSITORY / "docs" / "configuration.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_documentation_load(here, example):
    if "extends" in example:
        (here / "train.toml").write_text(EXAMPLES[0])
    elif "base =" not in example:
        example = BASE + example
    (here / "example.toml").write_text(example)
    load_config("example.toml")
