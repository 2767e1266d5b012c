"""Every packing and sharding policy gives the losses and gradients of one process that knows none of them."""

import json
from collections import Counter

import pytest
from lab import Cases, assert_met, layout

COMMON = (
    *("--training.seq_len", "512", "--training.steps", "2"),
    *("--wlb.packing.cost_model", "quadratic:1,1000"),
)
GATHER = ["--wlb.sharding.policy", "own_policies.ulysses_gather:UlyssesGather"]
HEAD_APART = '[["tok_embeddings", "layers.0", "layers.1"], ["norm", "lm_head"]]'
LAZY = "pp2 cp2 wlb_lazy hybrid best selective"
TRACED = "cp2 tp2 wlb hybrid full"
# name as of `lab.layout` -> other overrides
CASES = {
    "cp4 wlb per_sequence": (),
    "cp4 wlb per_document": (),
    "cp4 wlb adaptive": (),
    "cp4 wlb hybrid selective": (),
    "dp2 plain": (),
    "dp2 cp2 wlb hybrid": (),
    "dp2 cp2 wlb_lazy adaptive": (),
    "dp2 cp2 fixed_greedy per_document": (),
    "dp2 cp2 fixed_solver": (),
    LAZY: ("--wlb.trace_every", "2"),
    "pp2 tp2 wlb shortest_first selective": (),
    TRACED: ("--wlb.trace_every", "1"),
    "cp2 wlb per_document": (),
    "cp2 wlb_lazy hybrid qwen3": (),
    # Four query heads and two key heads: with four ranks two share a key head, with CP 2 x TP 2 too.
    "cp4 wlb ulysses selective": (),
    "dp2 cp2 wlb_lazy ulysses": (),
    "pp2 cp2 fixed_greedy ulysses": (),
    "cp2 tp2 wlb ulysses": (),
    # Groups within context parallelism, which the stage without attention makes too, and then another one.
    "pp2 cp2 wlb": (
        *(*GATHER, "--parallelism.module_fqns_per_model_part", HEAD_APART),
        *("--checkpoint.enable", "true", "--checkpoint.async_mode", "async"),
    ),
    "cp2 layers1 wlb ulysses compiled": (),
    "cp2 layers1 wlb hybrid compiled": (),
    "pp2 wlb longest_first selective compiled": (),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


@pytest.fixture(scope="module")
def results(lab, folder, fork_server):
    """Of each run the records of its steps, by name. In its first step `wlb` has only short documents to deal
    out, until its queues have filled."""
    results = Cases(fork_server, folder, lab.corpus)
    steps = {name: [1, 2] if name == LAZY else [2] for name in CASES}
    cases = {name: {"words": words, "steps": steps[name]} for name, words in CASES.items()}
    results.run("plan", cases, COMMON)
    return results


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_one_process(results, name):
    for record in results[name]:
        assert record["loss"] == pytest.approx(record["reference"], rel=1e-5)
        assert record["error"] < 1e-5, record["worst"]
    assert_met(results[name][-1]["met"])


@pytest.mark.parametrize("name", ["cp4 wlb hybrid selective", LAZY])
def test_policies_that_balance_do(results, folder, name):
    assert results[name] and metrics(folder / name)[-1]["imbalance"] < 1.1


def test_traced_steps_have_what_was_measured(results, folder):
    assert results[LAZY] and results[TRACED]
    first, second = metrics(folder / LAZY)
    assert first["longest_micro_batch"] != second["longest_micro_batch"], "all are of one length"
    assert "bubble" not in first and "measured_imbalance" not in first
    assert 0 < second["bubble"] < 1
    assert second["measured_imbalance"] >= 1
    trace = json.loads((folder / LAZY / "traces" / "step-2.json").read_text())["traceEvents"]
    assert not (folder / LAZY / "traces" / "step-1.json").exists()
    tracks = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert tracks == {"pp 0 cp 0", "pp 0 cp 1", "pp 1 cp 0", "pp 1 cp 1"}
    passes = Counter(e["name"] for e in trace if e["ph"] == "X")
    assert passes == {f"{kind}{i}": 2 if kind == "L" else 4 for kind in "FLB" for i in range(4)}
    records = metrics(folder / TRACED)
    assert all(record["measured_imbalance"] >= 1 and "bubble" not in record for record in records)


def test_bfloat16_compiles_for_a_second_length(lab):
    """While gradients of the first micro-batch, in float32, wait for those of the others."""
    words = (*COMMON, *layout("wlb_lazy bfloat16"))
    eager = lab.experiment("bfloat16", *words)
    compiled = lab.experiment("bfloat16_compiled", *words, *layout("compiled"))
    lab.run(1, [eager, compiled])
    assert compiled.losses() == pytest.approx(eager.losses(), rel=2e-3)
