"""Every packing and sharding policy gives the losses and gradients of one process that knows none of them."""

import json
import math
import re
from collections import Counter

import pytest
from lab import Cases, assert_met, layout

COMMON = (
    *("--training.seq_len", "512", "--training.steps", "2"),
    *("--wlb.packing.cost_model", "quadratic:1,1000"),
)
PACKING = {
    "plain": ("--wlb.packing.policy", "plain"),
    "fixed_greedy": ("--wlb.packing.policy", "fixed_greedy", "--wlb.packing.global_batches", "2"),
    "wlb": ("--wlb.packing.policy", "wlb", "--wlb.packing.thresholds", "[300, 450]"),
    "wlb_lazy": ("--wlb.packing.policy", "wlb_lazy"),
    # A gap that it reaches at once: it would find something else whenever the clock stopped it.
    "fixed_solver": ("--wlb.packing.policy", "fixed_solver", "--wlb.packing.gap", "0.2"),
}
SHARDING = ("per_sequence", "per_document", "adaptive", "hybrid")


def sharding(policy: str) -> tuple[str, str]:
    return ("--wlb.sharding.policy", policy)


ULYSSES_GATHER = "own_policies.ulysses_gather:UlyssesGather"
COMPILED = ("--compile.enable", "true", "--compile.backend", "aot_eager")
HEAD_APART = '[["tok_embeddings", "layers.0", "layers.1"], ["norm", "lm_head"]]'
# name, which has the degrees -> (packing policy, overrides)
RUNS = {
    **{f"cp4_{policy}": ("wlb", (*layout(cp=4), *sharding(policy))) for policy in SHARDING},
    "dp2_plain": ("plain", layout(dp=2)),
    "dp2_cp2_wlb": ("wlb", (*layout(dp=2, cp=2), *sharding("hybrid"))),
    "dp2_cp2_wlb_lazy": ("wlb_lazy", (*layout(dp=2, cp=2), *sharding("adaptive"))),
    "dp2_cp2_fixed_greedy": ("fixed_greedy", (*layout(dp=2, cp=2), *sharding("per_document"))),
    "dp2_cp2_fixed_solver": ("fixed_solver", layout(dp=2, cp=2)),
    "pp2_cp2_wlb_lazy": (
        "wlb_lazy",
        (
            *(*layout(pp=2, cp=2), *sharding("hybrid"), "--wlb.pipeline.order", "best"),
            *("--wlb.trace_every", "2"),
        ),
    ),
    "pp2_tp2_wlb": ("wlb", (*layout(pp=2, tp=2), "--wlb.pipeline.order", "shortest_first")),
    "cp2_tp2_full_checkpointing": (
        "wlb",
        (
            *(*layout(cp=2, tp=2), *sharding("hybrid")),
            *("--activation_checkpoint.class", "FullAC", "--wlb.trace_every", "1"),
        ),
    ),
    "cp2_wlb": ("wlb", (*layout(cp=2), *sharding("per_document"))),
    # Four query heads and two key heads: with four ranks two share a key head, with CP 2 x TP 2 too.
    "cp4_ulysses": ("wlb", (*layout(cp=4), *sharding("ulysses"))),
    # Groups within context parallelism, which the stage without attention makes too, and then another one.
    "pp2_cp2_head_apart": (
        "wlb",
        (
            *(*layout(pp=2, cp=2), *sharding(ULYSSES_GATHER), "--checkpoint.async_mode", "async"),
            *("--parallelism.module_fqns_per_model_part", HEAD_APART),
        ),
    ),
    "dp2_cp2_ulysses": ("wlb_lazy", (*layout(dp=2, cp=2), *sharding("ulysses"))),
    "pp2_cp2_ulysses": ("fixed_greedy", (*layout(pp=2, cp=2), *sharding("ulysses"))),
    "cp2_tp2_ulysses": ("wlb", (*layout(cp=2, tp=2), *sharding("ulysses"))),
    "cp2_ulysses_compiled": ("wlb", (*layout(cp=2), *sharding("ulysses"), *COMPILED)),
    "cp2_compiled": ("wlb", (*layout(cp=2), *sharding("hybrid"), *COMPILED)),
    "pp2_compiled": ("wlb", (*layout(pp=2), "--wlb.pipeline.order", "longest_first", *COMPILED)),
}
ONE_LAYER = ("cp2_compiled", "cp2_ulysses_compiled")
CHECKPOINTED = ("cp4_hybrid", "cp4_ulysses", "pp2_cp2_wlb_lazy", "pp2_tp2_wlb", "pp2_compiled")
BASES = {
    **dict.fromkeys(ONE_LAYER, "bases:one_layer"),
    **dict.fromkeys(CHECKPOINTED, "bases:checkpointed"),
}
STEPS = {name: [2] for name in RUNS} | {"pp2_cp2_wlb_lazy": [1, 2]}
"""In its first step `wlb` has only short documents to deal out, until its queues have filled."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


@pytest.fixture(scope="module")
def results(lab, folder, fork_server):
    """Of each run the records of its steps, by name."""
    cases = {}
    for name, (packing, overrides) in RUNS.items():
        words = ["--base", BASES.get(name, "bases:llama"), "--dump_folder", str(folder / name)]
        words += ["--wlb.corpus.path", str(lab.corpus), *COMMON, *PACKING[packing], *overrides]
        cases[name] = {"words": words, "steps": STEPS[name]}
    results = Cases(fork_server, folder)
    for processes in (2, 4):
        own = {name: case for name, case in cases.items() if ranks(name) == processes}
        results.run(own, processes)
    return results


def ranks(name):
    return math.prod(map(int, re.findall(r"[pctd]p(\d)", name)))


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_one_process(results, name):
    records = results[name]
    assert len(records) == len(STEPS[name])
    assert [r["loss"] for r in records] == pytest.approx([r["reference"] for r in records], rel=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_all_calls_meet(results, name):
    assert_met(results[name][-1]["met"])


@pytest.mark.parametrize("name", RUNS)
def test_gradients_equal_one_process(results, name):
    for record in results[name]:
        assert record["error"] < 1e-5, record["worst"]


def test_policies_that_balance_do(results, folder):
    for name in ("cp4_hybrid", "pp2_cp2_wlb_lazy"):
        assert metrics(folder / name)[-1]["imbalance"] < 1.1
    lengths = [record["longest_micro_batch"] for record in metrics(folder / "pp2_cp2_wlb_lazy")]
    assert len(set(lengths)) > 1, "all micro-batches are of one length"


def test_traced_steps_have_what_was_measured(results, folder):
    run = folder / "pp2_cp2_wlb_lazy"
    first, second = metrics(run)
    assert "bubble" not in first and "measured_imbalance" not in first
    assert 0 < second["bubble"] < 1
    assert second["measured_imbalance"] >= 1
    trace = json.loads((run / "traces" / "step-2.json").read_text())["traceEvents"]
    assert not (run / "traces" / "step-1.json").exists()
    tracks = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert tracks == {"pp 0 cp 0", "pp 0 cp 1", "pp 1 cp 0", "pp 1 cp 1"}
    passes = Counter(e["name"] for e in trace if e["ph"] == "X")
    assert passes == {f"{kind}{i}": 2 if kind == "L" else 4 for kind in "FLB" for i in range(4)}
    records = metrics(folder / "cp2_tp2_full_checkpointing")
    assert all(record["measured_imbalance"] >= 1 and "bubble" not in record for record in records)


def test_bfloat16_compiles_for_a_second_length(lab):
    """While gradients of the first micro-batch, in float32, wait for those of the others."""
    words = (*COMMON, *PACKING["wlb_lazy"], "--training.mixed_precision_param", "bfloat16")
    eager = lab.experiment("bfloat16", *words)
    compiled = lab.experiment("bfloat16_compiled", *words, *COMPILED)
    lab.run(1, [eager, compiled])
    assert compiled.losses() == pytest.approx(eager.losses(), rel=2e-3)
