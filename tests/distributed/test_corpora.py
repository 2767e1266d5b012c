"""Training on corpora as other tools write them, and on mixtures of them."""

import warnings

import datasets
import pytest
import torch
from lab import going_on, layout

from wlb_titan.corpus import Corpus

STEPS = ("--training.steps", "6", "--wlb.policy", "wlb_lazy")


@pytest.fixture(scope="module")
def corpora(lab, tmp_path_factory):
    """The lab's corpus in the forms of other tools, written by them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of extensions that Megatron would like to have
        from datatrove.pipeline.tokens.tokenizer import TokenizedFile
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    folder = tmp_path_factory.mktemp("corpora")
    corpus = Corpus.open(lab.corpus)
    documents = [corpus.tokens(row).tolist() for row in range(len(corpus))]
    megatron = IndexedDatasetBuilder(str(folder / "megatron.bin"))
    trove = TokenizedFile(str(folder / "datatrove"), "00000.ds")
    for document in documents:
        megatron.add_item(torch.tensor(document))
        megatron.end_document()
        trove.write(document, None)
    megatron.finalize(str(folder / "megatron.idx"))
    trove.close()
    dataset = datasets.Dataset.from_dict({"input_ids": documents})
    dataset.save_to_disk(folder / "hugging_face", num_shards=3)
    return folder


def test_losses_are_those_of_the_prepared_corpus(lab, corpora):
    others = [corpora / name for name in ("megatron", "datatrove", "hugging_face")]
    experiments = [lab.experiment("prepared", *STEPS)]
    experiments += [lab.experiment(other.name, *STEPS, *lab.reading(other)) for other in others]
    lab.run(1, experiments)
    losses = [experiment.losses() for experiment in experiments]
    assert len(losses[0]) == 6
    assert losses[1:] == [losses[0]] * 3


def test_ids_beyond_the_vocabulary_end_before_training(lab, tmp_path):
    datasets.Dataset.from_dict({"input_ids": [[5, 6], [7, 500, 7]]}).save_to_disk(tmp_path / "d")
    experiment = lab.experiment("beyond", *lab.reading(tmp_path / "d"))
    with pytest.raises(AssertionError, match=r"Document 1 .* has the token id 500"):
        lab.run(1, [experiment])
    assert not (experiment.folder / "metrics.jsonl").exists()


def test_a_mixture_goes_on_from_a_checkpoint_on_two_processes(lab, corpora):
    trove, megatron = corpora / "datatrove", corpora / "megatron"
    long = "long_length = 100, long_share = 0.7"
    sources = f'[{{path = "{trove}", name = "trove", weight = 3.0, {long}}}, {{path = "{megatron}"}}]'
    words = (*STEPS, "--wlb.corpus.sources", sources, *lab.reading(None), "--checkpoint.interval", "4")
    whole = lab.experiment("mixture", *words)
    rest = lab.experiment("mixture_rest", *words, *going_on(whole, 4), *layout("dp2"))
    lab.run(1, [whole])
    lab.run(2, [rest])
    assert rest.losses() == pytest.approx(whole.losses()[4:], rel=1e-4)
    before, after = whole.metrics(), rest.metrics()
    for key in ("tokens/trove", "tokens/megatron", "epoch/trove", "epoch/megatron"):
        assert [m[key] for m in after] == [m[key] for m in before[4:]], key
    assert all(m["tokens/trove"] + m["tokens/megatron"] == m["tokens"] for m in before)
