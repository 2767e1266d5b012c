"""A job on the device: steps neither wait nor compile, it resumes exactly, memory is what was predicted."""

import pytest
from lab import CONFIG, lines_of
from trainers import WAITED

from wlb_titan.config.documents import training_documents
from wlb_titan.runtime.memory import planned_memory
from wlb_titan.runtime.models.load import load_config

LAZY = ("--wlb.policy", "wlb_lazy", "--wlb.packing.cost_model", "quadratic:1,1000")
FRESH = ("--checkpoint.enable", "false", "--checkpoint.initial_load_path", "none")


ON_GPU = ("watched_gpt_oss", "watched_deepseek_v3")


@pytest.mark.parametrize("base", ["watched_llama", *(pytest.param(x, marks=pytest.mark.gpu) for x in ON_GPU)])
def test_steps_that_are_not_logged_neither_wait_nor_compile(lab, target, base):
    experiment = lab.experiment(
        base,
        *("--base", target.pick(cuda=f"gpu_bases:{base}", cpu="trainers:watched"), *LAZY, *FRESH),
        *("--training.seq_len", target.pick(cuda="4096", cpu="256"), "--training.steps", "8"),
        *("--metrics.log_freq", "100"),
    )
    lab.run(1, [experiment])
    first, *others = lines_of(experiment.folder / WAITED.format(rank=0))
    assert first["waits"], "the first step is logged, so something must have been noticed"
    assert len(others) == 7
    assert [step["compiled"] for step in others] == [[]] * 7
    if base != "watched_gpt_oss":  # whose experts, torchtitan's, wait to know how many tokens each has
        assert [step["waits"] for step in others] == [[]] * 7


def test_killed_and_started_again(lab):
    words = (*LAZY, "--training.steps", "7", "--checkpoint.interval", "2", "--metrics.log_freq", "1")
    whole, killed = (lab.experiment(name, *words) for name in ("whole", "killed"))
    lab.run(1, [whole])
    assert lab.start_and_kill(1, killed, 3) < 7
    lab.run(1, [killed])
    assert killed.losses() == whole.losses()


MEMORY = {
    "plain": ("--wlb.policy", "plain"),
    "none": ("--wlb.policy", "plain", "--activation_checkpoint", "none"),
    "full": ("--wlb.policy", "plain", "--activation_checkpoint.class", "FullAC"),
    "wlb_lazy": LAZY,
    "slim": ("--wlb.policy", "slim"),
    "experts_none": ("--wlb.policy", "plain", "--activation_checkpoint", "none"),
    "experts_selective": ("--wlb.policy", "plain", "--activation_checkpoint.class", "SelectiveDocumentAC"),
}


SMALL = ("wlb_lazy", "slim", "experts_selective")  # in which no figures are compared


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMALL else pytest.mark.gpu) for name in MEMORY]
)
def test_memory_is_as_predicted(lab, target, tell, name):
    """Within 5 %, from the second step on, when AdamW has its state; of experts by a trace of their layers. A
    CPU's figure is the whole process'."""
    base, seq_len = target.pick(cuda=("llama2_550m", "16384"), cpu=("bases:llama", "256"))
    if "experts" in name:
        base, seq_len = target.pick(cuda=("gpu_bases:qwen3_30b_a3b", "4096"), cpu=("bases:qwen3_moe", "256"))
    words = (
        *("--base", base, *FRESH, *MEMORY[name]),
        *("--training.seq_len", seq_len, "--training.steps", "4"),
        *("--training.global_batch_size", "4", "--metrics.log_freq", "1"),
    )
    experiment = lab.experiment(f"memory_{name}", *words)
    lab.run(1, [experiment])
    of_a_gpu = ("--wlb.cluster", "h100_roce") if "experts" in name else ()  # whose layers are traced
    loaded = load_config(CONFIG, [*experiment.words(), *of_a_gpu], world_size=1)
    job, documents = loaded.told(loaded.job), training_documents(loaded.config.wlb)
    measured = [record["peak_memory_gib/pp0"] for record in experiment.metrics()]
    predicted = [planned_memory(job, plan, 0)[0].total / 2**30 for plan in job.plans(documents, 4)]
    tell(part="memory", case=name, predicted_gib=predicted, measured_gib=measured)
    tolerance = target.pick(cuda=0.05, cpu=float("inf"))
    assert measured[1:] == pytest.approx(predicted[1:], rel=tolerance)
