"""Several ranks on one GPU give the losses of one process; and what a machine of so many GPUs refuses. Ranks
that share a GPU are NCCL's own experiment, in which those that find no room hang: each job has its limit."""

from functools import cache

import pytest
from lab import first_failure, layout, lines_of, ranks
from trainers import WAITED

COMMON = ("--training.steps", "3", "--wlb.policy", "wlb_lazy/hybrid", "--metrics.log_freq", "1")
COMMON += ("--wlb.packing.cost_model", "quadratic:1,1000")
STAGES = "--parallelism.module_fqns_per_model_part"
HEAD_APART = (STAGES, '[["tok_embeddings", "layers.0", "layers.1"], ["norm", "lm_head"]]')
THREE = (STAGES, '[["tok_embeddings", "layers.0"], ["layers.1"], ["norm", "lm_head"]]')
WITHIN = ("--wlb.context.within", "2")
SLIM = "slim6 hybrid 1F1B"
PLAIN = ("cp2", "dp2", "pp2", "tp2", "pp2 cp2", "dp2 cp2", "cp2 tp2")
# name as of `lab.layout` -> other overrides
LAYOUTS = {
    **dict.fromkeys(PLAIN, ()),
    # Groups that only some of the ranks are in, or ask for.
    "cp4": (),
    "cp4 wlb_lazy gather": WITHIN,
    "pp2 cp2 wlb_lazy gather": (*WITHIN, *HEAD_APART, "--checkpoint.async_mode", "async"),
    f"dp3 {SLIM} merged": ("--training.local_batch_size", "1"),
    f"pp2 cp2 {SLIM} asymmetric full": (),
    # The one in the middle sends to one rank and receives from another.
    "pp3 1F1B": THREE,
}
SECONDS = 120  # for a job


def run(lab, target, name, processes, *words):
    seq_len = target.pick(cuda="2048", cpu="256")
    experiment = lab.experiment(name, *COMMON, "--training.seq_len", seq_len, *words)
    codes = lab.start(processes, experiment).wait(SECONDS)
    assert not any(codes), f"exit codes {codes}: {first_failure(experiment.log)}"
    return experiment.metrics()


@pytest.fixture(scope="module")
def one_process(lab, target):
    @cache
    def metrics(packing, micro_batches):
        words = (*layout(packing), "--training.local_batch_size", micro_batches)
        return run(lab, target, f"alone {packing} {micro_batches}", 1, *words)

    return metrics


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu if name in PLAIN[1:] else ()) for name in LAYOUTS]
)
def test_losses_equal_one_process(lab, target, one_process, name):
    metrics = run(lab, target, name, ranks(name), *layout(name), *LAYOUTS[name])
    alone = one_process(SLIM if SLIM in name else "", "3" if "dp3" in name else "4")
    tolerances = {"loss": target.pick(cuda=5e-3, cpu=1e-4), "grad_norm": target.pick(cuda=5e-2, cpu=1e-3)}
    for key, tolerance in tolerances.items():
        expected = [record[key] for record in alone]
        assert [record[key] for record in metrics] == pytest.approx(expected, rel=tolerance), key
    assert len(metrics) == 3


@pytest.mark.timeout(2 * SECONDS)
def test_slices_go_through_a_pipeline_without_waiting(lab, target):
    watched = ("--base", target.pick(cuda="gpu_bases:watched_llama", cpu="trainers:watched"))
    run(lab, target, "watched", 2, *watched, *layout(f"pp2 {SLIM}"), "--metrics.log_freq", "100")
    for rank in range(2):
        records = lines_of(lab.folder / "watched" / WAITED.format(rank=rank))
        logged, other, saved = [record["waits"] for record in records]
        assert logged and saved and not other


def test_a_job_for_the_cpu_leaves_gpus_alone(lab):
    """In processes that import torch themselves: what was forked has looked for devices already."""
    experiment = lab.experiment("on_cpu", *COMMON, *layout("cp2"), "--wlb.device", "cpu")
    assert lab.start(2, experiment, fresh=True).wait(SECONDS) == [0, 0], first_failure(experiment.log)
    assert "mfu_documents" not in experiment.metrics()[-1]  # of a CPU the peak is not known, of a GPU it is


@pytest.mark.parametrize("visible", ["0,1", pytest.param("0", marks=pytest.mark.gpu)])
def test_more_processes_than_gpus_are_refused_unless_each_is_shown_its_own(lab, target, visible):
    experiment = lab.experiment(f"too_many_{visible}", *COMMON)
    shown = {"CUDA_VISIBLE_DEVICES": target.pick(cuda=visible, cpu="")}
    job = lab.start(1, experiment, environment={"LOCAL_WORLD_SIZE": "99", **shown}, fresh=True)
    codes = job.wait(SECONDS)
    message = "error: " in experiment.log.read_text() and "99 processes need" in experiment.log.read_text()
    assert (codes != [0]) == message == target.pick(cuda=visible == "0,1", cpu=False)
