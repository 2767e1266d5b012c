"""Gradients do not depend on how documents were packed, as long as none is cut."""

import numpy as np
import pytest

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

import torch  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss  # noqa: E402

from wlb_titan.config.settings import CorpusSettings  # noqa: E402
from wlb_titan.corpus.prepare import prepare_corpus  # noqa: E402
from wlb_titan.corpus.settings import PrepareSettings  # noqa: E402
from wlb_titan.job import Job  # noqa: E402
from wlb_titan.packing import POLICIES  # noqa: E402
from wlb_titan.plan import LENGTH  # noqa: E402
from wlb_titan.runtime.attention.module import DocumentMask  # noqa: E402
from wlb_titan.runtime.data.dataloader import PlannedDataLoader  # noqa: E402
from wlb_titan.runtime.data.inputs import to_device  # noqa: E402
from wlb_titan.runtime.job import model_shape  # noqa: E402
from wlb_titan.runtime.models.variants import llama_spec  # noqa: E402

pytestmark = pytest.mark.slow

WINDOW = 128
EQUAL = [32] * 16
RAGGED = [2, 3, 5, 7, 9, 14, 17, 22, 25, 31, 33, 40, 47, 51, 61, 63, 65, 17]
assert sum(EQUAL) == sum(RAGGED) == 4 * WINDOW


def make_corpus(folder, lengths):
    """Documents of exactly these lengths: without merges a token is a byte, and one more ends it."""
    folder.mkdir()
    texts = folder / "texts"
    texts.mkdir()
    random = np.random.default_rng(0)
    for index, length in enumerate(lengths):
        letters = random.integers(ord("a"), ord("z") + 1, size=length - 1)
        (texts / f"{index:02d}.txt").write_text("".join(map(chr, letters)))
    corpus = prepare_corpus(PrepareSettings(source=f"text:{texts}", vocab_size=257), folder / "corpus")
    assert sorted(np.asarray(corpus.lengths)) == sorted(lengths)
    return corpus


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = llama_spec("debug").model.build()
    with torch.no_grad():
        model.init_weights()
    return model


def gradients(model, corpus, packing, window: int, micro_batches: int):
    """Loss and gradients of the first step, accumulated over its micro-batches."""
    config = PlannedDataLoader.Config(
        corpus=CorpusSettings(path=str(corpus.path)),
        job=Job(
            window=window,
            micro_batches=micro_batches,
            model=model_shape(model.config),
            packing=packing,
            dtype="float32",
        ),
    )
    loader = PlannedDataLoader(config, dp_world_size=1, dp_rank=0)
    step = next(iter(loader))
    loader.close()
    lengths = np.concatenate([m.documents[:, LENGTH] for m in step.plan.micro_batches])
    assert sorted(lengths) == sorted(np.asarray(corpus.lengths)), "a document was cut or left out"
    assert step.labels == step.own_labels == sum(int((own != IGNORE_INDEX).sum()) for _, own in step.items)
    model.zero_grad()
    total = 0.0
    for item, own in step.items:
        inputs, labels, extra = to_device(item, own, torch.device("cpu"))
        loss = cross_entropy_loss(model(inputs, **extra), labels) / step.labels
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


CASES = {
    "plain": (POLICIES.configure("plain"), EQUAL),
    "fixed_greedy": (POLICIES.configure("fixed_greedy"), EQUAL),
    "wlb": (POLICIES.configure("wlb", thresholds=[100]), RAGGED),
    "wlb_lazy": (POLICIES.configure("wlb_lazy"), RAGGED),
}


@pytest.mark.parametrize("policy", CASES)
def test_packed_gradients_equal_those_one_by_one(policy, model, tmp_path):
    packing, lengths = CASES[policy]
    corpus = make_corpus(tmp_path / "documents", lengths)
    loss, packed = gradients(model, corpus, packing, WINDOW, 4)
    expected_loss, expected = one_by_one(model, corpus)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in packed.items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradient / scale, expected[name] / scale, rtol=1e-5, atol=1e-5)


def one_by_one(model, corpus):
    """The same documents, each in a sequence of its own."""
    valid = int((np.asarray(corpus.lengths) - 1).sum())
    model.zero_grad()
    total = 0.0
    for row, length in enumerate(np.asarray(corpus.lengths)):
        tokens = torch.from_numpy(corpus.tokens(row).astype(np.int64)).unsqueeze(0)
        labels = torch.full_like(tokens, IGNORE_INDEX)
        labels[:, :-1] = tokens[:, 1:]
        mask = DocumentMask(torch.tensor([[0, length, 0, length]], dtype=torch.int32))
        logits = model(tokens, torch.arange(int(length)).unsqueeze(0), mask)
        loss = cross_entropy_loss(logits, labels) / valid
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}
