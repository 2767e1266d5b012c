"""A configuration that cannot fit its devices is refused with the arithmetic."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import torch  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

from wlb_titan.cost.cluster import load_cluster  # noqa: E402
from wlb_titan.cost.models import rank_parameters  # noqa: E402
from wlb_titan.documents import Documents  # noqa: E402
from wlb_titan.errors import UserError  # noqa: E402
from wlb_titan.memory.fits import USABLE  # noqa: E402
from wlb_titan.memory.rank import Passes  # noqa: E402
from wlb_titan.runtime.agreement import common_cluster  # noqa: E402
from wlb_titan.runtime.job import job_of, model_shape  # noqa: E402
from wlb_titan.runtime.log import tell_beginning  # noqa: E402
from wlb_titan.runtime.memory import (  # noqa: E402
    advise_checkpointing,
    check_memory,
    describe_memory,
    predicted_memory,
)
from wlb_titan.runtime.models.bases import base_config  # noqa: E402
from wlb_titan.runtime.models.load import load_config  # noqa: E402

pytestmark = pytest.mark.slow

GIB = 2**30
DOCUMENTS = Documents(lengths=np.full(64, 256))


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
    ranks = predicted_memory(job, job.window)
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


def test_the_longest_micro_batch_counts_in_the_log(loaded):
    assert loaded(PIPELINE).longest_micro_batch == 32768
    roomy = replace(load_cluster("h100_roce"), memory=200 * GIB)
    job = loaded(PIPELINE).on(roomy)
    assert job.longest_micro_batch == 2 * 32768
    lines = describe_memory(job, DOCUMENTS)
    assert len(lines) == 4 and all("micro-batches of 65536 tokens" in line for line in lines)
    assert loaded(PIPELINE.replace('"wlb"', '"plain"')).on(roomy).longest_micro_batch == 32768


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
    ("text", "what"),
    [
        (
            PIPELINE.replace("[parallelism]", '[parallelism]\npipeline_parallel_schedule = "LoopedBFS"'),
            "LoopedBFS",
        ),
        ('base = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"', "a model with experts"),
    ],
    ids=["schedule", "experts"],
)
def test_what_is_not_known_is_neither_predicted_nor_refused(loaded, text, what):
    job = loaded(text)
    check_memory(job, 1)
    (line,) = describe_memory(job, DOCUMENTS)
    assert line.startswith(f"Memory of {what} is not predicted; `wlb-titan dryrun`")


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


SMALL = """
base = "llama2_550m"
wlb.cluster = "h100_roce"
[training]
seq_len = 8192
local_batch_size = 4
"""


def test_a_run_that_fits_without_checkpointing_is_told_so(loaded):
    small, large = loaded(SMALL), loaded(SMALL.replace("550m", "7b").replace("8192", "131072"))
    (line,) = advise_checkpointing(small)
    assert line.startswith('activation_checkpoint = "none" is predicted to fit: ')
    assert advise_checkpointing(large) == []
    bare = replace(small, memory=replace(small.memory, checkpointing="none"))
    most = max(rank.total for rank in predicted_memory(bare, small.longest_micro_batch))
    assert f"fit: {most / GIB:.2f} of" in line
    assert advise_checkpointing(bare) == []
    tight = small.on(replace(small.cluster, memory=small.cluster.memory / 8))
    assert advise_checkpointing(tight) == []


def test_a_gpu_that_no_cluster_knows_counts_with_its_own_memory(loaded, monkeypatch):
    gpu = "NVIDIA RTX A6000", 48 * GIB
    monkeypatch.setattr("wlb_titan.runtime.job.gpu_at_hand", lambda device: gpu)
    own, named = loaded(PIPELINE.replace('wlb.cluster = "h100_roce"', "")), loaded(PIPELINE)
    assert (own.cluster.memory, named.cluster.memory) == (48 * GIB, load_cluster("h100_roce").memory)
    assert own.overlap and "RTX A6000" in own.cluster.name


H100, MIG = "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"


@pytest.mark.parametrize(
    ("gpus", "memory", "words"),
    [
        ([(H100, 79)] * 2, 79, []),
        ([(H100, 79), (MIG, 40)], 40, ["MIG", "40.0 GiB"]),
        ([(H100, 79), ("NVIDIA H200", 139)], 79, ["HBM3 and NVIDIA H200:", "is H100", "[wlb] cluster"]),
        ([(H100, 79), ("NVIDIA L40S", 44)], 44, ["HBM3 and NVIDIA L40S:", "44.0 GiB"]),
        ([("NVIDIA GH200 480GB", 95), ("NVIDIA GH200 480GB", 94)], 94, ["GH200", "[wlb] cluster"]),
    ],
    ids=["same", "part", "other", "older", "unknown"],
)
def test_different_gpus_are_planned_for_as_rank_0_s_with_the_least_memory(gpus, memory, words):
    cluster, warning = common_cluster([(name, gib * GIB) for name, gib in gpus])
    assert cluster.memory == memory * GIB and (gpus[0][0] != H100 or cluster.gpus_per_node == 8)
    assert bool(warning) == bool(words) and all(word in warning for word in words)


def test_a_rank_that_logs_nothing_plans_nothing_to_tell_of(caplog):
    caplog.set_level(logging.WARNING)
    tell_beginning(None, None, None, None)
