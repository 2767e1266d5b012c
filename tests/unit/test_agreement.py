"""What all ranks settle at the start: how long they wait for one another, and the hardware planned for."""

import dataclasses
from copy import deepcopy

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from torchtitan.distributed import ParallelDims  # noqa: E402

from wlb_titan.packing import POLICIES  # noqa: E402
from wlb_titan.runtime import agreement  # noqa: E402
from wlb_titan.runtime.job import job_of  # noqa: E402
from wlb_titan.runtime.models.bases import base_config  # noqa: E402

pytestmark = pytest.mark.slow


def timeout(config):
    config.wlb.cluster = "h100_roce"
    return agreement.timeout(config, job_of(config, ParallelDims.from_config(config.parallelism, 1)))


@pytest.fixture
def config():
    return deepcopy(base_config("llama2_7b"))


def test_a_small_job_keeps_the_default():
    assert timeout(base_config("llama3_debug")) == 300


def test_a_long_step_is_waited_for_and_longer_micro_batches_for_longer(config):
    config.training = dataclasses.replace(config.training, seq_len=2**20, local_batch_size=16)
    seconds = timeout(config)
    assert seconds > 300
    config.wlb.packing = POLICIES.configure("wlb", max_length=3 * config.training.seq_len)
    assert timeout(config) == pytest.approx(3 * seconds, rel=0.01)


def test_compiling_and_solving_are_added_but_not_to_the_user_s_bound(config):
    plain = timeout(config)
    config.compile.enable = True
    compiled = timeout(config)
    config.wlb.packing = POLICIES.configure("fixed_solver", time_limit=30.0)
    assert compiled - plain >= 300 and timeout(config) - compiled == 30
    config.comm.train_timeout_seconds = 7
    assert timeout(config) == 7


H100, MIG = "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"


@pytest.mark.parametrize(
    ("gpus", "memory", "words"),
    [
        ([(H100, 79)] * 2, 79, []),
        ([(H100, 79), (MIG, 40)], 40, ["MIG", "40.0 GiB"]),
        ([(H100, 79), ("NVIDIA H200", 139)], 79, ["HBM3 and NVIDIA H200:", "is H100", "[wlb] cluster"]),
        ([("NVIDIA GH200 480GB", 95), ("NVIDIA GH200 480GB", 94)], 94, ["GH200", "[wlb] cluster"]),
    ],
    ids=["same", "part", "other", "unknown"],
)
def test_different_gpus_are_planned_for_as_rank_0_s_with_the_least_memory(gpus, memory, words):
    cluster, warning = agreement.common_cluster([(name, gib * 2**30) for name, gib in gpus])
    assert cluster.memory == memory * 2**30 and (gpus[0][0] != H100 or cluster.gpus_per_node == 8)
    assert bool(warning) == bool(words) and all(word in warning for word in words)
