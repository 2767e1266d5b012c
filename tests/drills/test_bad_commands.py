"""Commands with absurd, contradictory and broken arguments and files: one paragraph and exit code 2."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main

CONFIGS = Path(__file__).parents[2] / "train_configs"
ROOMY = "--training.seq_len 256 --parallelism.context_parallel_degree 1"
HUGE = "99999999999999999999"

LENGTHS_FILES = {"binary": bytes(range(256)), "long": b"9" * 5000 + b"\n", "few": b"100\n"}
"""More stand in tests/unit/test_plan_command.py."""

CLUSTERS = {
    "empty.toml": "",
    "broken.toml": "= 5",
    "half.toml": "name = 'x'\n[node]\ngpus = 8.5\n",
    "words.toml": "[node]\ngpus = 'many'\n",
    "unknown.toml": "[node]\ngpsu = 8\n",
    "huge.toml": f"[node]\ngpus = {HUGE}\n",
}

GIVEN = "--lengths good.txt " + ROOMY
PLAN = [
    *("plan", "plan nowhere.toml", f"plan good.toml --lengths nowhere.txt {ROOMY}"),
    f"plan good.toml --lengths . {ROOMY}",
    f"plan good.toml --lengths good.txt --training.seq_len {HUGE}",
    *(f"plan good.toml --lengths lengths-{name} {ROOMY}" for name in LENGTHS_FILES),
]
PLAN_OPTIONS = """
--steps 0 | --steps HUGE | --compare plain,nope | --cluster nope | --gpus 0 | --output /nowhere/plan.jsonl
--report good.txt | --policy wlb | --tail drop | --wlb | --training.seqlen 5
--training.local_batch_size HUGE | --training.local_batch_size 100000 | --wlb.corpus.seed -1
--wlb.sharding.policy nope
--wlb.pipeline.order nope | --wlb.packing.policy nope | --wlb.packing.tail nope
--wlb.packing.cost_model nope | --wlb.packing.cost_model nope.json
--wlb.packing.cost_model profile:/etc/passwd | --wlb.packing.cost_model quadratic:1,2,3
--wlb.packing.cost_model quadratic:x,y | --wlb.packing.cost_model quadratic:nan,1
--wlb.packing.cost_model quadratic:0,0 | --wlb.packing.cost_model quadratic:1e308,1e308
--wlb.packing.policy wlb --wlb.packing.thresholds [64,32]
--wlb.packing.policy wlb --wlb.packing.thresholds [0] | --wlb.packing.policy wlb --wlb.packing.thresholds 64
--wlb.packing.policy wlb --wlb.packing.queues 9 | --wlb.packing.policy wlb --wlb.packing.max_length 100
--wlb.packing.policy wlb_lazy --wlb.packing.tolerance nan
--wlb.packing.policy wlb_lazy --wlb.packing.max_delay -1
--wlb.packing.policy fixed_greedy --wlb.packing.global_batches 0
--wlb.packing.policy fixed_greedy --wlb.packing.global_batches HUGE
--wlb.packing.policy fixed_solver --wlb.packing.time_limit 0
--wlb.packing.policy fixed_solver --wlb.packing.gap 2
--parallelism.context_parallel_degree 300 | --parallelism.data_parallel_shard_degree 0
--parallelism.pipeline_parallel_degree 100
--parallelism.data_parallel_shard_degree 3 --training.global_batch_size 4
"""
SIMULATE_OPTIONS = """
--policies plain:nope | --policies plain:adaptive:best:more | --gpus 0 | --steps 0 | --chunks 2
--trace /nowhere/trace.json | --report good.txt | --routing-imbalance 0 | --wlb.sharding.profile nope
--search --gpus 0 | --search --trace t.json
--parallelism.tensor_parallel_degree 3 | --parallelism.context_parallel_degree 7
--parallelism.pipeline_parallel_degree 1000 | --parallelism.pipeline_parallel_degree HUGE
--parallelism.pipeline_parallel_schedule nope | --activation_checkpoint.class nope
--training.global_batch_size 3 | --training.seq_len HUGE | --training.seq_len many | --wlb.corpus.seed -1
--wlb.packing.policy wlb --wlb.packing.max_length 1
"""
OTHERS = """
nope | config check nowhere.toml | config check good.txt | config check . | config check /dev/null
config check toml-deep | config check toml-digits | config check toml-latin | config check toml-circle
config check toml-array | config check toml-dotted | config check good.toml --training.steps
config check good.toml training.steps 5 | config check good.toml --training..steps 5
config check good.toml --world-size 0 | config check good.toml --device-gib nan
config check good.toml --device-gib 0.0001 | config show good.toml --extends other.toml
prepare / | prepare good.txt | prepare c --source nope | prepare c --source text:nowhere
prepare c --source jsonl:nowhere | prepare c --source parquet:good.txt#text | prepare c --vocab-size 1
prepare c --vocab-size 1000000000 | prepare c --seed -1 | prepare c --max-tokens 0
prepare c --tokenizer nowhere
prepare c --max-length 100 | prepare LONG
profile --output p.json | profile nowhere.toml --output p.json
profile good.toml --output /nowhere/p.json
compare nowhere | compare . | compare good.txt
"""


def split(text: str) -> list[str]:
    """Commands or options, between bars and ends of lines."""
    text = text.replace("HUGE", HUGE).replace("LONG", "x" * 300)
    return [one.strip() for line in text.strip().splitlines() for one in line.split(" | ")]


COMMANDS = {
    "plan": [*PLAN, *(f"plan good.toml {GIVEN} {options}" for options in split(PLAN_OPTIONS))],
    "simulate": [
        "simulate",
        *(f"simulate table.toml --lengths good.txt {options}" for options in split(SIMULATE_OPTIONS)),
        *(f"simulate table.toml --lengths good.txt --cluster cluster-{name}" for name in CLUSTERS),
    ],
    "others": split(OTHERS),
}

WORDS = {
    "--wlb.packing.thresholds [64,32]": "64, 32 are out of order",
    "--wlb.packing.max_length 100": "100 tokens, below the context window of 256",
    "data_parallel_shard_degree 3 --training.global_batch_size 4": "4 micro-batches cannot be shared equally",
    "quadratic:1,2,3": "is malformed",
    "cost_model nope.json": "no cost model is called 'nope.json'",
    "--training.seqlen 5": "Did you mean training.seq_len",
    "--lengths nowhere.txt " + ROOMY: "neither a distribution of lengths called 'nowhere.txt'",
    "--compare plain,nope": "no packing policy is called 'nope'",
    "--output /nowhere/plan.jsonl": "cannot be written",
}
"""What the answers to commands with these ends say."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files for the arguments above."""
    folder = tmp_path_factory.mktemp("commands")
    lengths = (np.random.default_rng(0).pareto(1.0, 3000) * 12 + 2).clip(2, 250).astype(int)
    (folder / "good.txt").write_text("\n".join(map(str, lengths)) + "\n")
    (folder / "good.toml").write_text('base = "llama3_debug"\n')
    (folder / "table.toml").write_text(f'extends = "{CONFIGS / "llama2_550m_64k.toml"}"\n')
    for name, content in LENGTHS_FILES.items():
        (folder / f"lengths-{name}").write_bytes(content)
    for name, content in CLUSTERS.items():
        (folder / f"cluster-{name}").write_text(content)
    texts = {
        "deep": 'base = "llama3_debug"\na = ' + "[" * 5000 + "]" * 5000,
        "digits": 'base = "llama3_debug"\ntraining.steps = ' + "9" * 5000,
        "circle": 'extends = "toml-circle"',
        "array": 'base = ["llama3_debug"]',
        "dotted": 'base = "llama3_debug"\ntraining = 5\n',
    }
    for name, content in texts.items():
        (folder / f"toml-{name}").write_text(content)
    (folder / "toml-latin").write_bytes('base = "ä"'.encode("latin-1"))
    return folder


@pytest.mark.parametrize("kind", COMMANDS)
def test_bad_arguments(folder, kind, monkeypatch):
    commands = COMMANDS[kind]
    monkeypatch.chdir(folder)
    poorly = []
    before = {path.name for path in folder.iterdir()}
    for command in commands:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = CliRunner().invoke(main, command.split())
        paragraph = result.stderr.strip().splitlines()[-1:] or [""]
        if result.exit_code != 2 or not isinstance(result.exception, SystemExit):
            poorly.append(f"{command[:120]}: {result.exit_code} {result.exception!r} {result.output[-200:]}")
        elif not paragraph[0].startswith("Error: ") or len(paragraph[0]) < 30:
            poorly.append(f"{command[:120]}: unclear: {result.stderr}")
        for end, words in WORDS.items():
            if command.endswith(end) and words not in paragraph[0]:
                poorly.append(f"{command[:120]}: not {words!r}: {result.stderr}")
    assert not poorly, f"{len(poorly)} of {len(commands)}:\n" + "\n".join(poorly)
    assert {path.name for path in folder.iterdir()} == before, "a refused command has left something"
