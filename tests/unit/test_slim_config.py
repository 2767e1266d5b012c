"""A configuration with `slim`: what cannot run is refused by its key, and memory bounds what is in flight."""

import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

GIB = 2**30
PIPELINE = """
base = "llama2_7b"
[training]
seq_len = 32768
local_batch_size = 8
[parallelism]
pipeline_parallel_degree = 4
data_parallel_shard_degree = 1
pipeline_parallel_schedule = "1F1B"
[wlb.packing]
policy = "slim"
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a TOML file, and the ranks' parallel dimensions for it."""
    from torchtitan.distributed import ParallelDims

    from wlb_titan.runtime.load import load_config

    def load(text):
        path = tmp_path_factory.mktemp("slim") / "train.toml"
        path.write_text(text)
        config = load_config(path).config
        return config, ParallelDims.from_config(config.parallelism, 4)

    return load


def test_memory_bounds_the_tokens_in_flight(load):
    from wlb_titan.memory.peak import USABLE
    from wlb_titan.runtime.memory import bound_length, describe_memory, predicted_memory

    config, dims = load(PIPELINE)
    whole_step = max(rank.total for rank in predicted_memory(config, dims, 8 * 32768))
    device = whole_step * 0.8 // GIB * GIB
    bound_length(config, dims, device)
    most = config.wlb.packing.slim.tokens_in_flight
    assert 32768 <= most < 8 * 32768

    def fits(tokens):
        return max(rank.total for rank in predicted_memory(config, dims, tokens)) <= USABLE * device

    assert fits(most) and not fits(most + 64)
    (line, *_) = describe_memory(config, dims)
    assert f"{most} tokens of one document in flight" in line and "cache" in line


def test_a_document_that_fits_in_no_order_is_refused(load):
    from wlb_titan.errors import UserError
    from wlb_titan.runtime.memory import bound_length

    config, dims = load(PIPELINE)
    with pytest.raises(UserError, match=r"seq_len: A document of 32,768 tokens has all of its slices"):
        bound_length(config, dims, 30 * GIB)


@pytest.mark.parametrize(
    "change, message",
    [
        ("[wlb.packing.slim]\nmicropacks = 3", "wlb.packing.slim: .*fewer than the 4 pipeline stages"),
        ("[wlb.packing.slim]\nslack = -1", "wlb.packing.slim: .*must not be negative"),
        ('[wlb.packing.slim]\nsolver = "exact"', 'solver = "exact": expected one of "greedy"'),
        ("ZBVZeroBubble", "wlb.packing.slim: .*ZBVZeroBubble, in whose order"),
    ],
)
def test_what_cannot_run_is_refused_by_its_key(load, change, message):
    from wlb_titan.errors import UserError

    text = PIPELINE.replace("1F1B", change) if change.startswith("ZBV") else PIPELINE + change
    with pytest.raises(UserError, match=message):
        load(text + ('\n[activation_checkpoint]\nclass = "FullAC"' if change.startswith("ZBV") else ""))


def test_a_dry_run_says_that_it_cannot(tmp_path):
    from click.testing import CliRunner

    from wlb_titan.commands.main import main

    path = tmp_path / "train.toml"
    path.write_text(PIPELINE)
    result = CliRunner().invoke(main, ["dryrun", str(path)])
    assert result.exit_code != 0
    assert "wlb-titan simulate" in result.output + str(result.exception)
