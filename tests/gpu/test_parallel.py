"""Several ranks on one GPU give the losses of one process; and what a machine of so many GPUs refuses.

Ranks that share a GPU are NCCL's own experiment (NCCL_MULTI_RANK_GPU_ENABLE), in which ranks that find no
room hang: each job has its time limit. Time is not measured here.
"""

import pytest
from lab import first_failure, layout

LAYOUTS = {
    "cp2": {"cp": 2},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "pp2_cp2": {"pp": 2, "cp": 2},
    "dp2_cp2": {"dp": 2, "cp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2},
}
COMMON = (
    *("--training.steps", "3", "--wlb.packing.policy", "wlb_lazy", "--metrics.log_freq", "1"),
    *("--wlb.packing.cost_model", "quadratic:1,1000", "--wlb.sharding.policy", "hybrid"),
)
SECONDS = 120  # for a job


def run(lab, target, name, processes, *words):
    seq_len = target.pick(cuda="2048", cpu="256")
    experiment = lab.experiment(name, *COMMON, "--training.seq_len", seq_len, *words)
    codes = lab.start(processes, experiment).wait(SECONDS)
    assert not any(codes), f"exit codes {codes}: {first_failure(experiment.log)}"
    return experiment.metrics()


@pytest.fixture(scope="module")
def one_process(lab, target):
    return run(lab, target, "one_process", 1)


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_process(lab, target, one_process, name):
    degrees = LAYOUTS[name]
    metrics = run(lab, target, name, 2 ** len(degrees), *layout(**degrees))
    for key, rel in (
        ("loss", target.pick(cuda=5e-3, cpu=1e-4)),
        ("grad_norm", target.pick(cuda=5e-2, cpu=1e-3)),
    ):
        assert [r[key] for r in metrics] == pytest.approx([r[key] for r in one_process], rel=rel), key
    assert len(metrics) == 3


def test_a_job_for_the_cpu_leaves_gpus_alone(lab):
    """In processes that import torch themselves: what was forked has looked for devices already."""
    experiment = lab.experiment("on_cpu", *COMMON, *layout(cp=2), "--wlb.device", "cpu")
    assert lab.start(2, experiment, fresh=True).wait(SECONDS) == [0, 0], first_failure(experiment.log)
    assert "mfu_documents" not in experiment.metrics()[-1]  # of a CPU the peak is not known, of a GPU it is


def test_more_processes_than_gpus_are_refused(lab, target):
    experiment = lab.experiment("too_many", *COMMON)
    codes = lab.start(1, experiment, environment={"LOCAL_WORLD_SIZE": "99"}).wait(SECONDS)
    message = "error: " in experiment.log.read_text() and "99 processes and" in experiment.log.read_text()
    assert (codes != [0]) == message == target.pick(cuda=True, cpu=False)
