"""A configuration with `slim`: what cannot run is refused by its key, and memory bounds what is in flight."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

pytestmark = pytest.mark.slow

use_cpu_without_accelerator()

GIB = 2**30
PIPELINE = """
base = "llama2_7b"
wlb.cluster = "h100_roce"
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
    """Loads a TOML file, and gives the job of its configuration."""
    from wlb_titan.runtime.job import job_of, parallel_dims
    from wlb_titan.runtime.models.load import load_config

    def load(text):
        path = tmp_path_factory.mktemp("slim") / "train.toml"
        path.write_text(text)
        config = load_config(path).config
        return job_of(config, parallel_dims(config))

    return load


def on(job, memory):
    return job.on(replace(job.cluster, memory=memory))


def test_memory_bounds_the_tokens_in_flight(load):
    from wlb_titan.documents import Documents
    from wlb_titan.memory.fits import USABLE_IN_SLICES as USABLE
    from wlb_titan.runtime.memory import describe_memory

    job = load(PIPELINE)
    device = max(rank.total for rank in job.fitting.document(8 * 32768)) * 0.8
    job = on(job, device)
    assert 32768 <= job.most_in_flight < 8 * 32768

    def fits(tokens):
        return max(rank.total for rank in job.fitting.document(tokens)) <= USABLE * device

    assert fits(job.most_in_flight) and not fits(job.most_in_flight + 64)
    (line, *_) = describe_memory(job, Documents(lengths=np.full(100, 32768)))
    assert "the most of the first 12 steps" in line and "cache" in line


def test_the_set_number_of_tokens_in_flight_holds(load):
    assert load(PIPELINE + "tokens_in_flight = 40000").most_in_flight == 40000


def test_a_window_is_enough_for_four_stages(load):
    from wlb_titan.errors import UserError

    one = PIPELINE.replace("local_batch_size = 8", "local_batch_size = 1")
    assert load(one).replica_micro_batches == 1
    for refused in (
        one.replace("slim", "plain"),
        one + "[wlb.validation]\nhold_out = 0.1",
    ):  # run it
        with pytest.raises(UserError, match="as many micro-batches as stages, and there are 1 for 4"):
            load(refused)


def test_a_document_that_fits_in_no_order_is_refused(load):
    from wlb_titan.documents import Documents
    from wlb_titan.errors import PlanError, UserError
    from wlb_titan.runtime.memory import check_memory

    job = on(load(PIPELINE), 30 * GIB)
    with pytest.raises(PlanError, match="A document of 32,768 tokens has all of its slices") as error:
        job.planner(Documents(lengths=np.full(100, 32768)))
    assert error.value.setting == "training.seq_len"
    with pytest.raises(UserError, match="with a document of 32768 tokens the prediction is"):
        check_memory(job, 30 * GIB)


@pytest.mark.parametrize(
    "change, message",
    [
        ("micropacks = 3", "wlb.packing.micropacks = 3: 3 MicroPacks are fewer than the 4 pipeline stages"),
        ("slack = -1", "wlb.packing.slack = -1: expected an integer, at least 0"),
        ('solver = "exact"', 'solver = "exact": expected one of "greedy"'),
        ("max_length = 65536", "max_length"),
        (
            "asymmetric = true",
            "wlb.packing.asymmetric = true: .* 4 pipeline ranks and selective checkpointing",
        ),
        ('dp_merge = "no"', 'dp_merge = "no": expected true or false or one of "auto"'),
        (
            'dp_merge = true\n[wlb.sharding]\npolicy = "ulysses"',
            "wlb.packing.dp_merge = true: Data-parallel ranks cannot share .* ulysses, which",
        ),
        ("ZBVZeroBubble", "pipeline_parallel_schedule = .*ZBVZeroBubble, in whose order"),
    ],
)
def test_what_cannot_run_is_refused_by_its_key(load, change, message):
    from wlb_titan.errors import UserError

    text = PIPELINE.replace("1F1B", change) if change.startswith("ZBV") else PIPELINE + change
    if "ulysses" in change:
        text = text.replace("[wlb.packing]", "context_parallel_degree = 2\n[wlb.packing]")
    with pytest.raises(UserError, match=message):
        load(text + ('\n[activation_checkpoint]\nclass = "FullAC"' if change.startswith("ZBV") else ""))


def test_packs_of_their_own_for_backward_passes_take_the_place_of_full_checkpointing(load):
    full = '\n[activation_checkpoint]\nclass = "FullAC"'
    assert load(PIPELINE + "asymmetric = true" + full).packing.regroups
    assert not load(PIPELINE + full).packing.regroups
