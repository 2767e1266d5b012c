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
    from wlb_titan.memory.fits import USABLE_IN_SLICES as USABLE

    assert load(PIPELINE + "tokens_in_flight = 40000").most_in_flight == 40000
    job = load(PIPELINE)
    device = max(rank.total for rank in job.fitting.document(8 * 32768)) * 0.8
    job = on(job, device)
    assert 32768 <= job.most_in_flight < 8 * 32768

    def fits(tokens):
        return max(rank.total for rank in job.fitting.document(tokens)) <= USABLE * device

    assert fits(job.most_in_flight) and not fits(job.most_in_flight + 64)


def test_a_window_is_enough_for_four_stages(load):
    from wlb_titan.errors import UserError

    one = PIPELINE.replace("local_batch_size = 8", "local_batch_size = 1")
    assert load(one).replica_micro_batches == 1
    for refused in (one.replace("slim", "plain"), one + "[wlb.validation]\nhold_out = 0.1"):
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


def test_packs_of_their_own_for_backward_passes_take_the_place_of_full_checkpointing(load):
    full = '\n[activation_checkpoint]\nclass = "FullAC"'
    assert load(PIPELINE + "asymmetric = true" + full).packing.regroups
    assert not load(PIPELINE + full).packing.regroups
