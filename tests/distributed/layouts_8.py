"""Eight processes: combinations of four kinds of parallelism give the losses of one process.

Not among the tests that `make test` collects, because eight processes are slow on few cores; run it with

    pytest tests/distributed/layouts_8.py
"""

import pytest
from lab import Lab, layout

COMMON = (
    *("--training.seq_len", "512", "--training.steps", "2", "--wlb.packing.policy", "wlb_lazy"),
    *("--wlb.packing.cost_model", "quadratic:1,1000", "--wlb.sharding.policy", "hybrid"),
)
REPLICAS = ("--parallelism.data_parallel_replicate_degree", "2")
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
LAYOUTS = {
    "pp2_cp2_tp2": (*layout(pp=2, cp=2, tp=2), "--wlb.pipeline.order", "best"),
    "dp2_pp2_cp2": (*layout(dp=2, pp=2, cp=2), "--wlb.pipeline.order", "best"),
    "hsdp2x2_pp2": (*layout(dp=2, pp=2), *REPLICAS, "--training.local_batch_size", "1", SCHEDULE, "GPipe"),
    "hsdp2x2_cp2": (*layout(dp=2, cp=2), *REPLICAS, "--training.local_batch_size", "1"),
    "dp2_cp2_tp2": layout(dp=2, cp=2, tp=2),
    "pp4_cp2": layout(pp=4, cp=2),
    "pp2_dp2_tp2_zero_bubble": (
        *(*layout(dp=2, pp=2, tp=2), SCHEDULE, "ZBVZeroBubble"),
        *("--activation_checkpoint.class", "FullAC"),
    ),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory, fork_server):
    return Lab(
        tmp_path_factory.mktemp("lab8"), fork_server, base="llama3_debug"
    )  # four layers, for four stages


@pytest.fixture(scope="module")
def one_process(lab):
    experiment = lab.experiment("one_process_of_8", *COMMON)
    lab.run(1, [experiment])
    return experiment


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_process(lab, one_process, name):
    experiment = lab.experiment(name, *COMMON, *LAYOUTS[name])
    lab.run(8, [experiment])
    assert experiment.losses() == pytest.approx(one_process.losses(), rel=1e-4)
    norms = [[record["grad_norm"] for record in run.metrics()] for run in (experiment, one_process)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
