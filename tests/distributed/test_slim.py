"""Slices of documents under every parallelism give the losses and gradients of one process without any.

The reference packs whole documents: one MicroPack has the whole step.
"""

import json
from collections import Counter

import pytest
import torch
from conftest import layout
from probing import FILE

COMMON = (
    *("--base", "probing:deep", "--training.seq_len", "512", "--training.steps", "2"),
    *("--wlb.packing.policy", "slim", "--wlb.packing.cost_model", "quadratic:1,1000"),
)


def slim(packs: int, schedule: str = "1F1B") -> tuple[str, ...]:
    return (
        *("--wlb.packing.slim.micropacks", str(packs)),
        *("--parallelism.pipeline_parallel_schedule", schedule),
    )


def checkpointing(kind: str) -> tuple[str, ...]:
    if kind == "none":
        return ("--activation_checkpoint", "none")
    return ("--activation_checkpoint.class", kind)


COMPILED = ("--compile.enable", "true", "--compile.backend", "aot_eager")
TWO = {
    "pp2": (*layout(pp=2), *slim(9), *checkpointing("none")),
    "pp2_compiled": (*layout(pp=2), *slim(8), *COMPILED),
    "pp2_interleaved": (*layout(pp=2), *slim(8, "Interleaved1F1B"), *checkpointing("FullAC")),
    "dp2": (
        *(*layout(dp=2), *slim(5), *checkpointing("FullAC")),
        *("--wlb.packing.slim.solver", "milp", "--wlb.packing.slim.time_limit", "0.2"),
    ),
    "cp2_groups": (*layout(cp=2), *slim(7), "--wlb.sharding.gather_groups", "2", *checkpointing("none")),
}
FOUR = {
    "pp4": (*layout(pp=4), *slim(11), "--wlb.trace_every", "2"),
    "pp2_cp2": (*layout(pp=2, cp=2), *slim(8), "--wlb.sharding.policy", "adaptive"),
    "pp2_tp2": (*layout(pp=2, tp=2), *slim(8), *checkpointing("FullAC")),
    "pp2_dp2_interleaved": (*layout(pp=2, dp=2), *slim(6, "Interleaved1F1B")),
    "cp2_tp2": (*layout(cp=2, tp=2), *slim(6), "--wlb.sharding.policy", "per_document"),
}
RUNS = TWO | FOUR


@pytest.fixture(scope="module")
def runs(lab):
    experiments = {
        name: lab.experiment(f"slim_{name}", *COMMON, *overrides) for name, overrides in RUNS.items()
    }
    deep = lab.experiment(
        "deep_seed", "--base", "probing:deep", "--checkpoint.create_seed_checkpoint", "true"
    )
    lab.run(1, [deep])
    start = ("--checkpoint.initial_load_path", str(deep.folder / "checkpoint" / "step-0"))
    for experiment in experiments.values():
        experiment.overrides = (*experiment.overrides, *start)
    one = lab.experiment("slim_one", *COMMON, *slim(1), *start)
    lab.run(1, [one])
    lab.run(2, [experiments[name] for name in TWO])
    lab.run(4, [experiments[name] for name in FOUR])
    return one, experiments


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_one_process(runs, name):
    one, experiments = runs
    assert experiments[name].losses() == pytest.approx(one.losses(), rel=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_gradients_equal_one_process(runs, name):
    one, experiments = runs
    mine, expected = (torch.load(run.folder / FILE) for run in (experiments[name], one))
    assert mine.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, f"{parameter} has no gradient that could be compared"
        assert (mine[parameter] - gradient).abs().max() < 1e-5 * scale, parameter


def test_documents_were_sliced(runs):
    one, experiments = runs
    longest = [record["longest_micro_batch"] for record in one.metrics()]
    for name in RUNS:
        lengths = [record["longest_micro_batch"] for record in experiments[name].metrics()]
        assert all(mine < 0.75 * whole for mine, whole in zip(lengths, longest, strict=True)), name


def test_a_run_goes_on_where_its_checkpoint_was(lab, runs):
    one, _ = runs
    start = one.overrides[-2:]
    kept = ("--checkpoint.interval", "2", "--training.steps", "4")
    whole = lab.experiment("slim_whole", *COMMON, *TWO["pp2"], *start, *kept)
    lab.run(2, [whole])
    step_2 = str(whole.folder / "checkpoint" / "step-2")
    again = lab.experiment(
        *("slim_again", *COMMON, *TWO["pp2"], *kept),
        *("--checkpoint.initial_load_path", step_2, "--checkpoint.initial_load_model_only", "false"),
    )
    lab.run(2, [again])
    assert [record["step"] for record in again.metrics()] == [3, 4]
    assert again.losses() == whole.losses()[2:]
    assert whole.losses()[:2] == pytest.approx(one.losses(), rel=1e-5)


def test_a_trace_has_every_pass(runs):
    _, experiments = runs
    run = experiments["pp4"]
    trace = json.loads((run.folder / "traces" / "step-2.json").read_text())["traceEvents"]
    passes = Counter(e["name"] for e in trace if e["ph"] == "X")
    assert passes == {f"{kind}{i}": 1 if kind == "L" else 4 for kind in "FLB" for i in range(11)}
    assert 0 < run.metrics()[1]["bubble"] < 1
