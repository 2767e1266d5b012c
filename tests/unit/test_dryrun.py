"""`wlb-titan dryrun`: what it traces beside what is predicted, its report, its files and its errors."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

pytestmark = pytest.mark.slow

use_cpu_without_accelerator()

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_policies"
TABLE_1 = ("train_configs/llama2_550m_64k.toml", "--wlb.corpus.path", "not_here")
BALANCED = ["--policy", "wlb_lazy:hybrid:best", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
SMALL = """
base = "llama3_debug"
[wlb.corpus]
path = "not_here"
[training]
seq_len = 256
mixed_precision_param = "bfloat16"
[parallelism]
pipeline_parallel_degree = 2
context_parallel_degree = 2
tensor_parallel_degree = 2
"""


def dryrun_in_new_processes(*words):
    from wlb_titan.commands.main import main

    return CliRunner().invoke(main, ["dryrun", *map(str, words)])


@pytest.fixture
def dryrun(forked_ranks):
    return dryrun_in_new_processes


@pytest.mark.parametrize("context", [2, 4])
def test_ulysses_holds_and_moves_what_is_predicted(dryrun, context, tmp_path):
    """6 heads of a rank: 3 for each of two ranks; 2 for the first two of four, and 1 for the others."""
    output = tmp_path / "ranks.json"
    degree = ("--parallelism.context_parallel_degree", context)
    result = dryrun(
        *TABLE_1,
        *degree,
        "--policy",
        "plain:ulysses",
        "--rank",
        "first",
        "--output",
        output,
        "--device-gib",
        80,
    )
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=0.05)
    (moved,) = [entry for entry in rank["collectives"] if entry["kind"] == "all-to-all"]
    layers, micro_batches, passes = 4, 4, 2
    # Nothing is exchanged again for activation checkpointing.
    assert (moved["over"], moved["number"]) == ("cp", 2 * passes * layers * micro_batches)
    # What the larger of both directions has, its own part included: queries, keys, values and outputs.
    heads = {2: 3, 4: 2}[context]
    elements = 65536 * 128 * 4 * heads
    assert moved["gib"] == pytest.approx(2 * elements * passes * layers * micro_batches / 2**30, rel=0.01)


@pytest.mark.parametrize("words", [[], BALANCED], ids=["plain", "balanced"])
def test_the_predicted_peak_is_the_traced_one(dryrun, words, tmp_path):
    output = tmp_path / "ranks.json"
    result = dryrun(*TABLE_1, *words, "--step", 9, "--output", output, "--device-gib", 80)
    assert result.exit_code == 0, result.output
    assert "log-normal" in result.stderr  # there is no corpus
    assert "it fits" in result.stdout
    first, last = json.loads(output.read_text())
    assert (first["rank"], last["rank"]) == (0, 31)
    for rank in (first, last):
        assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=0.05)
        assert rank["predicted_gib"] == pytest.approx(sum(rank["predicted"].values()))
        assert len(rank["lengths"]) == 4
        # What is known without a trace: this GPU's weights, and AdamW's two moments of each, in float32.
        assert rank["traced"]["weights"] == pytest.approx(4 * rank["local_parameters"] / 2**30, rel=1e-3)
        assert rank["traced"]["optimizer"] == pytest.approx(2 * rank["traced"]["weights"], rel=1e-3)
        # TP 2 x FSDP over CP 2 x DP 2; norms are not divided by TP.
        assert rank["parameters"] == pytest.approx(8 * rank["local_parameters"], rel=1e-3)
        by_kind = {(entry["kind"], entry["over"]): entry for entry in rank["collectives"]}
        hidden = 1536 * 2 * sum(rank["lengths"]) / (2 * 2) / 2**30  # between stages: bfloat16, CP 2 x TP 2
        chunks = 2 if words else 1
        # Each stage sends hidden states on, but for the last, and gradients back, but for the first.
        assert by_kind["send", "pp"]["gib"] == pytest.approx(hidden * (2 * chunks - 1), rel=1e-3)
    for rank in (first, last):  # of different replicas
        assert (rank["lengths"] == [65536] * 4) == (not words)


@pytest.mark.parametrize(
    ("rank", "checkpointing"),
    [("first", ["--activation_checkpoint.class", "FullAC"]), ("last", ["--activation_checkpoint", "none"])],
    ids=["full", "none"],
)
def test_zero_bubble_keeps_what_is_predicted(dryrun, rank, checkpointing, tmp_path):
    """With full checkpointing backward passes are whole and free what they recompute; else they are split."""
    output = tmp_path / "ranks.json"
    schedule = ["--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"]
    result = dryrun(*TABLE_1, *schedule, *checkpointing, "--rank", rank, "--output", output)
    assert result.exit_code == 0, result.output
    (traced,) = json.loads(output.read_text())
    assert traced["predicted_gib"] == pytest.approx(traced["traced_gib"], rel=0.05)


SLICES = """
base = "llama3_debug"
[wlb.corpus]
path = "not_here"
[wlb.packing]
policy = "slim"
micropacks = 6
slack = 0
[training]
seq_len = 65536
mixed_precision_param = "bfloat16"
local_batch_size = 2
[parallelism]
context_parallel_degree = 2
"""
SLICED = {
    # What backward passes leave to earlier slices grows while activations go.
    "alone": ("--training.global_batch_size", 2),
    "shared": (
        *("--parallelism.data_parallel_shard_degree", 2, "--training.global_batch_size", 4),
        *("--wlb.packing.dp_merge", "true", "--wlb.packing.cost_model", "quadratic:1,200"),
        # A group of all ranks of the job would be the one that FSDP has.
        *("--parallelism.tensor_parallel_degree", 2),
    ),
    "asymmetric": (
        *("--parallelism.pipeline_parallel_degree", 2, "--training.global_batch_size", 2),
        *("--activation_checkpoint.class", "FullAC", "--wlb.packing.asymmetric", "true"),
    ),
}


ALONE = """
base = "llama2_550m"
wlb.cluster = "h100_roce"
wlb.corpus.path = "/nowhere"
activation_checkpoint.class = "FullAC"
[training]
seq_len = 256
local_batch_size = 3
"""


def test_one_rank_s_weights_stay_whole_and_it_reduces_gradients_once(dryrun, tmp_path):
    file, output = tmp_path / "alone.toml", tmp_path / "ranks.json"
    file.write_text(ALONE)
    result = dryrun(file, "--rank", "first", "--step", 1, "--output", output)
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=0.02)
    in_layers = rank["parameters"] - 2 * 32000 * 1536
    assert rank["traced"]["gathered"] > 2 * in_layers / 2**30  # bfloat16


def test_a_table_that_embedding_and_head_share_counts_once(dryrun, tmp_path):
    file, output = tmp_path / "tied.toml", tmp_path / "ranks.json"
    base = 'base = "torchtitan.models.qwen3.config_registry:qwen3_debugmodel"'
    file.write_text(ALONE.replace('base = "llama2_550m"', base))
    result = dryrun(file, "--rank", "first", "--step", 1, "--output", output)
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    for term in ("weights", "optimizer"):
        assert rank["predicted"][term] == pytest.approx(rank["traced"][term], rel=2e-3)
    assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=0.02)


@pytest.mark.parametrize("case", SLICED)
def test_slices_hold_what_is_predicted(dryrun, case, tmp_path):
    """On four layers, where the layer at hand counts for much: 8 % in place of 5. What bounds the plan is the
    GPU that is asked for, and not the CPU at hand, which these steps would not fit."""
    file, output = tmp_path / "slices.toml", tmp_path / "ranks.json"
    file.write_text(SLICES)
    words = ("--rank", "first", "--step", 4, "--device-gib", 80, *SLICED[case])
    result = dryrun(file, *words, "--output", output)
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=0.08)
    assert len(rank["lengths"]) == 6
    assert case == "shared" or rank["traced"]["cache"] > 0
    shared = {entry["kind"] for entry in rank["collectives"] if entry["over"] == "dp_shard_cp, 4 ranks"}
    assert shared == ({"all-gather", "reduce-scatter"} if case == "shared" else set())


GATHERED = """
base = "llama3_debug"
[wlb.corpus]
path = "not_here"
[wlb.packing]
policy = "wlb_lazy"
[wlb.sharding]
policy = "hybrid"
[training]
seq_len = 65536
mixed_precision_param = "bfloat16"
local_batch_size = 2
global_batch_size = 4
[parallelism]
context_parallel_degree = 4
data_parallel_shard_degree = 2
"""


@pytest.mark.parametrize(
    "packing",
    [
        ("--wlb.packing.policy", "fixed_solver"),
        ("--wlb.packing.policy", "slim", "--wlb.packing.solver", "milp"),
    ],
    ids=["fixed_solver", "slim"],
)
def test_a_solver_is_asked_by_a_rank_that_is_alone(dryrun, small, packing, tmp_path):
    output = tmp_path / "ranks.json"
    words = ("--rank", "last", "--step", 1, "--parallelism.context_parallel_degree", 1)
    result = dryrun(small, *words, *packing, "--wlb.packing.time_limit", 1, "--output", output)
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    assert rank["traced_gib"] > 0


@pytest.mark.parametrize("checkpointing", ["selective", "none"])
def test_keys_travel_and_lie_as_predicted(dryrun, checkpointing, tmp_path):
    """Among pairs and among all four ranks: gathered in forward passes and, if checkpointed, once more."""
    file, output = tmp_path / "gathered.toml", tmp_path / "ranks.json"
    file.write_text(GATHERED)
    words = ("--activation_checkpoint", "none") if checkpointing == "none" else ()
    result = dryrun(file, *words, "--rank", "first", "--step", 9, "--output", output)
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=0.04)
    pairs, four = np.array(rank["travelling"]).sum(axis=0)
    assert 0 < pairs + four < sum(rank["lengths"])
    gib = {(e["kind"], e["over"]): e["gib"] for e in rank["collectives"]}
    layers, heads, dim = 4, 2, 32
    size = 2 * heads * dim * 2 * layers / 2**30
    forward = 1 if checkpointing == "none" else 2
    assert gib["all-gather", "cp"] == pytest.approx(forward * size * four)
    assert gib["reduce-scatter", "cp"] == pytest.approx(size * four)
    # Of all pairs the one that exchanges most is predicted.
    assert 0 < gib["all-gather", "cp, 2 ranks"] <= forward * size * pairs


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("dryrun") / "small.toml"
    path.write_text(SMALL)
    return path


def test_a_rank_that_fails_says_how_and_the_command_fails(dryrun, small):
    short = ("--wlb.packing.policy", "wlb", "--wlb.packing.max_length", 200)
    result = dryrun(small, "--step", 9, "--rank", "first,3", *short)
    assert result.exit_code == 1
    assert "Rank 0 of 8 fails" in result.stdout and "Rank 3 of 8 fails" in result.stdout
    assert "max_length is 200 tokens, below the context window of 256" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "8"], "'8' is none of the job's 8 ranks"),
        (["--rank", "0,middle"], "'middle' is none"),
        (["--policy", "wlb:hybrid:best:x"], "too many parts"),
        (["--policy", "wlbb"], "wlbb"),
        (["--world-size", "12"], "12 processes do not fit"),
        (["--parallelism.nonsense", "1"], "nonsense"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(dryrun, small, words, message):
    result = dryrun(small, *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_without_a_step_the_fullest_is_run(dryrun, small, tmp_path):
    """The longest micro-batch of the first 24 steps, on both ends of its pipeline; the output says so."""
    output = tmp_path / "ranks.json"
    shadow = ("--wlb.packing.shadow", "true")  # of the file: what --policy names is trained
    replicas = ("--parallelism.data_parallel_shard_degree", 2)
    words = (*replicas, *shadow, "--policy", "wlb_lazy", "--output", output)
    result = dryrun(small, *words)
    assert result.exit_code == 0, result.output
    rule = r"Step (\d+) of .* under wlb_lazy:per_sequence, .* longest .*, ([\d,]+) tokens"
    said = re.search(rule, result.stdout)
    step, longest = int(said[1]), int(said[2].replace(",", ""))
    first, last = json.loads(output.read_text())
    assert max(first["lengths"]) == longest and first["lengths"] == last["lengths"]
    assert (first["coordinates"]["pp"], last["coordinates"]["pp"]) == (0, 1)
    for other in (1, 9):
        assert dryrun(small, *words, "--rank", "0,4", "--step", other).exit_code == 0
        lengths = [length for rank in json.loads(output.read_text()) for length in rank["lengths"]]
        assert max(lengths) <= longest if other != step else max(lengths) == longest


def test_a_mask_that_has_a_name_is_not_of_the_synthetic_corpus(dryrun, small):
    result = dryrun(small, "--wlb.corpus.mask", "loss_mask", "--rank", "first", "--step", 1)
    assert result.exit_code == 0, result.output


def test_sigterm_ends_the_ranks(tmp_path):
    """Ranks that would sleep for minutes: those under way end, and those that wait do not begin."""
    script = (
        "import os, signal, sys, threading\nfrom pathlib import Path\n"
        "from wlb_titan.commands.lone_ranks import RankCommand\n"
        f"command = RankCommand('sleeping', {{}}, Path('x'), [], {{'PYTHONPATH': {str(tmp_path)!r}}})\n"
        f"command.run([0, 1, 2], Path({str(tmp_path)!r}), 2)\n"
    )
    (tmp_path / "sleeping.py").write_text(
        "import os, pathlib, sys, time\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid()) + '.pid').touch()\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    while len(pids := list(tmp_path.glob("*.pid"))) < 2:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.stem), 0)


def test_the_corpus_is_used_where_there_is_one(small, tmp_path):
    import numpy as np

    from wlb_titan.corpus.writer import write_synthetic_corpus

    write_synthetic_corpus(tmp_path / "corpus", np.full(64, 256))
    output = tmp_path / "ranks.json"
    words = ["--policy", "plain:per_document", "--step", 1, "--rank", "last", "--output", output]
    result = dryrun_in_new_processes(small, "--wlb.corpus.path", tmp_path / "corpus", *words)
    assert result.exit_code == 0, result.output
    assert "no corpus" not in result.stderr
    (rank,) = json.loads(output.read_text())
    assert (rank["rank"], rank["lengths"]) == (7, [256] * 4)
    assert rank["coordinates"] == {"pp": 1, "cp": 1, "tp": 1}


REPLICAS = (
    *("--parallelism.pipeline_parallel_degree", 1, "--parallelism.data_parallel_shard_degree", 2),
    *("--wlb.packing.policy", "wlb_lazy", "--wlb.sharding.policy", "hybrid", "--step", 2),
)


def test_ranks_that_are_not_run_do_what_is_said_of_them(dryrun, small, monkeypatch):
    """Every rank of two replicas is run, and its calls are those that follow from the one like it."""
    from wlb_titan.commands import dryrun as command
    from wlb_titan.commands.lone_ranks import alike, calls_of_all

    said, ran = {}, {}
    monkeypatch.setattr(command, "alike", lambda *job: said.update(alike(*job)) or {r: r for r in said})
    monkeypatch.setattr(
        command, "calls_of_all", lambda own, same, degrees: ran.update(own) or _of(own, degrees)
    )

    def _of(own, degrees):
        found = calls_of_all({first: own[first] for first in said.values()}, said, degrees)
        for rank, calls in found.items():
            assert calls.groups == own[rank].groups, rank
            assert calls.calls == own[rank].calls, rank
        return found

    result = dryrun(small, *REPLICAS, "--rank", "all")
    assert result.exit_code == 0, result.output
    assert len(ran) == 8 > len(set(said.values())) >= 2
    assert f"All {sum(len(own.calls) for own in ran.values()):,} calls of 8 ranks meet" in result.stdout


def test_calls_that_do_not_meet_fail_the_command(dryrun, small, monkeypatch):
    """One of the ranks that are run leaves out the first of its calls."""
    from dataclasses import replace

    from wlb_titan.commands import dryrun as command
    from wlb_titan.commands.lone_ranks import calls_of_all

    def without_one(own, same, degrees):
        found = calls_of_all(own, same, degrees)
        return found | {5: replace(found[5], calls=found[5].calls[1:])}

    monkeypatch.setattr(command, "calls_of_all", without_one)
    result = dryrun(small, "--rank", "all")
    assert result.exit_code == 1, result.output
    assert "would hang or fail" in result.stdout and "ank 5" in result.stdout


def test_synthetic_lengths_have_a_long_tail():
    from wlb_titan.corpus.writer import long_tailed_lengths

    lengths = long_tailed_lengths(10_000_000, 65536)
    assert 10_000_000 <= lengths.sum() < 10_000_000 + 65536
    assert lengths.min() >= 1 and lengths.max() == 65536
    assert 0.005 < (lengths == 65536).mean() < 0.02
    assert (lengths == long_tailed_lengths(10_000_000, 65536)).all()


def test_experts_get_equally_many_tokens(dryrun, tmp_path):
    """CP 2 = EP 2: every token visits `top_k` experts, and half of these visits cross to the other rank."""
    file, output = tmp_path / "experts.toml", tmp_path / "ranks.json"
    file.write_text(
        'base = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"\n'
        '[wlb.corpus]\npath = "not_here"\n'
        "[training]\nseq_len = 256\nlocal_batch_size = 1\n"
        "[parallelism]\ncontext_parallel_degree = 2\nexpert_parallel_degree = 2\n"
    )
    result = dryrun(file, "--rank", "0", "--output", output)
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(output.read_text())
    assert rank["predicted_gib"] is None
    exchanged = [c for c in rank["collectives"] if (c["kind"], c["over"]) == ("all-to-all", "ep")]
    assert exchanged and exchanged[0]["gib"] > 0


def test_a_dimension_of_one_s_own_is_predicted_and_traced(dryrun, tmp_path, monkeypatch):
    """The examples' local SGD: the weights that it keeps, and what it averages when its ranks meet."""
    monkeypatch.syspath_prepend(EXAMPLE)
    own = '[[wlb.dimensions]]\nname = "own_policies.local_sgd:LocalSgd"\n'
    own += "degree = 2\nevery = 2\nouter_rate = 0.7\n"
    (tmp_path / "job.toml").write_text(SMALL + own)
    output = tmp_path / "ranks.json"
    for step, meets in ((1, False), (2, True)):
        words = ("--rank", "last", "--step", step, "--output", output)
        result = dryrun(tmp_path / "job.toml", *words)
        assert result.exit_code == 0, result.output
        (rank,) = json.loads(output.read_text())
        assert rank["coordinates"] == {"pp": 1, "local": 1, "cp": 1, "tp": 1}
        assert rank["predicted"]["dimensions"] == pytest.approx(rank["traced"]["dimensions"], rel=0.01)
        averaged = [entry for entry in rank["collectives"] if entry["over"] == "local"]
        assert bool(averaged) is meets
    assert averaged[0]["predicted_gib"] == pytest.approx(averaged[0]["gib"], rel=0.01)
    assert "predicted GiB" in result.stdout
