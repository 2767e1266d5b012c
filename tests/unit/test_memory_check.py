"""A configuration that cannot fit its devices is refused with the arithmetic."""

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

GIB = 2**30


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Loads a TOML file, and the ranks' parallel dimensions for it."""
    from torchtitan.distributed import ParallelDims

    from wlb_titan.runtime.load import load_config

    def load(text):
        path = tmp_path_factory.mktemp("memory") / "train.toml"
        path.write_text(text)
        config = load_config(path).config
        return config, ParallelDims.from_config(config.parallelism, 4)

    return load


PIPELINE = """
base = "llama2_7b"
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
    from wlb_titan.errors import UserError
    from wlb_titan.runtime.memory import check_memory, predicted_memory

    config, dims = loaded(PIPELINE)
    ranks = predicted_memory(config, dims, [config.training.seq_len] * 8)
    most = max(ranks, key=lambda rank: rank.total)
    assert [rank.layers for rank in ranks] == [8, 9, 8, 7]
    check_memory(config, dims, most.total)
    with pytest.raises(UserError) as error:
        check_memory(config, dims, most.total - GIB // 10)
    message = str(error.value)
    assert f"pipeline rank {most.rank}: {most.total / GIB:.2f} GiB" in message
    assert "activations" in message and "optimizer" in message and "\n" not in message


def test_the_longest_micro_batch_counts_in_the_log(loaded):
    from wlb_titan.runtime.memory import describe_memory, longest_micro_batch

    config, dims = loaded(PIPELINE)
    assert longest_micro_batch(config) == 2 * 32768
    lines = describe_memory(config, dims)
    assert len(lines) == 4 and all("micro-batches of 65536 tokens" in line for line in lines)
    plain, dims = loaded(PIPELINE.replace('"wlb"', '"plain"'))
    assert longest_micro_batch(plain) == 32768


def test_the_default_of_max_length_is_what_is_predicted_to_fit(loaded):
    from wlb_titan.memory.peak import USABLE
    from wlb_titan.runtime.memory import bound_length, longest_micro_batch, predicted_memory

    def bounded(device_bytes, text=PIPELINE):
        config, dims = loaded(text)
        bound_length(config, dims, device_bytes)
        return longest_micro_batch(config)

    config, dims = loaded(PIPELINE)
    window = config.training.seq_len
    enough = max(rank.total for rank in predicted_memory(config, dims, [2 * window] * 8)) / USABLE + GIB
    assert bounded(enough) == bounded(4 * enough) == 2 * window
    between = bounded(0.8 * enough)
    assert window < between < 2 * window
    assert max(rank.total for rank in predicted_memory(config, dims, [between] * 8)) <= USABLE * 0.8 * enough
    assert bounded(0.8 * enough + GIB / 1e4) == between  # devices of one kind come to the same
    user = PIPELINE + f"max_length = {window + 4096}\n"
    assert bounded(0.8 * enough, user) == window + 4096
    assert bounded(0.8 * enough, PIPELINE.replace('"wlb"', '"plain"')) == window


def test_a_schedule_that_the_planner_does_not_know_is_not_predicted(loaded):
    from wlb_titan.runtime.memory import check_memory, describe_memory

    schedule = '[parallelism]\npipeline_parallel_schedule = "LoopedBFS"'
    config, dims = loaded(PIPELINE.replace("[parallelism]", schedule))
    check_memory(config, dims, 1)
    (line,) = describe_memory(config, dims)
    assert line.startswith("Memory of LoopedBFS is not predicted; `wlb-titan dryrun`")


def test_memory_of_experts_is_not_predicted(loaded):
    from wlb_titan.runtime.memory import check_memory, describe_memory

    config, dims = loaded('base = "torchtitan.models.qwen3.config_registry:qwen3_moe_debug"')
    check_memory(config, dims, 1)
    (line,) = describe_memory(config, dims)
    assert line.startswith("Memory of a model with experts is not predicted; `wlb-titan dryrun`")
