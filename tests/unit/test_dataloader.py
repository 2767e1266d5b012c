"""What the loader's thread does ahead of a step."""

import threading
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from corpora import write_datatrove, write_megatron, write_prepared
from planning import LARGER

from wlb_titan.config.documents import documents_of, open_corpus
from wlb_titan.config.settings import CorpusSettings
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import ROW
from wlb_titan.prepare.prepare import write_synthetic_corpus
from wlb_titan.runtime.dataloader import PlannedDataLoader

pytestmark = pytest.mark.slow

DOCUMENTS = [[5, 6, 7, 8], [9, 255, 1], [2] * 20, [156, 4, 3]]
MASKS = [[1, 0, 1, 0], [1, 1, 1], [0, 1] * 10, [0, 0, 1]]


def write_dataset(path, kind):
    lists = datasets.List(datasets.Value(kind))
    features = datasets.Features({"input_ids": lists, "loss_mask": lists})
    columns = {"input_ids": DOCUMENTS, "loss_mask": MASKS}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(path)
    return {"path": str(path)}


def write_masked_megatron(path, dtype):
    mask = write_megatron(path / "mask", MASKS, np.uint8)
    return {"path": str(write_megatron(path / "m", DOCUMENTS, dtype)), "mask": str(mask)}


FORMS = [
    (lambda path, _: {"path": str(write_prepared(path / "p", DOCUMENTS, MASKS))}, "int32"),
    *((write_dataset, kind) for kind in ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")),
    *((lambda at, n: {"path": str(write_datatrove(at / "a.ds", DOCUMENTS, n, MASKS))}, n) for n in (2, 4)),
    *((write_masked_megatron, dtype) for dtype in (np.uint8, np.uint16, np.int16, np.int32, np.int64)),
]


def loading(job, settings):
    """The loader of a job's only rank."""
    corpus = open_corpus(settings)
    config = PlannedDataLoader.Config(corpus=corpus, documents=documents_of(settings, corpus), job=job)
    return PlannedDataLoader(config)


@pytest.mark.parametrize(("write", "kind"), FORMS)
def test_inputs_and_labels_are_those_of_the_corpus_in_every_form_and_dtype(tmp_path, write, kind):
    """The next token where that is learned, -100 elsewhere: what torch's cross-entropy reads."""
    job = Job(model=LARGER, window=30, micro_batches=1, packing=POLICIES.configure("plain"), dtype="float32")
    loader = loading(job, CorpusSettings(**write(tmp_path, kind)))
    step = next(iter(loader))
    loader.close()
    inputs, labels, rows = step.items[0].inputs, step.items[0].labels, step.plan.documents[:, ROW]
    expected = []
    for tokens, mask in zip(DOCUMENTS, MASKS, strict=True):
        expected.append([*np.where(mask[1:], tokens[1:], -100), -100])
    assert inputs.tolist() == [list(chain(*(DOCUMENTS[row] for row in rows)))]
    assert labels.tolist() == [list(chain(*(expected[row] for row in rows)))]
    assert labels.dtype == torch.int64 and step.labels == int((labels != -100).sum())


@pytest.mark.parametrize("policy", ["plain", "slim"])
def test_orders_of_passes_are_lowered_in_the_planners_thread(policy, tmp_path):
    write_synthetic_corpus(tmp_path / "corpus", np.full(64, 256))
    job = Job(model=LARGER, window=256, micro_batches=4, packing=POLICIES.configure(policy), dtype="float32")
    loader = loading(job, CorpusSettings(path=str(tmp_path / "corpus")))
    lowered = []
    steps = loader.steps(lambda flow: lowered.append((flow, threading.current_thread().name.split("_")[0])))
    step = next(steps)
    loader.close()
    if policy == "plain":
        assert step.flow is None and not lowered
    else:
        assert lowered[0] == (step.flow, "planner")
