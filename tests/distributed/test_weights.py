"""Weights begin alike on all degrees, no shard is a copy of another, and frozen ones, and those of a group
without a learning rate, stay as they are."""

import re

import pytest
from lab import Cases, rows

COMMON = ("--debug.seed", "7", "--training.seq_len", "128")
DRAWN = {  # one model each: the first layout, and those that draw the same
    "llama": ("dp1", "dp2", "replicas2", "cp2", "tp2", "pp2", "dp2 tp2", "cp2 tp2"),
    "qwen3": ("dp1 qwen3", "tp2 qwen3", "dp2 qwen3"),
    "experts": ("dp1 qwen3_moe", "cp2 qwen3_moe", "dp2 ep2 qwen3_moe", "pp2 qwen3_moe", "tp2 qwen3_moe"),
    "latent": ("dp1 deepseek_v3", "cp2 ep2 deepseek_v3"),
    "sinks": ("dp1 gpt_oss", "dp2 gpt_oss", "cp2 ep2 gpt_oss"),
}
ADAPTED = ("dp1 lora", "tp2 lora", "pp2 lora selective", "dp2 lora", "cp2 lora full", "tp2 float8_lora")
LONG = {"tp2 float8_lora", "dp2 lora", "cp2 lora full", "dp1 full compiled"}
STEPS = 2
GROUPED = ("dp1 stored", "dp1 full compiled", "pp2 selective")
STILL = r"^norm\.|^layers\.\d+\.(attention\.wo|ffn_norm)\."
GROUP = "{{pattern = '{}', optimizer_name = 'AdamW', optimizer_kwargs = {{lr = {}}}}}"
GROUPS = [GROUP.format(*one) for one in ((STILL, 0.0), (".*", 0.001))]


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory, fork_server):
    results = Cases(fork_server, tmp_path_factory.mktemp("weights"), lab.corpus)
    for layouts in DRAWN.values():  # in processes that know no other meshes
        results.add("weights", {name: {} for name in layouts}, COMMON)
    results.add("weights", {name: {"steps": STEPS} for name in ADAPTED}, COMMON, LONG)
    groups = ("--optimizer.param_groups", f"[{', '.join(GROUPS)}]")
    results.add("weights", {name: {"steps": STEPS, "words": groups} for name in GROUPED}, COMMON, LONG)
    return results


@pytest.mark.parametrize("model", rows(DRAWN, {"qwen3", "latent", "sinks"}))
def test_runs_of_one_seed_begin_from_the_same_weights_on_all_degrees(results, model):
    first, *others = DRAWN[model]
    expected = results[first]["before"]
    assert not results[first]["alike"] and len(set(expected.values())) > len(expected) / 2
    for name in others:
        found = results[name]["before"]
        assert found == expected, sorted(key for key in expected if found.get(key) != expected[key])


@pytest.mark.parametrize("name", rows(ADAPTED, LONG))
def test_lora_trains_its_adapters_and_no_more(results, name):
    before, after = results[name]["before"], results[name]["after"]
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key in before if ".lora_" in key} and moved
    if "pp2" not in name:  # each rank has its own
        assert results[name]["optimized"] == len(moved)


@pytest.mark.parametrize("name", rows(GROUPED, LONG))
def test_a_group_without_a_rate_stays_and_all_else_moves(results, name):
    before, after = results[name]["before"], results[name]["after"]
    stayed = {key for key in before if before[key] == after[key]}
    assert stayed == {key for key in before if re.search(STILL, key)} and len(stayed) == 5
