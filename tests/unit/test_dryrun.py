"""`wlb-titan dryrun`: what it traces beside what is predicted, its report, its files and its errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import invoke
from lab import rows

from wlb_titan.commands import dryrun as command
from wlb_titan.prepare.prepare import write_synthetic_corpus
from wlb_titan.simulator.calls import alike, calls_of_all

pytestmark = pytest.mark.slow

PP, CP, TP = (f"--parallelism.{axis}_parallel_degree" for axis in ("pipeline", "context", "tensor"))
GROUPS = ("--wlb.context.groups", 2, "--parallelism.tensor_parallel_degree", 1)  # of two key heads
SHARD = "--parallelism.data_parallel_shard_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
FULL, NONE = ("--activation_checkpoint.class", "FullAC"), ("--activation_checkpoint", "none")

TABLE_1 = Path("train_configs/llama2_550m_64k.toml")
# Jobs, each with a corpus that is not on this machine.
SMALL = """
base = "llama3_debug"
wlb.corpus.path = "not_here"
training = { seq_len = 256, mixed_precision_param = "bfloat16" }
parallelism = { pipeline_parallel_degree = 2, context_parallel_degree = 2, tensor_parallel_degree = 2 }
"""
LONG = """
base = "llama3_debug"
wlb.corpus.path = "not_here"
training = { seq_len = 65536, mixed_precision_param = "bfloat16", local_batch_size = 2 }
"""
ALONE = """
base = "llama2_550m"
wlb.cluster = "h100_roce"
wlb.corpus.path = "not_here"
activation_checkpoint.class = "FullAC"
training = { seq_len = 256, local_batch_size = 3 }
"""
# No data-parallel rank shards weights: the last stage has the head's whole gradient, and a chunk's beside it.
LAST = """
base = "llama2_550m"
wlb.cluster = "h100_roce"
wlb.corpus.path = "not_here"
training = { seq_len = 1024, local_batch_size = 4 }
parallelism = { pipeline_parallel_degree = 2, pipeline_parallel_schedule = "1F1B" }
"""
TIED = ALONE.replace("llama2_550m", "torchtitan.models.qwen3.config_registry:qwen3_debugmodel")
TOLD = """
wlb.cluster = "h100_roce"
wlb.corpus.path = "not_here"
training = { seq_len = 4096, mixed_precision_param = "bfloat16", local_batch_size = 2 }
base = "%s"
"""
MOE = TOLD % "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"
LATENT = TOLD % "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_debugmodel"
OSS = TOLD % "torchtitan.models.gpt_oss.config_registry:gpt_oss_debugmodel"
MUSE = TOLD % "torchtitan.models.muse_glimmer.config_registry:muse_glimmer_debugmodel"
ADAPTED = TOLD % "bases:lora"
FLOAT8 = TOLD % "bases:float8_kernels"
EXPERTS = """
base = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"
wlb.corpus.path = "not_here"
training = { seq_len = 256, local_batch_size = 1 }
parallelism = { context_parallel_degree = 2, expert_parallel_degree = 2 }
"""


@pytest.fixture
def in_new_processes(tmp_path):
    """Runs the command on a file, or on a job as TOML; gives what it says and what it writes of each rank."""

    def run(job, *words, exits=0):
        file, output = job, tmp_path / "ranks.json"
        if isinstance(job, str):
            file = tmp_path / "job.toml"
            file.write_text(job)
        result = invoke("dryrun", file, *words, "--output", output)
        assert result.exit_code == exits, result.output
        return result, json.loads(output.read_text()) if output.exists() else None

    return run


@pytest.fixture
def dryrun(in_new_processes, forked_ranks):
    return in_new_processes


def moved(rank):
    return {(entry["kind"], entry["over"]): entry for entry in rank["collectives"]}


def a_stage(even, sends):
    """What is known without a trace: this GPU's weights, AdamW's two moments of each, in float32, and how
    often hidden states or their gradients of all micro-batches are sent; these are windows if `even`."""

    def check(rank):
        assert len(rank["lengths"]) == 4 and (rank["lengths"] == [65536] * 4) is even
        assert rank["traced"]["weights"] == pytest.approx(4 * rank["local_parameters"] / 2**30, rel=1e-3)
        assert rank["traced"]["optimizer"] == pytest.approx(2 * rank["traced"]["weights"], rel=1e-3)
        # TP 2 x FSDP over CP 2 x DP 2; norms are not divided by TP.
        assert rank["parameters"] == pytest.approx(8 * rank["local_parameters"], rel=1e-3)
        hidden = 1536 * 2 * sum(rank["lengths"]) / (2 * 2) / 2**30  # bfloat16, CP 2 x TP 2
        assert moved(rank)["send", "pp"]["gib"] == pytest.approx(sends * hidden, rel=1e-3)

    return check


def ulysses(heads):
    """What of 6 heads of a rank is moved: nothing again for activation checkpointing."""

    def check(rank):
        layers, micro_batches, passes = 4, 4, 2
        entry = moved(rank)["all-to-all", "cp"]
        assert entry["number"] == 2 * passes * layers * micro_batches
        # What the larger of both directions has, its own part included: queries, keys, values and outputs.
        elements = 65536 * 128 * 4 * heads
        assert entry["gib"] == pytest.approx(2 * elements * passes * layers * micro_batches / 2**30, rel=0.01)

    return check


def gathered(forward, over="cp", heads=2, sharers=1):
    """Keys travel among pairs and among all four ranks, in so many forward passes and one backward pass."""

    def check(rank):
        pairs, four = np.array(rank["travelling"]).sum(axis=0)
        assert 0 < pairs + four < sharers * sum(rank["lengths"])
        layers, dim = 4, 32
        size = 2 * heads * dim * 2 * layers / 2**30
        entries = moved(rank)
        assert entries["all-gather", over]["gib"] == pytest.approx(forward * size * four)
        assert entries["reduce-scatter", over]["gib"] == pytest.approx(size * four)
        # Of all pairs the one that exchanges most is predicted.
        assert 0 < entries["all-gather", "cp, 2 ranks"]["gib"] <= forward * size * pairs

    return check


def sliced(packs):
    """What backward passes leave to earlier slices grows while activations go."""

    def check(rank):
        assert len(rank["lengths"]) == packs and rank["traced"]["cache"] > 0

    return check


def shared(rank):
    assert len(rank["lengths"]) == 6
    assert moved(rank).keys() >= {(kind, SHARERS) for kind in ("all-gather", "reduce-scatter")}


def whole_weights(rank):
    """Of one rank they stay, in bfloat16, and gradients are reduced once."""
    assert rank["traced"]["gathered"] > 2 * (rank["parameters"] - 2 * 32000 * 1536) / 2**30


SHARERS = "dp_shard_cp, 4 ranks"
GPU = ("--device-gib", 80)
BALANCED = ("--wlb.policy", "wlb_lazy/hybrid/best", SCHEDULE, "Interleaved1F1B")
HYBRID = ("--wlb.policy", "wlb_lazy/hybrid")
GATHERED = (*HYBRID, CP, 4, SHARD, 2, "--training.global_batch_size", 4, "--rank", "first", "--step", 5)
SLIM = ("--wlb.policy", "slim", "--wlb.packing.micropacks", 6, "--wlb.packing.slack", 0)
# What bounds the plan is the GPU that is asked for, and not the CPU at hand, which these steps would not fit.
SLICES = (*SLIM, CP, 2, "--rank", "first", "--step", 4, *GPU)
SHARED = ("--wlb.packing.dp_merge", "true", "--wlb.packing.cost_model", "quadratic:1,200")
# A group of all ranks of the job would be the one that FSDP has: so TP 2.
TWO_REPLICAS = (CP, 2, SHARD, 2, TP, 2, "--training.global_batch_size", 4)
MERGED = (*SLICES, *SHARED, *TWO_REPLICAS)
DEALT = ("--wlb.policy", "dealt/hybrid", "--wlb.packing.sharers", 2, *TWO_REPLICAS, "--rank", "first")
ASYMMETRIC = (*SLICES, PP, 2, "--training.global_batch_size", 2, *FULL, "--wlb.packing.asymmetric", "true")
FIRST_STEP = ("--rank", "first", "--step", 1)
LAST_STEP = ("--rank", "last", "--step", 1)
NORMED = ("--training.seq_len", 4096, *FIRST_STEP)
KEYS = ("--activation_checkpoint.class", "KeysAC")
EP = "--parallelism.expert_parallel_degree"
CASES = {  # a job, what changes it, how near the prediction is, and what else is known of its ranks
    "plain": (TABLE_1, ("--step", 9, *GPU), 0.05, a_stage(even=True, sends=1)),
    # Of two stages a rank all but the last send hidden states on, all but the first gradients back.
    "balanced": (TABLE_1, (*BALANCED, "--step", 9, *GPU), 0.05, a_stage(even=False, sends=3)),
    # With full checkpointing backward passes are whole and free what they recompute; else they are split.
    "zero_bubble_full": (TABLE_1, (SCHEDULE, "ZBVZeroBubble", *FULL, "--rank", "first"), 0.05, None),
    "zero_bubble_none": (TABLE_1, (SCHEDULE, "ZBVZeroBubble", *NONE, "--rank", "last"), 0.05, None),
    # 3 heads for each of two ranks; 2 for the first two of four, and 1 for the others.
    "ulysses_2": (
        TABLE_1,
        (CP, 2, "--wlb.policy", "plain/ulysses", "--rank", "first", *GPU),
        0.06,
        ulysses(3),
    ),
    "ulysses_4": (
        TABLE_1,
        (CP, 4, "--wlb.policy", "plain/ulysses", "--rank", "first", *GPU),
        0.05,
        ulysses(2),
    ),
    "gathered": (LONG, GATHERED, 0.04, gathered(2)),
    "gathered_none": (LONG, (*GATHERED, *NONE), 0.04, gathered(1)),
    # On four layers, where the layer at hand counts for much.
    "slices": (LONG, (*SLICES, "--training.global_batch_size", 2), 0.08, sliced(6)),
    "slices_merged": (LONG, MERGED, 0.08, shared),
    "windows_shared": (LONG, (*DEALT, "--step", 2), 0.04, gathered(2, SHARERS, heads=1, sharers=2)),
    # Micro-batches of forward passes, and as many of backward passes.
    "slices_asymmetric": (LONG, ASYMMETRIC, 0.08, sliced(12)),
    "alone": (ALONE, FIRST_STEP, 0.02, whole_weights),
    "tied": (TIED, FIRST_STEP, 0.02, None),  # embedding and head share one table
    # Queries and keys are normalized, and rotated by cos and sin.
    "normed_none": (TIED, (*NONE, *NORMED), 0.015, None),
    "normed_keys": (TIED, (*KEYS, *NORMED), 0.01, None),
    "last_tensor": (LAST, (TP, 2, *NONE, *LAST_STEP), 0.05, None),
    "last_none": (LAST, (*NONE, *LAST_STEP), 0.01, None),
    "last_full": (LAST, (*FULL, *LAST_STEP), 0.05, None),
    "last_gpipe": (LAST, (SCHEDULE, "GPipe", *NONE, *LAST_STEP), 0.05, None),
    "last_zbv": (LAST, (SCHEDULE, "ZBVZeroBubble", *NONE, *LAST_STEP), 0.05, None),
    "last_slim": (LAST, (*SLIM, *NONE, *LAST_STEP), 0.05, None),
    # Layers told by a trace.
    "experts_none": (MOE, (*NONE, CP, 2, EP, 2, *HYBRID, *FIRST_STEP), 0.01, None),
    "experts_keys": (MOE, (*KEYS, SHARD, 4, EP, 2, *FIRST_STEP), 0.01, None),
    "experts_tensor": (MOE, (TP, 2, SHARD, 2, EP, 2, *FIRST_STEP), 0.01, None),
    "latent_full": (LATENT, (*FULL, SHARD, 2, EP, 2, *FIRST_STEP), 0.01, None),
    "latent_pipeline": (LATENT, (PP, 2, SHARD, 2, EP, 2, SCHEDULE, "1F1B", *LAST_STEP), 0.01, None),
    "oss_none": (OSS, (*NONE, SHARD, 2, EP, 2, *FIRST_STEP), 0.01, None),
    "muse": (MUSE, (CP, 2, *FIRST_STEP), 0.01, None),
    "adapters_none": (ADAPTED, (*NONE, *FIRST_STEP), 0.01, None),
    "adapters_full": (ADAPTED, (*FULL, SHARD, 2, *FIRST_STEP), 0.01, None),
    "float8_none": (FLOAT8, (*NONE, *FIRST_STEP), 0.01, None),
    "float8_keys": (FLOAT8, (*KEYS, TP, 2, *FIRST_STEP), 0.01, None),
    # The synthetic corpus does not have the mask that is named.
    "masked": (SMALL, ("--wlb.corpus.mask", "loss_mask", *FIRST_STEP), 0.03, None),
}


SHORT = {"plain", "ulysses_4", "gathered", "slices_merged", "alone", "normed_none", "last_none", "masked"}


@pytest.mark.parametrize("case", rows(CASES, CASES.keys() - SHORT))
def test_the_predicted_peak_is_the_traced_one(dryrun, case):
    job, words, near, check = CASES[case]
    _, ranks = dryrun(job, *words)
    for rank in ranks:
        predicted, traced = rank["predicted"], rank["traced"]
        assert rank["predicted_gib"] == pytest.approx(rank["traced_gib"], rel=near)
        assert rank["predicted_gib"] == pytest.approx(sum(predicted.values()))
        for term in ("weights", "optimizer", "rotary"):
            assert predicted.get(term, 0.0) == pytest.approx(traced.get(term, 0.0), rel=2e-3), term
        if check:
            check(rank)
    assert "--rank" in words or [rank["rank"] for rank in ranks] == [0, 31]  # of different replicas
    assert case in ("slices_merged", "windows_shared") or not any(
        entry["over"] == SHARERS for entry in ranks[0]["collectives"]
    )


@pytest.mark.parametrize("packing", ["fixed_solver", "slim --wlb.packing.solver milp"])
def test_a_solver_is_asked_by_a_rank_that_is_alone(dryrun, packing):
    words = (CP, 1, "--wlb.policy", *packing.split(), "--wlb.packing.time_limit", 1)
    _, (rank,) = dryrun(SMALL, "--rank", "last", "--step", 1, *words)
    assert rank["traced_gib"] > 0


def test_a_rank_that_fails_says_how_and_the_command_fails(dryrun):
    short = ("--wlb.policy", "wlb", "--wlb.packing.max_length", 200)
    result, _ = dryrun(SMALL, "--step", 9, "--rank", "first,3", *short, exits=1)
    assert "Rank 0 of 8 fails" in result.stdout and "Rank 3 of 8 fails" in result.stdout
    assert "max_length is 200 tokens, below the context window of 256" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "8"], "'8' is not one of the job's 8 ranks"),
        (["--rank", "0,middle"], "'middle' is not one"),
        (["--wlb.policy", "wlb/hybrid/best/x"], "too many parts"),
        (["--wlb.policy", "wlbb"], "wlbb"),
        (["--world-size", "12"], "12 processes do not fit"),
        (["--parallelism.nonsense", "1"], "nonsense"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(dryrun, words, message):
    result, written = dryrun(SMALL, *words, exits=2)
    assert message in result.stderr and written is None


def test_without_a_step_the_fullest_is_run(dryrun):
    """The longest micro-batch of the first 24 steps, on both ends of its pipeline; the output says so."""
    words = (SHARD, 2, "--wlb.policy", "wlb_lazy", *GPU)
    result, (first, last) = dryrun(SMALL, *words)
    assert "log-normal" in result.stderr  # there is no corpus
    assert "it fits" in result.stdout
    rule = r"Step (\d+) of .* under wlb_lazy/per_sequence, .* longest .*, ([\d,]+) tokens"
    said = re.search(rule, result.stdout)
    step, longest = int(said[1]), int(said[2].replace(",", ""))
    assert max(first["lengths"]) == longest and first["lengths"] == last["lengths"]
    assert (first["coordinates"]["pp"], last["coordinates"]["pp"]) == (0, 1)
    _, ranks = dryrun(SMALL, *words, "--rank", "0,4", "--step", 1 + (step == 1))
    assert max(length for rank in ranks for length in rank["lengths"]) <= longest


@pytest.mark.long
def test_the_corpus_is_used_where_there_is_one(in_new_processes, tmp_path):
    """By a process of its own: everywhere else ranks are forked."""
    write_synthetic_corpus(tmp_path / "corpus", np.full(64, 256))
    words = ("--wlb.policy", "plain/per_document", "--step", 1, "--rank", "last")
    words += ("--wlb.validation.path", "no")  # of which a lone rank has no need
    result, (rank,) = in_new_processes(SMALL, "--wlb.corpus.path", tmp_path / "corpus", *words)
    assert "no corpus" not in result.stderr
    assert (rank["rank"], rank["lengths"]) == (7, [256] * 4)
    assert rank["coordinates"] == {"pp": 1, "cp": 1, "tp": 1}


@pytest.mark.long
@pytest.mark.parametrize("words", [(SHARD, 2), (SHARD, 4, *GROUPS)], ids=["tensor", "groups"])
def test_ranks_that_are_not_run_do_what_is_said_of_them(dryrun, monkeypatch, words):
    """Every rank of two replicas is run, and its calls are those that follow from the one like it."""
    said, ran = {}, {}

    def all_of_all(own, same, grid):
        ran.update(own)
        found = calls_of_all({first: own[first] for first in said.values()}, said, grid)
        for rank, calls in found.items():
            assert (calls.groups, calls.calls) == (own[rank].groups, own[rank].calls), rank
        return found

    monkeypatch.setattr(command, "alike", lambda *job: said.update(alike(*job)) or {r: r for r in said})
    monkeypatch.setattr(command, "calls_of_all", all_of_all)
    result, _ = dryrun(SMALL, PP, 1, *words, *HYBRID, "--step", 2, "--rank", "all")
    same = len(ran) - len(set(said.values()))
    assert len(ran) == 8 and (same == 0 if words[2:] else 0 < same < 7)  # tensor-parallel ranks are alike
    assert f"All {sum(len(own.calls) for own in ran.values()):,} calls of 8 ranks meet" in result.stdout


@pytest.mark.long
def test_calls_that_do_not_meet_fail_the_command(dryrun, monkeypatch):
    """One of the ranks that are run leaves out the first of its calls."""

    def without_one(own, same, grid):
        found = calls_of_all(own, same, grid)
        return found | {5: replace(found[5], calls=found[5].calls[1:])}

    monkeypatch.setattr(command, "calls_of_all", without_one)
    result, _ = dryrun(SMALL, "--rank", "all", exits=1)
    assert "would hang or fail" in result.stdout and "ank 5" in result.stdout


@pytest.mark.parametrize(("gib", "exits"), [(0.001, 1), (80, 0)])
def test_the_status_tells_whether_the_job_fits(dryrun, gib, exits):
    result, _ = dryrun(SMALL, "--rank", "first", "--step", 1, "--device-gib", gib, exits=exits)
    assert ("it does not fit" in result.stdout, "it fits" in result.stdout) == (exits == 1, exits == 0)


def test_experts_get_equally_many_tokens(dryrun):
    """CP 2 = EP 2, 128 tokens, 8 layers of 8 visits: dispatched, combined, forward, again and backward."""
    _, (rank,) = dryrun(EXPERTS, "--rank", "0")
    assert rank["predicted_gib"] is None and rank["lengths"] == [256]
    visits = 128 * 8 * 8 * 256 * 2 / 2**30  # GiB of bfloat16
    assert moved(rank)["all-to-all", "ep"]["gib"] == pytest.approx(2 * 3 * visits, rel=1e-3)


def test_gradients_that_wait_are_not_predicted_of_a_model_that_the_formulas_do_not_know(dryrun):
    _, (rank,) = dryrun(LATENT, *NONE, PP, 2, SCHEDULE, "ZBVZeroBubble", *FIRST_STEP)
    assert rank["predicted_gib"] is None and rank["traced_gib"] > 0.005


def test_a_dimension_of_one_s_own_is_predicted_and_traced(dryrun):
    """The examples' local SGD: the weights that it keeps, and what it averages when its ranks meet."""
    own = '{ name = "own_policies.local_sgd:LocalSgd", degree = 2, every = 2, outer_rate = 0.7 }'
    job = f"wlb.dimensions = [{own}]{SMALL}"
    for step, meets in ((1, False), (2, True)):
        _, (rank,) = dryrun(job, "--rank", "last", "--step", step)
        assert rank["coordinates"] == {"pp": 1, "local": 1, "cp": 1, "tp": 1}
        assert rank["predicted"]["dimensions"] == pytest.approx(rank["traced"]["dimensions"], rel=0.01)
        averaged = [entry for entry in rank["collectives"] if entry["over"] == "local"]
        assert bool(averaged) is meets
    assert averaged[0]["predicted_gib"] == pytest.approx(averaged[0]["gib"], rel=0.01)
