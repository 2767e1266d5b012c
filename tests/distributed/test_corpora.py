"""Training on corpora as other tools write them, and on mixtures of them."""

import json

import datasets
import numpy as np
import pytest
from corpora import write_datatrove, write_megatron
from lab import going_on, layout

from wlb_titan.corpus import Corpus
from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus

STEPS = ("--training.steps", "6", "--wlb.policy", "wlb_lazy")


def write_forms(folder, corpus):
    """The corpus in the forms of other tools, written by them, with its mask if it has one."""
    documents = [corpus.tokens(row).tolist() for row in range(len(corpus))]
    masks = [corpus.learned(row, 0, len(tokens)).astype(int).tolist() for row, tokens in enumerate(documents)]
    write_megatron(folder / "megatron", documents, np.uint16)
    write_megatron(folder / "mask", masks, np.uint16)
    (folder / "datatrove").mkdir()
    write_datatrove(folder / "datatrove" / "00000.ds", documents, masks=masks if corpus.masked else None)
    columns = {"input_ids": documents, **({"completion_mask": masks} if corpus.masked else {})}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "hugging_face", num_shards=3)
    return folder


@pytest.fixture(scope="module")
def corpora(lab, tmp_path_factory):
    return write_forms(tmp_path_factory.mktemp("corpora"), Corpus.open(lab.corpus))


def test_first_losses_of_masked_corpora_are_those_of_the_prepared_conversations(lab, tmp_path):
    """Of which only the assistant's words are learned."""
    with (tmp_path / "chat.jsonl").open("w") as file:
        for number in range(1, 300):
            chat = [("user", f"{number} + {number}? " * (number % 7))]
            chat.append(("assistant", f"It is {2 * number}. " * 5))
            messages = [{"role": role, "content": content or "?"} for role, content in chat]
            file.write(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    own = {"tokenizer": str(lab.corpus / "tokenizer"), "chat_template": str(tmp_path / "t.jinja")}
    settings = PrepareSettings(source=f"jsonl:{tmp_path / 'chat.jsonl'}", chat=True, **own)
    corpus = prepare_corpus(settings, tmp_path / "prepared")
    write_forms(tmp_path, corpus)
    words, masked = ("--training.steps", "1"), ("--wlb.corpus.mask", str(tmp_path / "mask"))
    names = {"megatron": masked, "datatrove": (), "hugging_face": ()}
    experiments = [lab.experiment("chat", *words, "--wlb.corpus.path", str(corpus.path))]
    for name, more in names.items():
        experiments.append(lab.experiment(f"chat_{name}", *words, *lab.reading(tmp_path / name), *more))
    unmasked = (*lab.reading(corpus.path), "--wlb.corpus.mask", "none")
    experiments.append(lab.experiment("chat_unmasked", *words, *unmasked))
    lab.run(1, experiments)
    prepared, *others, unmasked = (experiment.losses() for experiment in experiments)
    assert len(prepared) == 1 and others == [prepared] * 3
    assert unmasked != prepared


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
