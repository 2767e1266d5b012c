"""Reading a corpus, whichever tool wrote it: `wlb-titan prepare`, `datasets`, Megatron, datatrove."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import corpora
import datasets
import numpy as np
import pytest
from corpora import DOCUMENTS, MASKS, content, write_megatron, write_prepared
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.corpus.shards import Lengths
from wlb_titan.prepare import prepare
from wlb_titan.prepare.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(["some words to train on"], 300, folder)
    return folder


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=30), min_size=1, max_size=20).filter(any),
    batch_tokens=st.integers(1, 100),
    data=st.data(),
)
def test_slices_are_those_of_the_documents_written(tmp_path_factory, documents, batch_tokens, data):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prepare, "BATCH_TOKENS", batch_tokens)
        folder = write_prepared(tmp_path_factory.mktemp("c") / "corpus", documents)
    assert datasets.load_from_disk(folder)["input_ids"][:] == documents
    corpus = Corpus.open(folder)
    assert np.asarray(corpus.lengths).tolist() == [len(tokens) for tokens in documents]
    for row, expected in enumerate(documents):
        assert corpus.tokens(row).tolist() == expected
        start = data.draw(st.integers(0, len(expected)))
        length = data.draw(st.integers(0, len(expected) - start))
        found = corpus.tokens(row, start, length)
        assert found.tolist() == expected[start : start + length]
        assert found.dtype == np.int32


@pytest.mark.parametrize("name", ["m", "t.ds", "d", "p"])
def test_slices_are_views_that_outlive_the_corpus_and_cannot_be_written(forms, name):
    corpus = Corpus.open(forms / name)
    document, part = corpus.tokens(3), corpus.tokens(3, 10, 5)
    assert np.shares_memory(document, part)
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    del corpus, document
    assert part.tolist() == [9] * 5


@pytest.mark.parametrize(
    ("row", "start", "length"), [(7, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 4), (0, 3, 1), (0, 4, None)]
)
def test_slices_outside_a_document_are_refused(forms, row, start, length):
    with pytest.raises(IndexError):
        Corpus.open(forms / "p").tokens(row, start, length)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("sentences", [False, True], ids=["documents", "sentences"])
def test_megatrons_builder(tmp_path, dtype, sentences):
    documents = [d for d in DOCUMENTS if d or not sentences]
    written = [[[token] for token in d] for d in documents] if sentences else documents
    prefix = write_megatron(tmp_path / "code_text_document", written, dtype, sequences=sentences)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path):
        corpus = Corpus.open(path)
        assert content(corpus) == documents
        assert corpus.tokens(0).dtype == dtype
        assert np.asarray(corpus.lengths).tolist() == [len(d) for d in documents]
        assert corpus.lengths.sum() == sum(map(len, documents))
    assert corpus.source(1) == "code_text_document.bin[1]"


def test_megatron_documents_of_one_sequence_each_and_others(tmp_path):
    """Without ends of documents each sequence is one, as for Megatron's own GPTDataset; and there may be
    as many documents as sequences, and yet not one each."""
    write_megatron(tmp_path / "no_ends", DOCUMENTS[:2], ends=False)
    assert content(Corpus.open(tmp_path / "no_ends")) == DOCUMENTS[:2]
    write_megatron(tmp_path / "two_none_one", [[[5, 6], [7]], [], [[8]]], sequences=True)
    assert content(Corpus.open(tmp_path / "two_none_one")) == [[5, 6, 7], [], [8]]


@pytest.mark.parametrize("token_size", [2, 4])
def test_datatroves_tokenized_files(tmp_path, token_size):
    corpora.write_datatrove(tmp_path / "00001_x.ds", DOCUMENTS[3:], token_size)
    corpora.write_datatrove(tmp_path / "00000_x.ds", DOCUMENTS[:3], token_size)
    corpus = Corpus.open(tmp_path)
    assert content(corpus) == DOCUMENTS
    assert corpus.tokens(0).dtype.itemsize == token_size
    assert content(Corpus.open(tmp_path / "00001_x.ds")) == DOCUMENTS[3:]
    assert corpus.source(4) == "00001_x.ds[1]"


def test_datatroves_pipeline(tmp_path, tokenizer):
    """Documents through datatrove's own tokenizer and executor, shuffled in each of its files."""
    from datatrove.data import Document
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer

    texts = {f"some words {'to train ' * number}on" for number in range(30)}
    file = str(tokenizer / "tokenizer.json")
    step = DocumentTokenizer(str(tmp_path / "tokens"), file, eos_token="<|endoftext|>", seed=1)
    documents = [Document(text=text, id=text) for text in texts]
    LocalPipelineExecutor([documents, step], logging_dir=str(tmp_path / "log")).run()
    corpus = Corpus.open(tmp_path / "tokens", tokenizer=str(tokenizer))
    assert {corpora.decode(tokenizer, tokens[:-1]) for tokens in content(corpus)} == texts
    assert corpus.tokenizer_path == tokenizer
    corpus.check_sample(corpus.tokenizer.vocab_size)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("large", [False, True])
def test_hugging_face_datasets(tmp_path, kind, large):
    """Of many batches in three files, selected from a larger one."""
    documents = [[row] * (row % 5) for row in range(3000)]
    lists = datasets.LargeList if large else datasets.List
    features = datasets.Features({"id": datasets.Value("string"), "ids": lists(datasets.Value(kind))})
    whole = datasets.Dataset.from_dict({"id": ["a"] * 3000, "ids": documents}, features=features)
    whole.select(range(2999, -1, -2)).save_to_disk(tmp_path / "d", num_shards=3)
    corpus = Corpus.open(tmp_path / "d", column="ids")
    assert content(corpus) == documents[::-2]
    assert corpus.tokens(3).dtype == kind
    with pytest.raises(CorpusError, match="has no column 'input_ids'; it has id, ids"):
        Corpus.open(tmp_path / "d")
    with pytest.raises(CorpusError, match=r"'id' of .* holds string, but must hold a list of integers"):
        Corpus.open(tmp_path / "d", column="id")


