"""Training on corpora as other tools write them, in a mixture; test_dataloader.py has their labels."""

import datasets
import numpy as np
import pytest
from corpora import write_datatrove, write_megatron
from lab import going_on, layout

from wlb_titan.corpus import Corpus

STEPS = ("--training.steps", "6", "--wlb.policy", "wlb_lazy")


def test_ids_beyond_the_vocabulary_end_before_training(lab, tmp_path):
    datasets.Dataset.from_dict({"input_ids": [[5, 6], [7, 500, 7]]}).save_to_disk(tmp_path / "d")
    experiment = lab.experiment("beyond", *lab.reading(tmp_path / "d"))
    with pytest.raises(AssertionError, match=r"Document 1 .* has the token id 500"):
        lab.run(1, [experiment])
    assert not (experiment.folder / "metrics.jsonl").exists()


def test_a_mixture_goes_on_from_a_checkpoint_on_two_processes(lab, tmp_path):
    corpus = Corpus.open(lab.corpus)
    documents = [corpus.tokens(row).tolist() for row in range(len(corpus))]
    trove = write_datatrove(tmp_path / "00000.ds", documents)
    megatron = write_megatron(tmp_path / "megatron", documents, np.uint16)
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
