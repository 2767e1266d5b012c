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
LAYOUTS = (
    "pp2 cp2 tp2 best",
    "dp2 pp2 cp2 best",
    "dp2 replicas2 pp2 GPipe",
    "dp2 replicas2 cp2",
    "dp2 cp2 tp2",
    "pp4 cp2",
    "dp2 pp2 tp2 ZBVZeroBubble full",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, fork_server):
    return Lab(tmp_path_factory.mktemp("lab8"), fork_server, base="bases:layers4")


@pytest.fixture(scope="module")
def one_process(lab):
    experiment = lab.experiment("one_process_of_8", *COMMON)
    lab.run(1, [experiment])
    return experiment


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_process(lab, one_process, name):
    experiment = lab.experiment(name, *COMMON, *layout(name))
    lab.run(8, [experiment])
    assert experiment.losses() == pytest.approx(one_process.losses(), rel=1e-4)
    norms = [[record["grad_norm"] for record in run.metrics()] for run in (experiment, one_process)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
