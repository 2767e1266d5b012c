"""Every packing and sharding policy trains, and gives the losses of one process on the same plan."""

import json
from collections import Counter

import pytest
import torch
from lab import layout
from probing import FILE

# One cost model for all layouts: the analytic one depends on the degrees, and with it the packing.
COMMON = (
    *("--base", "probing:config"),
    *("--training.seq_len", "512", "--training.steps", "8"),
    *("--wlb.packing.cost_model", "quadratic:1,1000"),
)
PACKING = {
    "fixed_greedy": ("--wlb.packing.policy", "fixed_greedy", "--wlb.packing.global_batches", "2"),
    "wlb": ("--wlb.packing.policy", "wlb", "--wlb.packing.thresholds", "[300, 450]"),
    "wlb_lazy": ("--wlb.packing.policy", "wlb_lazy"),
    # A gap that it reaches at once: it would find something else whenever the clock stopped it.
    "fixed_solver": ("--wlb.packing.policy", "fixed_solver", "--wlb.packing.gap", "0.2"),
}
SHARDING = ("per_sequence", "per_document", "adaptive", "hybrid")


def sharding(policy: str) -> tuple[str, str]:
    return ("--wlb.sharding.policy", policy)


RUNS = {
    "cp4_compiled": (
        "wlb",
        (*layout(cp=4), *sharding("hybrid"), "--compile.enable", "true", "--compile.backend", "aot_eager"),
    ),
    "cp4_groups": ("wlb_lazy", (*layout(cp=4), *sharding("hybrid"), "--wlb.sharding.gather_groups", "2")),
}


@pytest.fixture(scope="module")
def runs(lab):
    references = {policy: lab.experiment(f"one_{policy}", *COMMON, *PACKING[policy]) for policy in PACKING}
    lab.run(1, list(references.values()))
    experiments = {
        name: lab.experiment(name, *COMMON, *PACKING[packing], *overrides)
        for name, (packing, overrides) in RUNS.items()
    }
    by_two = [name for name in experiments if False]
    lab.run(4, [experiment for name, experiment in experiments.items() if name not in by_two])
    return references, experiments


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_one_process(runs, name):
    references, experiments = runs
    packing, _ = RUNS[name]
    assert experiments[name].losses() == pytest.approx(references[packing].losses(), rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_gradients_equal_one_process(runs, name):
    references, experiments = runs
    packing, _ = RUNS[name]
    mine, expected = (torch.load(run.folder / FILE) for run in (experiments[name], references[packing]))
    assert mine.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, f"{parameter} has no gradient that could be compared"
        assert (mine[parameter] - gradient).abs().max() < 1e-5 * scale, parameter
