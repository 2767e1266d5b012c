"""What the loader's thread does ahead of a step."""

import threading

import numpy as np
import pytest
import torch

from wlb_titan.config.settings import CorpusSettings
from wlb_titan.corpus.writer import write_synthetic_corpus
from wlb_titan.cost.models import ModelShape
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.runtime.data.dataloader import PlannedDataLoader

pytestmark = pytest.mark.slow

MODEL = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, feed_forward=16, vocabulary=256)


def test_a_shadow_plans_and_trains_nothing(tmp_path):
    lengths = np.random.default_rng(0).integers(2, 257, 64)
    write_synthetic_corpus(tmp_path / "corpus", lengths)
    corpus = CorpusSettings(path=str(tmp_path / "corpus"))

    def loader(packing, shadow=None, state=None):
        job = Job(model=MODEL, window=256, micro_batches=4, packing=packing, dtype="float32")
        config = PlannedDataLoader.Config(corpus=corpus, job=job.trained, shadow=shadow and job)
        made = PlannedDataLoader(config, dp_world_size=1, dp_rank=0)
        if state is not None:
            made.load_state_dict(state)
        return made

    alone, balanced = loader(POLICIES.configure("plain")), loader(POLICIES.configure("wlb_lazy"))
    both = loader(POLICIES.configure("wlb_lazy", shadow=True), shadow=True)
    steps = [iter(one) for one in (alone, balanced, both)]
    for _ in range(2):
        trained, planned, step = (next(one) for one in steps)
        assert all(torch.equal(a[1], b[1]) for a, b in zip(trained.items, step.items, strict=True))
        assert step.shadow.document_lengths.tolist() == planned.plan.document_lengths.tolist()
    resumed = loader(POLICIES.configure("wlb_lazy", shadow=True), shadow=True, state=both.state_dict())
    again, follows = next(iter(resumed)), next(steps[2])
    assert again.shadow.document_lengths.tolist() == follows.shadow.document_lengths.tolist()
    for one in (alone, balanced, both, resumed):
        one.close()


@pytest.mark.parametrize("policy", ["plain", "slim"])
def test_orders_of_passes_are_lowered_in_the_planners_thread(policy, tmp_path):
    write_synthetic_corpus(tmp_path / "corpus", np.full(64, 256))
    job = Job(model=MODEL, window=256, micro_batches=4, packing=POLICIES.configure(policy), dtype="float32")
    config = PlannedDataLoader.Config(corpus=CorpusSettings(path=str(tmp_path / "corpus")), job=job)
    loader = PlannedDataLoader(config, dp_world_size=1, dp_rank=0)
    lowered = []
    steps = loader.steps(lambda flow: lowered.append((flow, threading.current_thread().name.split("_")[0])))
    step = next(steps)
    loader.close()
    if policy == "plain":
        assert step.flow is None and not lowered
    else:
        assert lowered[0] == (step.flow, "planner")
