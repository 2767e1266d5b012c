"""What a job with label masks is promised before it starts: something to learn, and whole conversations."""

import json
import re

import numpy as np
import pytest
from commands import CONFIGS, invoke, said
from corpora import write_megatron, write_prepared
from planning import LARGER

from wlb_titan.config.documents import documents_of, validated_documents
from wlb_titan.config.settings import CorpusSettings
from wlb_titan.corpus import Corpus
from wlb_titan.documents.mixture import is_held_out
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.plan import START
from wlb_titan.prepare.tokenizer import train_tokenizer
from wlb_titan.runtime.checks import validate_corpus
from wlb_titan.runtime.models.bases import base_config

pytestmark = pytest.mark.slow

DOCUMENTS = [[5, 6, 7]] * 64
MASKS = [[0, 1, 1]] * 64


@pytest.mark.parametrize("name", ["sft_llama3_8b_8gpu", "sft_qwen3_0_6b_1gpu"])
@pytest.mark.parametrize("window", [2048, 8192])
def test_the_files_for_fine_tuning_cut_no_conversation_that_fits(tmp_path, name, window):
    lengths = np.random.default_rng(0).integers(32, 198, 300)
    np.savetxt(tmp_path / "lengths", [*lengths, window], fmt="%d")
    words = ("--lengths", tmp_path / "lengths", "--steps", 12, "--training.seq_len", window)
    said("plan", CONFIGS / f"{name}.toml", *words, "--output", tmp_path / "plan.jsonl")
    steps = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    pieces = [piece for step in steps for batch in step["micro_batches"] for piece in batch["documents"]]
    assert len(pieces) > 1000 and not [piece for piece in pieces if piece["start"]]


@pytest.mark.parametrize(("mask", "may_cut", "cut"), [
    ("auto", "auto", False), ("none", "auto", True), ("auto", True, True), ("none", False, False)
])  # fmt: skip
def test_a_corpus_with_masks_is_not_cut_for_balance(tmp_path, mask, may_cut, cut):
    lengths = np.random.default_rng(0).integers(32, 198, 300)
    rows = [[1] * length for length in lengths]
    settings = CorpusSettings(path=str(write_prepared(tmp_path / "c", rows, rows)), mask=mask)
    packing = POLICIES.configure("wlb_lazy", may_cut=may_cut, cost_model="quadratic:0,1")
    job = Job(model=LARGER, window=512, micro_batches=8, packing=packing, dtype="float32")
    planner = job.planner(documents_of(settings, Corpus.open(settings.path, mask=mask)))
    packs = [pack for _ in range(20) for pack in planner.next().packs]
    assert any(pack.documents[:, START].any() for pack in packs) == cut


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Corpora and masks to be refused, and others, with the folder `tokenizer`."""
    folder = tmp_path_factory.mktemp("places")
    train_tokenizer(["some words to train on"], 300, folder / "tokenizer")
    write_megatron(folder / "good", DOCUMENTS, np.uint16)
    write_megatron(folder / "zeros", [[1, 0, 0]] * 64, np.uint8)
    held_out = is_held_out(np.arange(64), 0.2)
    unheld = [[0, 0, 0] if held else mask for held, mask in zip(held_out, MASKS, strict=True)]
    write_megatron(folder / "unheld", unheld, np.uint8)
    write_megatron(folder / "beyond", [*DOCUMENTS, [5, 999]], np.uint16)
    write_prepared(folder / "p", DOCUMENTS)
    return folder


REFUSED = {
    "wlb.corpus.path = good": "",
    "wlb.corpus.path = good; wlb.corpus.mask = unheld": "",
    "wlb.corpus.path = good; wlb.corpus.mask = zeros": "wlb.corpus.path.*no token of these documents",
    "wlb.corpus.path = good; wlb.corpus.mask = unheld; wlb.validation.hold_out = 0.2": (
        "wlb.validation.hold_out.*no token"
    ),
    "wlb.corpus.path = good; wlb.validation.path = good; wlb.validation.mask = zeros": (
        "wlb.validation.path.*no token"
    ),
    "wlb.corpus.path = good; wlb.validation.path = p": "tokenizer.*was not made with the tokenizer",
    "wlb.corpus.path = good; wlb.validation.path = beyond": "wlb.validation.path.*token id 999",
}


@pytest.mark.parametrize("written", REFUSED)
def test_config_check_refuses_what_cannot_be_learned(places, tmp_path, monkeypatch, written):
    monkeypatch.chdir(places)
    lines = [line.replace("= ", '= "') + '"' for line in written.split("; ")]
    lines = [line.replace('"0.2"', "0.2") for line in ['base = "llama3_debug"', *lines]]
    lines += ["training.seq_len = 64", "training.steps = 2", 'wlb.corpus.tokenizer = "tokenizer"']
    lines += [f'dump_folder = "{tmp_path / "run"}"']
    (tmp_path / "t.toml").write_text("\n".join(lines))
    result = invoke("config", "check", tmp_path / "t.toml")
    assert result.exit_code == (2 if REFUSED[written] else 0), result.output
    assert result.stderr.count("\n") <= 1
    if REFUSED[written]:
        assert re.search(REFUSED[written], result.stderr), result.stderr


def test_another_corpus_for_validation_is_opened_once(places, monkeypatch):
    """For all that is checked; training takes the corpora that were checked."""
    opened, open_corpus = [], Corpus.open
    monkeypatch.setattr(Corpus, "open", lambda path, **how: opened.append(path) or open_corpus(path, **how))
    config = base_config("llama3_debug")
    config.wlb.corpus = CorpusSettings(path=str(places / "good"), tokenizer=str(places / "tokenizer"))
    config.wlb.validation.path = str(places / "unheld")
    corpus = validate_corpus(config)
    assert len(validated_documents(config.wlb, corpus)[1]) == 1
    assert opened == [config.wlb.corpus.path, config.wlb.validation.path]
