"""Every packing and sharding policy trains, and gives the losses of one process on the same plan."""

import pytest
from conftest import layout

# One cost model for all layouts: the analytic one depends on the degrees, and with it the packing.
COMMON = (
    *("--training.seq_len", "512", "--training.steps", "2"),
    *("--wlb.packing.cost_model", "quadratic:1,1000"),
)
PACKING = {
    "fixed_greedy": ("--wlb.packing.policy", "fixed_greedy", "--wlb.packing.window", "2"),
    "wlb": ("--wlb.packing.policy", "wlb", "--wlb.packing.thresholds", "[300, 450]"),
    "wlb_lazy": ("--wlb.packing.policy", "wlb_lazy"),
}
SHARDING = ("per_sequence", "per_document", "adaptive", "hybrid")


def sharding(policy: str) -> tuple[str, str]:
    return ("--wlb.sharding.policy", policy)


# name -> (packing policy, overrides)
RUNS = {
    **{f"cp4_{policy}": ("wlb", (*layout(cp=4), *sharding(policy))) for policy in SHARDING},
    "dp2_cp2_wlb": ("wlb", (*layout(dp=2, cp=2), *sharding("hybrid"))),
    "dp2_cp2_wlb_lazy": ("wlb_lazy", (*layout(dp=2, cp=2), *sharding("adaptive"))),
    "dp2_cp2_fixed_greedy": ("fixed_greedy", (*layout(dp=2, cp=2), *sharding("per_document"))),
    "pp2_cp2_wlb_lazy": (
        "wlb_lazy",
        (*layout(pp=2, cp=2), *sharding("hybrid"), "--wlb.pipeline.check_lengths", "true"),
    ),
    "pp2_tp2_wlb": ("wlb", layout(pp=2, tp=2)),
    "cp2_tp2_full_checkpointing": ("wlb", (*layout(cp=2, tp=2), "--activation_checkpoint.class", "FullAC")),
}


@pytest.fixture(scope="module")
def runs(lab):
    references = {policy: lab.experiment(f"one_{policy}", *COMMON, *PACKING[policy]) for policy in PACKING}
    lab.run(1, list(references.values()))
    experiments = {
        name: lab.experiment(name, *COMMON, *PACKING[packing], *overrides)
        for name, (packing, overrides) in RUNS.items()
    }
    lab.run(4, list(experiments.values()))
    return references, experiments


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_one_process(runs, name):
    references, experiments = runs
    packing, _ = RUNS[name]
    assert experiments[name].losses() == pytest.approx(references[packing].losses(), rel=1e-4)


def test_policies_that_balance_do(runs):
    references, _ = runs
    imbalance = {policy: run.metrics()[-1]["imbalance"] for policy, run in references.items()}
    # Not in the first step: until its queues have filled, `wlb` has only short documents to deal out.
    assert max(imbalance["wlb"], imbalance["wlb_lazy"]) < 1.1
    lengths = [r["longest_micro_batch"] for r in references["wlb_lazy"].metrics()]
    assert len(set(lengths)) > 1, "all micro-batches are of one length"
