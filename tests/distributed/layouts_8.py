"""Eight processes: combinations of four kinds of parallelism give the losses and gradients of one process.

Not among the tests that `make test` collects, because eight processes are slow on few cores; run it with

    pytest tests/distributed/layouts_8.py
"""

import pytest
from lab import Cases

COMMON = ("--training.seq_len", "512", "--training.steps", "2", "--wlb.policy", "wlb_lazy/hybrid")
COMMON += ("--wlb.packing.cost_model", "quadratic:1,1000")
LAYOUTS = (
    "pp2 cp2 tp2 layers4 wlb_lazy hybrid best",
    "dp2 replicas2 pp2 layers4 GPipe",
    "dp2 replicas2 cp2",
    "dp2 cp2 tp2",
    "dp2 pp2 cp2 layers4 wlb_lazy hybrid best",
    "pp4 cp2 layers4",
    "dp2 pp2 tp2 layers4 ZBVZeroBubble full",
)


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory, fork_server):
    results = Cases(fork_server, tmp_path_factory.mktemp("eight"), lab.corpus)
    results.add("plan", {name: {"steps": [1, 2]} for name in LAYOUTS}, COMMON)
    return results


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradients_equal_one_process(results, name):
    for record in results[name]:
        assert record["loss"] == pytest.approx(record["reference"], rel=1e-5)
        assert record["error"] < 1e-5, record["worst"]