def test_a_dataset_of_splits_names_them(tmp_path):
    dataset = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "d")
    with pytest.raises(CorpusError, match=f"name the folder of one, such as {tmp_path / 'd' / 'train'}"):
        Corpus.open(tmp_path / "d")
    assert content(Corpus.open(tmp_path / "d" / "test")) == DOCUMENTS


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=5), st.data())
def test_lengths_of_many_shards_are_those_of_one_array(lengths, data):
    parts = [np.array(part, dtype=np.int64) for part in lengths]
    whole = np.concatenate(parts)
    found = Lengths([SimpleNamespace(documents=len(part), lengths=part.__getitem__) for part in parts])
    assert len(found) == len(whole)
    assert np.asarray(found).tolist() == whole.tolist()
    bounds = st.integers(-3, len(whole) + 3) | st.none()
    part = slice(data.draw(bounds), data.draw(bounds))
    assert found[part].tolist() == whole[part].tolist()
    rows = [row for row in data.draw(st.lists(st.integers(0, 40), max_size=12)) if row < len(whole)]
    rows = np.array(rows, dtype=np.int64)
    assert found[rows].tolist() == whole[rows].tolist()


def test_a_prepared_corpus_brings_its_tokenizer_and_names(forms, tokenizer, tmp_path):
    corpus = Corpus.open(forms / "p")
    assert corpus.preparation.end_of_text == "<|fin…|>"
    assert (corpus.tokenizer_path, corpus.tokenizer.vocab_size) == (forms / "p" / "tokenizer", 1000)
    assert [corpus.source(row) for row in (0, 4)] == ["document 0", "document 4"]
    with pytest.raises(CorpusError, match="was not made with the tokenizer in"):
        Corpus.open(forms / "p", tokenizer=str(tokenizer))
    with pytest.raises(CorpusError, match="were made with different tokenizers"):
        Corpus.joined([corpus, Corpus.open(forms / "d", tokenizer=str(tokenizer))])
    more = shutil.copytree(forms / "p", tmp_path / "more")  # with the same file, and another token beside it
    beside = more / "tokenizer" / "tokenizer_config.json"
    beside.write_text(json.dumps(json.loads(beside.read_text()) | {"extra_special_tokens": ["<think>"]}))
    with pytest.raises(CorpusError, match=r"different tokenizers: '<think>' is 257 in .* and missing in"):
        Corpus.joined([corpus, Corpus.open(more)])


def test_a_corpus_without_tokenizer_asks_for_it(forms, tokenizer):
    with pytest.raises(CorpusError, match=r"does not include its tokenizer.*wlb\.corpus\.tokenizer"):
        _ = Corpus.open(forms / "m").tokenizer_path
    with pytest.raises(CorpusError, match=r"There is no .*nowhere/tokenizer\.json"):
        Corpus.open(forms / "m", tokenizer="nowhere")
    assert Corpus.open(forms / "m", tokenizer=str(tokenizer)).tokenizer.vocab_size <= 300


def test_the_fingerprint_follows_content_and_reading_and_not_the_place(forms, tmp_path):
    copy = shutil.copytree(forms, tmp_path / "copy")
    found = {name: Corpus.open(forms / name).fingerprint for name in ("m", "t.ds", "d", "p")}
    assert found == {name: Corpus.open(copy / name).fingerprint for name in found}
    other_token = [*DOCUMENTS[:3], [9] * 39 + [8], *DOCUMENTS[4:]]
    for change, documents in enumerate([other_token, [*DOCUMENTS, [1]], DOCUMENTS[::-1]]):
        folder = write_prepared(tmp_path / str(change) / "p", documents)
        assert Corpus.open(folder).fingerprint != found["p"]
        assert Corpus.open(write_megatron(folder.parent / "m", documents)).fingerprint != found["m"]
    path = corpora.save_dataset(tmp_path / "d", loss_mask=MASKS)
    ways = [{}, {"mask": "none"}, {"column": "loss_mask", "mask": "none"}]
    assert len({Corpus.open(path, **way).fingerprint for way in ways}) == 3


@pytest.mark.parametrize(("name", "source"), [("m", r"m.bin\[5\]"), ("p", "document 5")])
def test_ids_beyond_the_vocabulary_are_found(forms, name, source):
    corpus = Corpus.open(forms / name)
    corpus.check_sample(301)
    with pytest.raises(CorpusError, match=rf"Document 5 \({source}\) .* token id 300, .* has 300 entries"):
        corpus.check_sample(300)
    with pytest.raises(CorpusError, match="token id -1"):
        corpus.check_ids(0, np.array([3, -1]), 300)


def test_a_mixture_is_its_parts_one_after_the_other(forms):
    parts = [Corpus.open(forms / name) for name in ("t.ds", "m")]
    corpus = Corpus.joined(parts)
    assert content(corpus) == [*DOCUMENTS, *DOCUMENTS]
    assert [len(part) for part in corpus.parts] == [7, 7]
    assert Corpus.joined(parts[::-1]).fingerprint != corpus.fingerprint
    assert str(corpus) == "a mixture of t.ds, m"
