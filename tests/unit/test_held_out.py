"""Documents held out of training, and validated on once; and how many steps an epoch is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.cost.models import ModelShape
from wlb_titan.documents import Documents, Source
from wlb_titan.documents.mixture import Divided, is_held_out
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import ID, LENGTH, START
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.validation import Once

use_cpu_without_accelerator()

from wlb_titan.config.documents import steps_of_epochs  # noqa: E402

MODEL = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, feed_forward=16, vocabulary=256)


def job(policy="plain", micro_batches=4, packing=None):
    packing = packing or POLICIES.configure(policy)
    return Job(model=MODEL, window=64, micro_batches=micro_batches, packing=packing, dtype="float32")


def test_a_document_is_trained_on_or_held_out():
    rows = np.arange(100_000)
    assert is_held_out(rows, 0.01).mean() == pytest.approx(0.01, rel=0.15)
    assert (is_held_out(rows, 0.01) <= is_held_out(rows, 0.02)).all()
    lengths = np.arange(1, 1001)
    trained, validated = (Divided(lengths, 0.3, held_out=held) for held in (False, True))
    assert (trained[0:1000] + validated[0:1000]).tolist() == lengths.tolist()
    assert (trained[np.array([7, 3])] + validated[np.array([7, 3])]).tolist() == [8, 4]
    some = Divided(lengths, 0.3, held_out=True, rows=range(100, 200))
    assert (some[0:1000] > 0).nonzero()[0].tolist() == [
        r for r in range(100, 200) if is_held_out(rows, 0.3)[r]
    ]
    assert not Divided(lengths, 0.3, held_out=True, rows=range(0))[:].any()


def test_what_is_said_of_the_corpus_leaves_out_what_is_held_out():
    lengths = np.full(1000, 10)
    trained = Divided(lengths, 0.3, held_out=False)
    sources = [Source(name=name, documents=500) for name in "ab"]
    head, *of_sources = Documents(lengths=trained, sources=tuple(sources)).describe(64, 640)
    kept = (trained[:] > 0).reshape(2, 500).sum(axis=1)
    assert 0 < kept.sum() < 1000 and f" {kept.sum()} documents, {10 * kept.sum():,} tokens" in head
    for line, documents in zip(of_sources, kept, strict=True):
        assert f"has {documents} documents, {10 * documents:,} tokens" in line


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(0, 200), min_size=4, max_size=60), micro_batches=st.integers(1, 5))
def test_held_out_documents_are_read_once(lengths, micro_batches):
    if max(lengths) < 2 or len(lengths) < micro_batches:
        return
    documents = Documents(lengths=np.array(lengths), seed=None)
    planner = job(micro_batches=micro_batches, packing=Once.Config()).planner(documents)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    labels = 0
    for _ in range(planner.policy.steps):
        plan = planner.next()
        assert len(plan.packs) == micro_batches and plan.longest <= 64
        labels += planner.labels(plan)
        for pack in plan.packs:
            for piece in pack.documents:
                if piece[LENGTH] > 1 or lengths[piece[ID]] == 1 or piece[START] % 64 == 0:
                    seen[piece[ID]][piece[START] : piece[START] + piece[LENGTH]] += 1
    assert all((count >= 1).all() for count in seen)
    assert labels == sum(max(length - 1, 0) for length in lengths)


@pytest.mark.parametrize("policy", ["plain", "fixed_greedy", "wlb_lazy", "slim"])
def test_an_epoch_ends_when_all_was_trained_on(policy):
    lengths = np.random.default_rng(0).integers(2, 90, size=150)
    documents = Documents(lengths=lengths)
    steps = steps_of_epochs(job(policy), documents, 2)
    planner = job(policy).planner(documents)
    missing = [2 * int(lengths.sum())]
    for _ in range(steps):
        pieces = np.concatenate([pack.documents for pack in planner.next().packs])
        missing.append(missing[-1] - int(pieces[pieces[:, ID] < 300, LENGTH].sum()))
    assert missing[-1] == 0 < missing[-2]
