"""Policies in turns train what runs of their own do, and leave bench.json alone; a profile of a run."""

import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
from commands import invoke
from forking import await_
from lab import TESTS, layout

from wlb_titan.commands.compare import bench_of
from wlb_titan.errors import UserError
from wlb_titan.runtime.bench import bench_records
from wlb_titan.runtime.checks import validate_inputs
from wlb_titan.runtime.configured import job_of, parallel_dims
from wlb_titan.runtime.models.load import load_config
from wlb_titan.summary import best_in_turns

POLICIES = ("plain", "wlb_lazy/hybrid/best", "slim/hybrid")
ROUNDS = 2
KEYS = "policy over_first scatter predicted flops_per_second tokens_per_second imbalance bubble peak_gib step"


def bench(lab, name, *words):
    policies = ("--wlb.bench.policies", ",".join(POLICIES), "--wlb.bench.rounds", str(ROUNDS))
    return lab.experiment(name, *policies, "--wlb.packing.cost_model", "quadratic:1,1000", *words)


@pytest.mark.parametrize("degrees", ["dp2", pytest.param("pp2 cp2", marks=pytest.mark.long)])
def test_policies_in_turns_train_what_each_would_train_at_these_weights(lab, degrees):
    """A run of its own whose weights stay has the same losses step by step."""
    name, words = degrees.replace(" ", "_"), layout(degrees)
    ranks = 2 ** len(degrees.split())
    benched = bench(lab, f"bench_{name}", *words)
    still = ("--base", "trainers:still", "--training.steps", str(1 + ROUNDS), "--metrics.log_freq", "1")
    cost = ("--wlb.packing.cost_model", "quadratic:1,1000")
    names = {policy: f"{name}_{policy.partition('/')[0]}" for policy in POLICIES}
    words = (*words, *still, *cost, "--wlb.policy")
    alone = {policy: lab.experiment(names[policy], *words, policy) for policy in POLICIES}
    lab.run(ranks, [benched, *alone.values()])

    log = benched.log.read_text()
    for policy, run in alone.items():
        line = rf"(?:warm-up|round \d of {ROUNDS}) \| {re.escape(policy)} \| loss +(\S+)"
        assert re.findall(line, log) == [f"{loss:.5f}" for loss in run.losses()], policy
    records = json.loads((benched.folder / "bench.json").read_text())["policies"]
    assert [record["policy"] for record in records] == list(POLICIES)
    assert all(list(record) == [*KEYS.split(), "parts"] for record in records)
    bench_steps = bench_of(benched.folder)[1]
    for name, step in bench_steps.items():
        assert step.passes and step.flops > 0, name
        assert {"loading", "optimizer", "rest", "waiting"} <= step.parts.keys(), name
    assert records[0]["over_first"] == records[0]["predicted"] == 1 and records[0]["scatter"] == 0
    assert all(record["imbalance"] >= 1 and record["peak_gib"] > 0 for record in records)
    assert all((record["bubble"] > 0) == ("pp" in degrees) for record in records)
    assert not {"checkpoint", "metrics.jsonl", "config.toml"} & {f.name for f in benched.folder.iterdir()}
    with pytest.raises(UserError, match=f"dump_folder: {alone['plain'].folder} contains a run"):
        validate_inputs(load_config_of(lab, bench(lab, alone["plain"].folder.name)))


def load_config_of(lab, experiment):
    return load_config(str(TESTS / "experiment.toml"), experiment.words()).config


def test_a_rank_that_dies_ends_the_bench(lab):
    experiment = bench(lab, "dies", *layout("dp2"), "--wlb.bench.rounds", "1000")
    job = lab.start(2, experiment)
    log = experiment.log
    await_(lambda: job.codes or (log.exists() and "round 1 of" in log.read_text()), log.read_text, 180)
    os.kill(job.processes[1], signal.SIGKILL)
    codes = job.wait(120)
    assert codes[0] not in (0, None) and not (experiment.folder / "bench.json").exists()


def test_policies_that_cannot_share_a_model_are_refused_by_name(lab):
    for policies, words, message in (
        ("plain,slom", (), "slom: no packing policy is called 'slom'. Did you mean 'slim'"),
        ("plain/ulysses,plain", ("cp8",), "plain/ulysses cannot take turns in this job: With ulysses 8"),
        ("plain,slim", ("pp2", "GPipe"), "slim cannot take turns in this job: Slices need the"),
        ("plain,slim", ("pp2", "slim4", "asymmetric", "full"), "only some of wlb.bench.policies can use its"),
    ):
        experiment = lab.experiment("refused", *layout(" ".join(words)), "--wlb.bench.policies", policies)
        with pytest.raises(UserError, match=re.escape(message)):
            load_config_of(lab, experiment)


def test_drift_of_the_machine_and_a_burst_do_not_reach_the_ratio():
    """It halves its speed during the bench, and one step takes five times as long; a policy that takes 0.8 of
    the other's time is 1.25x as fast."""
    drift, work = np.linspace(1, 2, 6), np.array([5, 9, 4, 7, 6, 5.0])
    rest = np.tile([100, 1.1, 0.2, 3], (6, 1))
    taken = {}
    for name, share in (("plain", 1.0), ("slim", 0.8)):
        taken[name] = np.column_stack([share * drift * work, work, rest])
    taken["plain"][3, 0] *= 5
    first, second = bench_records(taken, [2.0, 2.6])
    assert second["over_first"] == pytest.approx(1.25) and second["scatter"] < 1e-12
    taken["slim"][:3, 0] *= 1.001  # the first rounds are not those of the median
    first, second = bench_records(taken, [2.0, 2.6])
    assert first["step"] + 1 == second["step"] > 2 and first["step"] % 2 == 1
    assert second["predicted"] == pytest.approx(1.3) and first["over_first"] == 1
    assert best_in_turns([first, second]).startswith("slim trains 1.25x ±0.00 as fast as plain on")
    assert best_in_turns([first]) == "Nothing here trains faster than plain on this machine"


def test_a_profile_is_fitted_to_the_traced_steps_of_a_run(lab, tmp_path):
    """The run itself says, once, that predictions are off; other jobs' traces and none at all are refused."""
    run = lab.experiment("traced", *layout("pp2"), "--wlb.trace_every", "1")
    lab.run(2, [run])
    assert run.log.read_text().count(f"`wlb-titan profile --from {run.folder} --output FILE`") == 1

    def fitted():
        words = ["profile", "--from", str(run.folder), "--output", str(tmp_path / "profile.json")]
        return invoke(*words).output

    assert re.search(r"off by \S+% before and \S+% now, at the median of \d+", fitted())
    profile = ("--wlb.context.profile", str(tmp_path / "profile.json"))
    again = [lab.experiment("again", *layout("pp2"), *words) for words in ((), profile)]
    configs = [load_config_of(lab, one) for one in again]
    before, after = (job_of(config, parallel_dims(config)).token.matrices for config in configs)
    assert after != before
    config = run.folder / "config.toml"
    config.write_text(re.sub(r"seq_len = 256\b", "seq_len = 512", config.read_text()))
    assert "its traces are of another job or cluster" in fitted()
    shutil.rmtree(run.folder / "traces")
    assert "no traces to fit. Train some steps with wlb.trace_every" in fitted()
