"""Several ranks on one GPU give the losses of one process; and what a machine of so many GPUs refuses.

Ranks that share a GPU are NCCL's own experiment (NCCL_MULTI_RANK_GPU_ENABLE), in which ranks that find no
room hang: each job has its time limit. Time is not measured here.
"""

import json
import math

import pytest
from lab import first_failure, layout
from trainers import WAITED

SLIM = (
    *("--wlb.packing.policy", "slim", "--wlb.packing.micropacks", "6"),
    *("--parallelism.pipeline_parallel_schedule", "1F1B"),
)
THREE = ("--training.local_batch_size", "3", "--training.global_batch_size", "3")
ALONE = {
    "lazy": (),
    "slim": SLIM,
    "slim_three": (*SLIM, *THREE),
}
"""What one process trains."""
GATHER = ("--wlb.sharding.policy", "own_policies.ulysses_gather:UlyssesGather", "--wlb.sharding.within", "2")
HEAD_APART = '[["tok_embeddings", "layers.0", "layers.1"], ["norm", "lm_head"]]'
THREE_STAGES = '[["tok_embeddings", "layers.0"], ["layers.1"], ["norm", "lm_head"]]'
ASYMMETRIC = ("--wlb.packing.asymmetric", "true", "--activation_checkpoint.class", "FullAC")
LAYOUTS = {
    "cp2": ("lazy", {"cp": 2}, ()),
    "dp2": ("lazy", {"dp": 2}, ()),
    "pp2": ("lazy", {"pp": 2}, ()),
    "tp2": ("lazy", {"tp": 2}, ()),
    "pp2_cp2": ("lazy", {"pp": 2, "cp": 2}, ()),
    "dp2_cp2": ("lazy", {"dp": 2, "cp": 2}, ()),
    "cp2_tp2": ("lazy", {"cp": 2, "tp": 2}, ()),
    # Groups that only some of the ranks are in, or ask for.
    "cp4_hybrid": ("lazy", {"cp": 4}, ()),
    "cp4_ulysses_gather": ("lazy", {"cp": 4}, GATHER),
    "pp2_cp2_head_apart": (
        "lazy",
        {"pp": 2, "cp": 2},
        (
            *(*GATHER, "--checkpoint.async_mode", "async"),
            *("--parallelism.module_fqns_per_model_part", HEAD_APART),
        ),
    ),
    "dp3_slim": (
        "slim_three",
        {"dp": 3},
        (*SLIM, "--wlb.packing.dp_merge", "true", "--training.local_batch_size", "1"),
    ),
    "pp2_cp2_asymmetric": ("slim", {"pp": 2, "cp": 2}, (*SLIM, *ASYMMETRIC)),
    # The one in the middle sends to one rank and receives from another.
    "pp3": (
        "lazy",
        {"pp": 3},
        (
            *("--parallelism.pipeline_parallel_schedule", "1F1B"),
            *("--parallelism.module_fqns_per_model_part", THREE_STAGES),
        ),
    ),
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
    known = {}

    def metrics(name):
        if name not in known:
            known[name] = run(lab, target, f"alone_{name}", 1, *ALONE[name])
        return known[name]

    return metrics


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_process(lab, target, one_process, name):
    alone, degrees, words = LAYOUTS[name]
    ranks = math.prod(degrees.values())
    metrics = run(
        lab,
        target,
        name,
        ranks,
        *layout(" ".join(f"{axis}{degree}" for axis, degree in degrees.items())),
        *words,
    )
    for key, rel in (
        ("loss", target.pick(cuda=5e-3, cpu=1e-4)),
        ("grad_norm", target.pick(cuda=5e-2, cpu=1e-3)),
    ):
        expected = [record[key] for record in one_process(alone)]
        assert [record[key] for record in metrics] == pytest.approx(expected, rel=rel), key
    assert len(metrics) == 3


@pytest.mark.timeout(2 * SECONDS)
def test_slices_go_through_a_pipeline_without_waiting(lab, target):
    watched = ("--base", target.pick(cuda="gpu_bases:watched_llama", cpu="trainers:watched"))
    run(lab, target, "watched", 2, *watched, *layout("pp2"), *SLIM, "--metrics.log_freq", "100")
    for rank in range(2):
        lines = (lab.folder / "watched" / WAITED.format(rank=rank)).read_text().splitlines()
        first, *others = (json.loads(line)["waits"] for line in lines)
        assert first and others == [[], []]


def test_a_job_for_the_cpu_leaves_gpus_alone(lab):
    """In processes that import torch themselves: what was forked has looked for devices already."""
    experiment = lab.experiment("on_cpu", *COMMON, *layout("cp2"), "--wlb.device", "cpu")
    assert lab.start(2, experiment, fresh=True).wait(SECONDS) == [0, 0], first_failure(experiment.log)
    assert "mfu_documents" not in experiment.metrics()[-1]  # of a CPU the peak is not known, of a GPU it is


@pytest.mark.parametrize("visible", ["0,1", "0"])
def test_more_processes_than_gpus_are_refused_unless_each_is_shown_its_own(lab, target, visible):
    experiment = lab.experiment(f"too_many_{visible}", *COMMON)
    shown = {"CUDA_VISIBLE_DEVICES": target.pick(cuda=visible, cpu="")}
    codes = lab.start(1, experiment, environment={"LOCAL_WORLD_SIZE": "99", **shown}, fresh=True).wait(
        SECONDS
    )
    message = "error: " in experiment.log.read_text() and "99 processes and" in experiment.log.read_text()
    assert (codes != [0]) == message == target.pick(cuda=visible == "0,1", cpu=False)
