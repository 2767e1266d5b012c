"""What the loader's thread does ahead of a step."""

import threading

import numpy as np
import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan.config.settings import CorpusSettings  # noqa: E402
from wlb_titan.corpus.synthetic import write_synthetic_corpus  # noqa: E402
from wlb_titan.cost.models import ModelShape  # noqa: E402
from wlb_titan.job import Job  # noqa: E402
from wlb_titan.packing import POLICIES  # noqa: E402
from wlb_titan.runtime.data.dataloader import PlannedDataLoader  # noqa: E402

MODEL = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, feed_forward=16, vocabulary=256)


@pytest.mark.parametrize("policy", ["plain", "slim"])
def test_orders_of_passes_are_lowered_in_the_planners_thread(policy, tmp_path):
    write_synthetic_corpus(tmp_path / "corpus", np.full(64, 256))
    job = Job(model=MODEL, window=256, micro_batches=4, packing=POLICIES.configure(policy), dtype="float32")
    config = PlannedDataLoader.Config(corpus=CorpusSettings(path=str(tmp_path / "corpus")), job=job)
    loader = PlannedDataLoader(config, dp_world_size=1, dp_rank=0)
    lowered = []
    loader.lower = lambda flow: lowered.append((flow, threading.current_thread().name.split("_")[0]))
    step = next(iter(loader))
    loader.close()
    if policy == "plain":
        assert step.flow is None and not lowered
    else:
        assert lowered[0] == (step.flow, "planner")
