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

# What stands below the line `base = "llama3_debug"`, and indented what the message says of it.
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
override.imports = ["overriding.with_varlen"]
    t.toml:2: override.imports = ["overriding.with_varlen"]: the model has  ...
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
"""

# Whole files, of which the first is loaded.
WRONG_FILES = {
    "missing base": ({"t": "training.steps = 3"}, ['t.toml: no base is named; write for example base = "']),
    "unknown base": (
        {"t": '# typo\nbase = "llama3_debgu"'},
        ['t.toml:2: base = "llama3_debgu":', "Known bases: llama3_debug"],
    ),
    "circular extends": (
        {"t": 'extends = "u.toml"', "u": '\nextends = "t.toml"'},
        ['u.toml:2: extends = "t.toml":', "in a circle: t.toml -> u.toml -> t.toml"],
    ),
    "missing file": ({"t": 'extends = "v.toml"'}, ['t.toml:1: extends = "v.toml": there is no file v.toml']),
    "bad TOML syntax": (
        {"t": 'base = "llama3_debug"\n[training\nsteps = 3'},
        ["t.toml:2: this is not valid TOML:"],
    ),
}
BASE = 'base = "llama3_debug"\n'


def write(folder: Path, files: dict[str, str]) -> str:
    for name, content in files.items():
        (folder / f"{name}.toml").write_text(content)
    return f"{next(iter(files))}.toml"


def assert_one_paragraph(output: str, words: list[str]) -> None:
    for word in words:
        assert word in output
    assert output.startswith("Error: ")
    assert "Traceback" not in output
    assert output.count("\n") == 1, "the message is one paragraph"


def run(*arguments: str):
    return CliRunner().invoke(main, ["config", *arguments])


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


OVERRIDING = """\
from torchtitan.config import override
from torchtitan.models.common.attention import VarlenAttention

from wlb_titan.runtime.attention.module import DocumentAttention


@override(target=DocumentAttention.Config)
def with_varlen(config):
    return VarlenAttention.Config()
"""


@pytest.fixture(scope="session", autouse=True)
def overriding(tmp_path_factory):
    """A module with an override, as a user would write one."""
    folder = tmp_path_factory.mktemp("overriding")
    (folder / "overriding.py").write_text(OVERRIDING)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def wrong():
    """(files, words of the message) of each mistake in WRONG, by its line."""
    for lines, words in re.findall(r"^(\S.*)\n((?:    .*\n)+)", WRONG, re.MULTILINE):
        parts = " ".join(words.split()).split(" ... ")
        yield pytest.param({"t": BASE + lines.replace("; ", "\n")}, parts, id=lines)


@pytest.mark.parametrize(
    ("files", "words"), [*wrong(), *(pytest.param(*case, id=name) for name, case in WRONG_FILES.items())]
)
def test_wrong_file(here, files, words):
    result = run("check", write(here, files))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert_one_paragraph(result.stderr, words)


PIPELINE = "[parallelism]\npipeline_parallel_degree = 2\ncontext_parallel_degree = 2"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--training.steps many", ['command line: training.steps = "many": expected an integer, at least 1']),
        ("--training.steps", ["command line: --training.steps has no value"]),
        ("--debug.deterministic --training.steps=5", ["for a switch --debug.deterministic true or"]),
        ("training.steps=5", ["command line: 'training.steps=5': expected --section.key VALUE"]),
        ("--extends x.toml", ["command line: --extends x.toml: only a TOML file can extend another"]),
        ("--world-size 6", ["t.toml:1: parallelism: 6 processes", "context_parallel_degree = 2 (t.toml:4)"]),
    ],
)
def test_wrong_words(here, words, parts):
    result = run("check", write(here, {"t": BASE + PIPELINE}), *words.split())
    assert result.exit_code == 2
    assert_one_paragraph(result.stderr, parts)


def test_a_right_file(here):
    (here / "text").mkdir()
    for number in range(20):
        (here / "text" / f"{number}.txt").write_text("to be or not to be " * 50)
    prepared = CliRunner().invoke(main, ["prepare", "corpus", "--source", "text:text", "--vocab-size", "300"])
    assert prepared.exit_code == 0, prepared.output
    content = 'base = "llama3_debug"\nwlb.corpus.path = "corpus"\nparallelism.pipeline_parallel_degree = 2'
    file = write(here, {"t": content})
    result = run("check", file, "--training.seq_len", "2048", "--world-size", "8", "--training.steps=7")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "OK t.toml: model llama debug, TP 1 x CP 1 x PP 2 x DP 4 = 8 processes, seq_len 2048, 7 steps, "
        "packing plain, sharding per_sequence\n"
    )
    assert "DP 1 = 2 processes or a multiple," in run("check", file).stdout
    own = content + '\n[[wlb.dimensions]]\nname = "toys:Apart"\ndegree = 2'
    averaged = write(here, {"own": own})
    said = run("check", averaged, "--world-size", "8", "--wlb.epochs", "1").stdout
    assert "PP 2 x DP 2 x APART 2 = 8 processes" in said and "1 epoch," in said


def test_show(here):
    file = write(here, {"t": 'base = "llama3_debug"\n\n[training]\nseq_len = 2048'})
    result = run("show", file, "--training.steps", "5", "--changed")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        'base = "llama3_debug" # t.toml:1',
        "",
        "[training]",
        "seq_len = 2048 # t.toml:4; at least 2 and at most 134217728",
        "steps = 5 # command line; at least 1",
    ]
    everything = run("show", file, "--training.steps", "5").stdout
    assert "lr = 0.003" in everything
    (here / "shown.toml").write_text(everything)
    assert without_model(load_config("shown.toml")) == without_model(
        load_config(file, ["--training.steps=5"])
    )


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
    assert {key for key in before.keys() & after.keys() if before[key] != after[key]} == {
        "dump_folder",
        "wlb.packing.policy",
        "wlb.sharding.policy",
        "wlb.pipeline.order",
        "parallelism.pipeline_parallel_schedule",
    }


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem.startswith("llama2_")], ids=lambda path: path.stem
)
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


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_documentation(here, number):
    example = EXAMPLES[number]
    if "extends" in example:
        (here / "train.toml").write_text(EXAMPLES[0])
    elif "base =" not in example:
        example = f'base = "llama3_debug"\n{example}'
    (here / "example.toml").write_text(example)
    load_config("example.toml")
