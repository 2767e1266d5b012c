"""A configuration that cannot fit its devices is refused with the arithmetic."""

from dataclasses import replace

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import torch  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from wlb_titan.cost.cluster import load_cluster  # noqa: E402
from wlb_titan.cost.models import rank_parameters  # noqa: E402
from wlb_titan.errors import UserError  # noqa: E402
from wlb_titan.memory.fits import USABLE  # noqa: E402
from wlb_titan.memory.rank import Passes  # noqa: E402
from wlb_titan.runtime.job import job_of, model_shape  # noqa: E402
from wlb_titan.runtime.memory import check_memory  # noqa: E402
from wlb_titan.runtime.models.bases import base_config  # noqa: E402
from wlb_titan.runtime.models.load import load_config  # noqa: E402

pytestmark = pytest.mark.slow

GIB = 2**30


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The job of a TOML file on four ranks."""

    def load(text):
        path = tmp_path_factory.mktemp("memory") / "train.toml"
        path.write_text(text)
        config = load_config(path).config
        return job_of(config, ParallelDims.from_config(config.parallelism, 4))

    return load


PIPELINE = """
base = "llama2_7b"
wlb.cluster = "h100_roce"
[training]
seq_len = 32768
local_batch_size = 8
[parallelism]
pipeline_parallel_degree = 4
data_parallel_shard_degree = 1
[wlb.packing]
policy = "wlb"
"""


def test_what_cannot_fit_is_refused_with_the_arithmetic(loaded):
    job = loaded(PIPELINE)
    ranks = job.fitting.peak(Passes.of([job.window] * 8))
    most = max(ranks, key=lambda rank: rank.total)
    assert [rank.layers for rank in ranks] == [8, 9, 8, 7]
    enough = most.total / USABLE + 1
    check_memory(job, enough)
    with pytest.raises(UserError) as error:
        check_memory(job, enough - GIB // 10)
    message = str(error.value)
    # What is refused, and where L_max is no longer than a window, is one limit.
    for memory, refused in ((enough, False), (enough - GIB // 10, True)):
        tight = job.on(replace(job.cluster, memory=memory))
        assert tight.fitting.windows_fit != refused
        assert job.window <= tight.longest_micro_batch < 1.1 * job.window
    assert f"pipeline rank {most.rank}: {most.total / GIB:.2f} GiB" in message
    assert "activations" in message and "optimizer" in message and "\n" not in message


def test_the_default_of_max_length_is_what_is_predicted_to_fit(loaded):
    def bounded(share, text=PIPELINE):
        job = loaded(text)
        return job.on(replace(job.cluster, memory=share * enough)).longest_micro_batch

    job = loaded(PIPELINE)
    window = job.window
    enough = max(rank.total for rank in job.fitting.peak(Passes.of([2 * window] * 8))) / USABLE + GIB
    assert window < bounded(0.8) < bounded(1) == bounded(4) == 2 * window
    assert bounded(0.1) == window  # which training refuses
    assert bounded(0.8, PIPELINE + f"max_length = {window + 4096}\n") == window + 4096
    # Without a device but the CPU there is nothing to fill, but where its memory is said.
    on_cpu = PIPELINE.replace("h100_roce", "cpu")
    assert loaded(on_cpu).longest_micro_batch == 2 * window
    assert bounded(0.1, on_cpu) == window


@pytest.mark.parametrize(
    "text",
    [
        PIPELINE.replace("[parallelism]", '[parallelism]\npipeline_parallel_schedule = "LoopedBFS"'),
        'base = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"',
    ],
    ids=["schedule", "experts"],
)
def test_what_is_not_known_is_not_refused(loaded, text):
    check_memory(loaded(text), 1)


@pytest.mark.parametrize(
    "base",
    [
        "llama3_debug",
        *(f"torchtitan.models.qwen3.config_registry:qwen3_{size}" for size in ("moe_debug", "0_6b")),
    ],
    ids=["dense", "experts", "tied"],
)
def test_the_weights_are_those_of_the_model(base):
    model = base_config(base).model_spec.model
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in model.build().parameters())
    shape = model_shape(model)
    # Not counted: routers, and norms of queries and keys.
    assert rank_parameters(shape, [shape.layers], [0]) == pytest.approx(weights, rel=5e-3)


def test_a_gpu_that_no_cluster_knows_counts_with_its_own_memory(loaded, monkeypatch):
    gpu = "NVIDIA RTX A6000", 48 * GIB
    monkeypatch.setattr("wlb_titan.runtime.job.gpu_at_hand", lambda device: gpu)
    own, named = loaded(PIPELINE.replace('wlb.cluster = "h100_roce"', "")), loaded(PIPELINE)
    assert (own.cluster.memory, named.cluster.memory) == (48 * GIB, load_cluster("h100_roce").memory)
    assert own.overlap and "RTX A6000" in own.cluster.name
