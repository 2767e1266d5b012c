"""Document attention inside other torchtitan models, also with expert parallelism."""

import pytest
from conftest import layout

COMMON = (
    *("--training.steps", "2", "--training.seq_len", "256", "--training.global_batch_size", "4"),
    *("--wlb.packing.policy", "wlb", "--wlb.packing.thresholds", "[250]"),
    *("--wlb.packing.cost_model", "quadratic:1,1000"),
    *("--checkpoint.enable", "true", "--metrics.log_freq", "1"),
)
PARALLEL = {
    "qwen3": (*layout(cp=2), "--wlb.sharding.policy", "hybrid"),
    "qwen3_moe": (
        *(*layout(cp=2), "--parallelism.expert_parallel_degree", "2"),
        *("--wlb.sharding.policy", "per_document"),
    ),
}


@pytest.fixture(scope="module")
def runs(lab):
    """For each model the metrics of one process and of two, from the same weights."""
    seeds, alone, parallel = {}, {}, {}
    for model in PARALLEL:
        base = ("--base", f"bases:{model}", *COMMON)
        seeds[model] = lab.experiment("seed", *base, "--checkpoint.create_seed_checkpoint", "true")
        seeds[model].folder = lab.folder / f"seed_{model}"
        seed = ("--checkpoint.initial_load_path", str(seeds[model].folder / "checkpoint" / "step-0"))
        alone[model] = lab.experiment(f"{model}_one_process", *base, *layout(), *seed)
        parallel[model] = lab.experiment(f"{model}_cp2", *base, *PARALLEL[model], *seed)
    lab.run(1, [*seeds.values(), *alone.values()])
    lab.run(2, list(parallel.values()))
    return alone, parallel


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", PARALLEL)
def test_losses_equal_one_process(runs, model):
    alone, parallel = runs
    assert len(alone[model].losses()) == 2
    assert parallel[model].losses() == pytest.approx(alone[model].losses(), rel=1e-4)
