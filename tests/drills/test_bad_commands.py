"""Commands with absurd, contradictory and broken arguments and files: one paragraph and exit code 2."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main

CONFIGS = Path(__file__).parents[2] / "train_configs"
AREA = "planner, simulator and other commands"
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

PLAN = [
    "plan",
    "plan nowhere.toml",
    "plan good.toml --lengths nowhere.txt " + ROOMY,
    "plan good.toml --lengths . " + ROOMY,
    f"plan good.toml --lengths good.txt --training.seq_len {HUGE}",
    f"plan good.toml --lengths good.txt {ROOMY} --training.local_batch_size {HUGE}",
    f"plan good.toml --lengths good.txt {ROOMY} --training.local_batch_size 100000",
    *(
        f"plan good.toml --lengths good.txt {ROOMY} {options}"
        for options in (
            *("--steps 0", f"--steps {HUGE}", "--compare plain,nope", "--cluster nope"),
            *("--gpus 0", "--output /nowhere/plan.jsonl", "--report good.txt", "--policy wlb"),
            *("--tail drop", "--stops 5", "--wlb", "--training.seqlen 5"),
        )
    ),
    *(
        f"plan good.toml --lengths good.txt {ROOMY} --wlb.{options.replace('--', '--wlb.')}"
        for options in (
            *("corpus.seed -1", "packing.policy nope", "packing.tail nope"),
            *("sharding.policy nope", "pipeline.order nope"),
            *(f"packing.cost_model {model}" for model in ("nope", "nope.json", "profile:/etc/passwd")),
            *(
                f"packing.cost_model quadratic:{rest}"
                for rest in ("1,2,3", "x,y", "nan,1", "0,0", "1e308,1e308")
            ),
            *(f"packing.policy wlb --packing.thresholds {text}" for text in ("[64,32]", "[0]", "64")),
            *("packing.policy wlb --packing.queues 9", "packing.policy wlb --packing.max_length 100"),
            *(
                "packing.policy wlb_lazy --packing.tolerance nan",
                "packing.policy wlb_lazy --packing.tolerance -1",
            ),
            *(
                "packing.policy wlb_lazy --packing.max_delay -1",
                "packing.policy fixed_greedy --packing.global_batches 0",
            ),
            f"packing.policy fixed_greedy --packing.global_batches {HUGE}",
            *(
                "packing.policy fixed_solver --packing.time_limit 0",
                "packing.policy fixed_solver --packing.gap 2",
            ),
        )
    ),
    *(
        f"plan good.toml --lengths good.txt {ROOMY} --parallelism.{options}"
        for options in (
            *("context_parallel_degree 300", "data_parallel_shard_degree 0", "pipeline_parallel_degree 100"),
            "data_parallel_shard_degree 3 --training.global_batch_size 4",
        )
    ),
    *(f"plan good.toml --lengths lengths-{name} {ROOMY}" for name in LENGTHS_FILES),
    *(f"plan good.toml --lengths good.txt {ROOMY} --cluster cluster-{name}" for name in CLUSTERS),
]

SIMULATE = [
    "simulate",
    *(
        f"simulate table.toml --lengths good.txt {options}"
        for options in (
            *(
                "--policies plain:nope",
                "--policies plain:adaptive:best:more",
                "--gpus 0",
                "--steps 0",
                "--chunks 2",
                "--trace /nowhere/trace.json",
            ),
            *(
                "--search --gpus 0",
                "--report good.txt",
                "--routing-imbalance 0",
                "--wlb.sharding.profile nope",
            ),
            *("--parallelism.tensor_parallel_degree 3", "--parallelism.context_parallel_degree 7"),
            *(
                "--parallelism.pipeline_parallel_degree 1000",
                f"--parallelism.pipeline_parallel_degree {HUGE}",
            ),
            *("--parallelism.pipeline_parallel_schedule nope", "--activation_checkpoint.class nope"),
            "--search --trace t.json",
            *("--training.global_batch_size 3", f"--training.seq_len {HUGE}", "--wlb.corpus.seed -1"),
            *("--wlb.packing.policy wlb --wlb.packing.max_length 1", "--training.seq_len many"),
        )
    ),
    *(f"simulate table.toml --lengths good.txt --cluster cluster-{name}" for name in CLUSTERS),
]

OTHERS = [
    "nope",
    "config check nowhere.toml",
    "config check good.txt",
    "config check .",
    "config check /dev/null",
    *(f"config check toml-{name}" for name in ("deep", "digits", "latin", "circle", "array", "dotted")),
    "config check good.toml --training.steps",
    "config check good.toml training.steps 5",
    "config check good.toml --training..steps 5",
    "config check good.toml --world-size 0",
    "config check good.toml --device-gib nan",
    "config check good.toml --device-gib 0.0001",
    "config show good.toml --extends other.toml",
    "prepare /",
    "prepare good.txt",
    "prepare c --source nope",
    "prepare c --source text:nowhere",
    "prepare c --source jsonl:nowhere",
    "prepare c --source parquet:good.txt#text",
    "prepare c --vocab-size 1",
    "prepare c --vocab-size 1000000000",
    "prepare c --seed -1",
    "prepare c --max-tokens 0",
    "prepare c --tokenizer nowhere",
    "prepare c --verify",
    "prepare good.txt --verify",
    "prepare c --verify --overwrite",
    "prepare c --too-long skip",
    f"prepare {'x' * 300}",
    "profile --head-dim 1000000 --output p.json",
    "profile --head-dim 0 --output p.json",
    "profile --head-dim 8/8/8 --output p.json",
    "profile --output /nowhere/p.json",
    "compare nowhere",
    "compare .",
    "compare good.txt",
]


WORDS = {
    "--packing.thresholds [64,32]": "64, 32 are out of order",
    "--packing.max_length 100": "100 tokens, below the context window of 256",
    "data_parallel_shard_degree 3 --training.global_batch_size 4": "4 micro-batches cannot be shared equally",
    "quadratic:1,2,3": "is malformed",
    "cost_model nope.json": "nope.json cannot be read",
    "--policy wlb": "Did you mean wlb.packing.policy",
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


@pytest.mark.parametrize("commands", [PLAN, SIMULATE, OTHERS], ids=["plan", "simulate", "others"])
def test_bad_arguments(folder, commands, monkeypatch, record_property):
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
            if command.replace("--wlb.", "--").endswith(end) and words not in paragraph[0]:
                poorly.append(f"{command[:120]}: not {words!r}: {result.stderr}")
    record_property("tried", len(commands))
    record_property("poorly", len(poorly))
    assert not poorly, f"{len(poorly)} of {len(commands)}:\n" + "\n".join(poorly)
    assert {path.name for path in folder.iterdir()} == before, "a refused command has left something"
