"""Commands with absurd, contradictory and broken arguments and files: one paragraph and exit code 2."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from commands import CONFIGS, ROOT, invoke
from drill_ground import make_corpus

HUGE = "99999999999999999999"
SHIPPED = (ROOT / "wlb_titan" / "cost" / "clusters" / "h100_roce.toml").read_text()

FILES = {
    "good.toml": 'base = "llama3_debug"\nwlb.corpus.path = "corpus"\ntraining.seq_len = 256\n',
    "table.toml": f'extends = "{CONFIGS / "llama2_550m_64k.toml"}"\n',
    "late.toml": 'extends = "good.toml"\nwlb.policy = "wlb"\nwlb.packing.thresholds = [300]\n',
    "deep.toml": 'base = "llama3_debug"\na = ' + "[" * 5000 + "]" * 5000,
    "digits.toml": 'base = "llama3_debug"\ntraining.steps = ' + "9" * 5000,
    "circle.toml": 'extends = "circle.toml"',
    "pages/report.html": "<!doctype html><title>Somebody else's</title>",
    "array.toml": 'base = ["llama3_debug"]',
    "dotted.toml": 'base = "llama3_debug"\ntraining = 5\n',
    "latin.toml": 'base = "ä"'.encode("latin-1"),
    **{"minus": "5\n-7\n", "word": "5\nseven\n", "half": "5\n3.5\n", "long": "9" * 13, "longer": "9" * 30},
    **{"longest": "9" * 5000, "nothing": "", "ones": "1\n" * 9, "two": "5\n6\n", "bytes": bytes(range(256))},
    "huge_cluster.toml": SHIPPED.replace("gpus = 8", f"gpus = {HUGE}"),
}

PLAN = """
--steps 0 | --steps HUGE | --world-size 0 | --report good.txt | --policy wlb | --tail drop | --wlb
--policies plain,nope -> no packing policy is called 'nope'
--policies plain,wlb --output x.jsonl -> plans of one policy
--output /nowhere/plan.jsonl -> --output: /nowhere/plan.jsonl cannot be written: there is no folder /nowhere
--output - -> --output: name a file
--output good.toml -> good.toml exists, and this command did not
--output good.txt -> this command did not write it | --output corpus -> is a directory
--report pages -> pages/report.html exists, and this command did not write it
--lengths . -> The file of lengths . cannot be read
--lengths bytes -> The file of lengths bytes cannot be read
--lengths minus -> it has '-7'); it must have a document's length a line
--lengths word -> 'seven'
--lengths half -> '3.5'
--lengths long -> has 9999999999999 to 9999999999999; it must have a document's length a line
--lengths longer -> too large
--lengths longest -> value has 5000 digits
--lengths nothing -> is empty
--lengths ones -> All documents have one token
--lengths two -> --lengths: The corpus has too few documents for the 4 micro-batches of one step: 2
--training.local_batch_size 100000 -> --lengths: The corpus has too few documents for the 100000
--training.local_batch_size HUGE | --training.seq_len HUGE | --wlb.corpus.seed -1
--training.seqlen 5 -> Did you mean training.seq_len
--cluster nope | --wlb.policy plain/nope | --wlb.policy plain//nope
--wlb.policy nope | --wlb.packing.may_cut nope
--wlb.packing.cost_model nope | --wlb.packing.cost_model profile:/etc/passwd
--wlb.packing.cost_model nope.json -> no cost model is called 'nope.json'
--wlb.packing.cost_model quadratic:1,2,3 -> is malformed
--wlb.packing.cost_model quadratic:x,y | --wlb.packing.cost_model quadratic:nan,1
--wlb.packing.cost_model quadratic:0,0 -> not both 0 | --wlb.packing.cost_model quadratic:1e308,1e308
--wlb.packing.cost_model quadratic:-1,2 -> not both 0 | --wlb.packing.cost_model quadratic: -> malformed
--wlb.packing.cost_model simulate -> Did you mean 'simulated'
--wlb.packing.cost_model simulated:3 -> takes nothing after its name
--wlb.policy wlb --wlb.packing.thresholds [64,32] -> 64, 32 are out of order
--wlb.policy wlb --wlb.packing.thresholds [400] -> command line: wlb.packing.thresholds = [400]: The
--wlb.policy wlb --wlb.packing.thresholds [0] | --wlb.policy wlb --wlb.packing.thresholds 64
--wlb.policy wlb --wlb.packing.queues 9
--wlb.policy wlb --wlb.packing.max_length 100 -> 100 tokens, below the context window of 256
--wlb.policy wlb_lazy --wlb.packing.tolerance nan
--wlb.policy wlb_lazy --wlb.packing.max_delay -1
--wlb.policy fixed_greedy --wlb.packing.global_batches 0
--wlb.policy fixed_greedy --wlb.packing.global_batches HUGE
--wlb.policy fixed_solver --wlb.packing.time_limit 0
--wlb.policy fixed_solver --wlb.packing.gap 2
--parallelism.context_parallel_degree 300 | --parallelism.data_parallel_shard_degree 0
--parallelism.pipeline_parallel_degree 100
--parallelism.data_parallel_shard_degree 3 --training.global_batch_size 4 -> 4 micro-batches cannot be shared
"""
SIMULATE = """
--policies plain/nope | --policies plain/adaptive/best/more | --world-size 0 | --steps 0 | --chunks 2
--policies plane -> no packing policy is called 'plane'
--trace /nowhere/trace.json -> --trace: /nowhere/trace.json cannot be written: there is no folder
--report good.txt -> is a file
--trace table.toml -> --trace: table.toml exists, and this command did not write it
--routing-imbalance 0 | --wlb.context.profile nope | --search --world-size 0
--search --trace t.json -> --trace draw policies; leave out --search
--write best.toml -> add --search | --search --write good.toml -> good.toml exists. Remove it
--search --world-size 1 --base llama2_7b -> No configuration fits 1 GPU of
--world-size 100 -> 100 processes do not fit the degrees
--parallelism.tensor_parallel_degree 3 | --parallelism.context_parallel_degree 7
--parallelism.pipeline_parallel_degree 1000 | --parallelism.pipeline_parallel_degree HUGE
--parallelism.pipeline_parallel_schedule nope | --activation_checkpoint.class nope
--training.global_batch_size 3 | --training.seq_len HUGE | --training.seq_len many | --wlb.corpus.seed -1
--wlb.policy wlb --wlb.packing.max_length 1
--cluster tpu -> cluster file tpu cannot be read
--cluster huge_cluster.toml -> node.gpus is HUGE
"""
OTHERS = """
simluate good.toml -> Did you mean 'simulate'? | train good.toml --max-restart 3 -> '--max-restarts'
bench good.toml --policies , -> '' names no policy | bench good.toml --policies= -> '' names no policy
plan good.toml --step 3 -> Did you mean '--steps'? | simulate good.toml --policy plain -> '--policies'
nope | plan | plan nowhere.toml | simulate | simulate nowhere.toml
simulate --confg good.toml -> Give the file first, or after --config: main simulate FILE
plan late.toml --lengths good.txt -> late.toml:3: wlb.packing.thresholds = [300]: The
config check nowhere.toml | config check good.txt | config check . | config check /dev/null
config check deep.toml | config check digits.toml | config check latin.toml | config check circle.toml
config check array.toml | config check dotted.toml | config check good.toml training.steps 5
config check good.toml --training.steps | config check good.toml --training..steps 5
config check good.toml --world-size 0 | config show good.toml --extends other.toml
config check good.toml --device-gib 0 | config check good.toml --device-gib nan
config check good.toml --device-gib inf | config check good.toml --device-gib 0.0001 -> this cannot fit
prepare / | prepare good.txt | prepare c --source nope | prepare c --source text:nowhere
prepare c --source jsonl:nowhere | prepare c --source parquet:good.txt#text | prepare c --seed -1
prepare c --vocab-size 256 -> 256 is not in the range | prepare c --max-length 1 -> 1 is not in the range
prepare c --vocab-size 1000000000 | prepare c --max-tokens 0
prepare c --tokenizer nowhere | prepare c --max-length 100 | prepare LONG
profile --output p.json | profile nowhere.toml --output p.json
profile good.toml --output /nowhere/p.json
profile good.toml --output good.toml -> --output: good.toml exists
dryrun good.toml --output good.toml -> --output: good.toml exists
rehearse good.toml --output corpus/corpus.json -> corpus.json exists, and this command did not
compare nowhere | compare . | compare good.txt | compare nowhere --report pages -> report.html exists
"""
COMMANDS = {"plan good.toml --lengths good.txt": PLAN, "": OTHERS}
COMMANDS["simulate table.toml --lengths good.txt"] = SIMULATE
"""These words go before what stands between bars and ends of lines; after an arrow is what an answer says."""


def asked(begin: str) -> list[tuple[str, str]]:
    """Commands, and what is in their answers."""
    text = COMMANDS[begin].replace("HUGE", HUGE).replace("LONG", "x" * 300)
    commands = [one for line in text.strip().splitlines() for one in line.split(" | ")]
    return [(f"{begin} {end}", words) for end, _, words in (one.partition(" -> ") for one in commands)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files for the arguments above."""
    folder = tmp_path_factory.mktemp("commands")
    lengths = (np.random.default_rng(0).pareto(1.0, 3000) * 12 + 2).clip(2, 250).astype(int)
    (folder / "good.txt").write_text("\n".join(map(str, lengths)) + "\n")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    make_corpus(folder / "texts", folder / "corpus")
    return folder


@pytest.mark.parametrize("begin", COMMANDS)
def test_bad_arguments_are_refused_in_a_paragraph_and_nothing_is_left(folder, begin, monkeypatch):
    monkeypatch.chdir(folder)
    poorly = []
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    for command, words in asked(begin):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = invoke(*command.split())
        *_, paragraph = ["", *result.stderr.strip().splitlines()]
        if result.exit_code != 2 or not isinstance(result.exception, SystemExit):
            poorly.append(f"{command[:120]}: {result.exit_code} {result.exception!r} {result.output[-200:]}")
        elif not paragraph.startswith("Error: ") or len(paragraph) < 30 or words not in paragraph:
            poorly.append(f"{command[:120]}: unclear, or not {words!r}: {result.stderr}")
    assert not poorly, f"{len(poorly)} of {len(asked(begin))}:\n" + "\n".join(poorly)
    after = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    assert after == before, "a refused command has left something"
