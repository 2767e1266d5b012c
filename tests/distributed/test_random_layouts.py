"""Layouts drawn at random give the losses and gradients of one process that knows none of them, or are
refused before the start. `--layouts 300` draws so many, `--layouts 100:200` those of these seeds; a draw that
fails says with which command it can be run alone."""

import random
from collections import Counter

import pytest
from lab import CONFIG, DEGREES, Cases, assert_met, ranks, rows, tight

from wlb_titan.errors import UserError
from wlb_titan.pipeline.schedule import SCHEDULES
from wlb_titan.runtime.checks import validate_files
from wlb_titan.runtime.models.load import load_config

EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
MODELS = ("llama", "llama", "lora", "qwen3", "muse_glimmer", *EXPERTS)
MASKED = "a corpus with label masks"
POLICIES = ("plain", "wlb_lazy", "wlb", "fixed_greedy", "dealt sharers2", "slim8", "slim8", "slim6 merged")
COMMON = ("--training.seq_len", "512", "--training.steps", "1")


def draw(seed):
    """The name of a layout, as of `lab.layout`, and other overrides."""
    rng = random.Random(seed)
    chance = lambda share: rng.random() < share  # noqa: E731
    degrees = Counter()
    factors = rng.choice([(), (2,), (2,), (2, 2), (2, 2), (2, 2), (3,), (4,)])
    for factor in factors:
        axis = rng.choice([*DEGREES, "dp", "pp"] if factor == 2 else ["dp", "replicas", "cp"])
        degrees[axis] = max(degrees[axis], 1) * factor
    model = rng.choice(MODELS)
    words = [f"draw{seed}", *(f"{axis}{degree}" for axis, degree in degrees.items() if degree)]
    words.append(f"layers{2 * max(degrees['pp'], 1)}" if model == "llama" else model)
    others = ["--debug.seed", "0"] if model in EXPERTS else []
    shards = max(degrees["dp"], 1) * max(degrees["cp"], 1) * max(degrees["tp"], 1)
    if model in EXPERTS and shards > 1:
        words.append(f"ep{rng.choice([n for n in (1, 2, 4) if shards % n == 0])}")
    data = max(degrees["dp"], 1) * max(degrees["replicas"], 1)
    policy = rng.choice([policy for policy in POLICIES if "sharers" not in policy or data % 2 == 0])
    words.append(policy)
    if degrees["cp"] or "sharers" in policy or "merged" in policy:
        words.append(rng.choice(["per_sequence", "per_document", "hybrid", "adaptive", "ulysses"]))
    recomputation = rng.choice(["stored", "selective", "full", "keys", "mixed", "mixed"])
    if degrees["pp"]:
        schedule = rng.choice(("1F1B", "Interleaved1F1B") if "slim" in policy else tuple(SCHEDULES))
        words.append(schedule)
        words.append(rng.choice(["", "", "best"]) if "slim" not in policy else "")
        if model != "llama" and SCHEDULES[schedule].chunks != 1:  # a layer a stage, and the ends without one
            others += ["--parallelism.pipeline_parallel_layers_per_stage", "1"]
        if "slim8" in policy and recomputation == "full" and chance(0.5):
            words.append("asymmetric")
    words += [recomputation, "whole_states" if degrees["tp"] and chance(0.4) else ""]
    if model not in EXPERTS and chance(0.15):
        words.append("bfloat16")
    if chance(0.12) and recomputation != "mixed":  # graphs of all kinds take minutes
        words.append("compiled")
    others += ["--parallelism.fsdp_reshard_after_forward", rng.choice(["default", "always", "never"])]
    others += ["--loss.num_chunks", str(rng.choice([1, 2, 4, 8]))]
    if chance(0.4):
        others += ["--wlb.corpus.path", MASKED]
        others += ["--wlb.loss_weight", rng.choice(["token", "conversation"])]
    if chance(0.25):
        others += ["--wlb.validation.hold_out", "0.1"]
    local = 4 if degrees["pp"] else rng.choice([1, 2])
    others += ["--training.local_batch_size", str(local)]
    others += ["--training.global_batch_size", str(data * local * rng.choice([1, 2, 3]))]
    if (
        chance(0.3)
        and "ulysses" not in words
        and (degrees["cp"] or "sharers" in policy or "merged" in policy)
    ):
        words.append("groups2")
    return " ".join(filter(None, words)), others


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        first, _, last = metafunc.config.getoption("--layouts").rpartition(":")
        seeds = range(int(first or 0), int(last))
        metafunc.parametrize("seed", rows(seeds, seeds[4:]))


@pytest.fixture(scope="module")
def cases(lab, tmp_path_factory, fork_server):
    return Cases(fork_server, tmp_path_factory.mktemp("layouts"), lab.corpus)


@pytest.mark.timeout(900)
def test_it_is_right_or_refused(lab, conversations, cases, record_property, seed, tmp_path):
    name, words = draw(seed)
    if MASKED in words:
        words[words.index(MASKED)] = str(conversations["dense"])
        words += lab.reading(None)
    words = [*COMMON, *words]
    given = cases.words(name, name, words)
    command = f"seed {seed}: wlb-titan train {CONFIG} {' '.join(given)}"
    try:
        if "mixed" in name:
            words += tight(given, ranks(name), tmp_path)
            given = cases.words(name, name, words)
        loaded = load_config(CONFIG, given, ranks(name))
        validate_files(loaded.config, loaded.job)
    except UserError as error:
        record_property("refused", str(error))
        return
    cases.add("plan", {name: {"words": words}}, timeout=800)
    try:
        (record,) = cases[name]
    except AssertionError as error:
        raise AssertionError(f"{command}\n{error}") from error
    rounded, experts = "bfloat16" in name or "gpt_oss" in name, any(model in name for model in EXPERTS)
    loss, gradients = (3e-3, 0.2) if rounded else (1e-5, 1e-2 if experts else 2e-5)
    assert record["loss"] == pytest.approx(record["reference"], rel=loss), command
    assert record["error"] < gradients, f"{record['worst']}\n{command}"
    assert record["norm"] == pytest.approx(record["reference_norm"], rel=max(gradients, 1e-4)), command
    if ranks(name) > 1:
        assert_met(record["met"])
