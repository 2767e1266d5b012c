"""Corpora of other tools, written by these tools: Megatron's builder, datatrove's tokenizer, `datasets`."""

import struct
import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.corpus.shards import Lengths
from wlb_titan.corpus.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow

DOCUMENTS = [[5, 6, 7], [8], [], [9] * 40, [1, 2], [300] * 7, []]


@pytest.fixture(scope="module")
def builder():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of extensions that are not installed
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    return IndexedDatasetBuilder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(["some words to train on"], 300, folder)
    return folder


def content(corpus):
    return [corpus.tokens(row).tolist() for row in range(len(corpus))]


def write_megatron(builder, prefix: Path, documents, dtype=np.int32, sentences=False):
    """PREFIX.bin and PREFIX.idx; with `sentences` each token is a sequence of its own."""
    import torch

    file = builder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for part in [[token] for token in document] if sentences else [document]:
            file.add_item(torch.tensor(part, dtype=torch.int64))
        file.end_document()
    file.finalize(f"{prefix}.idx")
    return prefix


def write_datatrove(folder: Path, names, tokens_of, token_size=2):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for name in names:
        file = TokenizedFile(str(folder), name, token_size=token_size)
        for document in tokens_of[name]:
            file.write(document, None)
        file.close()
    return folder


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("sentences", [False, True], ids=["documents", "sentences"])
def test_megatrons_builder(builder, tmp_path, dtype, sentences):
    documents = [d for d in DOCUMENTS if d or not sentences]
    prefix = write_megatron(builder, tmp_path / "code_text_document", documents, dtype, sentences)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path):
        corpus = Corpus.open(path)
        assert content(corpus) == documents
        assert corpus.tokens(0).dtype == dtype
        assert np.asarray(corpus.lengths).tolist() == [len(d) for d in documents]
        assert corpus.lengths.sum() == sum(len(d) for d in documents)
    assert corpus.source(1) == "code_text_document.bin[1]"
    assert corpus.tokenizer is None and corpus.manifest is None


def test_a_megatron_dataset_without_ends_of_documents(builder, tmp_path):
    """Each sequence is then a document, as for Megatron's own GPTDataset."""
    import torch

    file = builder(str(tmp_path / "d.bin"))
    for document in DOCUMENTS[:2]:
        file.add_item(torch.tensor(document))
    file.finalize(str(tmp_path / "d.idx"))
    assert content(Corpus.open(tmp_path / "d")) == DOCUMENTS[:2]


def test_megatron_documents_of_no_and_of_two_sequences(builder, tmp_path):
    """As many documents as sequences, and yet not one each."""
    import torch

    file = builder(str(tmp_path / "d.bin"))
    for document in ([[5, 6], [7]], [], [[8]]):
        for sequence in document:
            file.add_item(torch.tensor(sequence))
        file.end_document()
    file.finalize(str(tmp_path / "d.idx"))
    assert content(Corpus.open(tmp_path / "d")) == [[5, 6, 7], [], [8]]


@pytest.mark.parametrize("token_size", [2, 4])
def test_datatroves_tokenized_files(tmp_path, token_size):
    files = {"00001_x.ds": DOCUMENTS[3:], "00000_x.ds": DOCUMENTS[:3]}
    write_datatrove(tmp_path, files, files, token_size)
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
    from tokenizers import Tokenizer

    texts = {f"some words {'to train ' * number}on" for number in range(30)}
    step = DocumentTokenizer(
        str(tmp_path / "tokens"), str(tokenizer / "tokenizer.json"), eos_token="<|endoftext|>", seed=1
    )
    documents = [Document(text=text, id=text) for text in texts]
    LocalPipelineExecutor([documents, step], logging_dir=str(tmp_path / "log"), skip_completed=False).run()
    corpus = Corpus.open(tmp_path / "tokens", tokenizer=str(tokenizer))
    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    assert {decode(tokens[:-1]) for tokens in content(corpus)} == texts
    assert corpus.tokenizer_path == tokenizer
    corpus.check_sample(corpus.tokenizer.vocab_size)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("large", [False, True])
def test_hugging_face_datasets(tmp_path, kind, large):
    lists = datasets.LargeList if large else datasets.List
    features = datasets.Features({"id": datasets.Value("string"), "ids": lists(datasets.Value(kind))})
    rows = {"id": [str(n) for n in range(len(DOCUMENTS))], "ids": DOCUMENTS}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(tmp_path / "d", num_shards=3)
    corpus = Corpus.open(tmp_path / "d", column="ids")
    assert content(corpus) == DOCUMENTS
    assert corpus.tokens(3).dtype == kind
    with pytest.raises(CorpusError, match="has no column 'input_ids'; it has id, ids"):
        Corpus.open(tmp_path / "d")
    with pytest.raises(CorpusError, match=r"'id' of .* holds string, but must hold a list of integers"):
        Corpus.open(tmp_path / "d", column="id")


def test_a_dataset_of_many_batches_that_was_selected_from(tmp_path):
    documents = [[row] * (row % 5) for row in range(3000)]
    dataset = datasets.Dataset.from_dict({"input_ids": documents}).select(range(2999, -1, -2))
    dataset.save_to_disk(tmp_path / "d")
    assert content(Corpus.open(tmp_path / "d")) == documents[::-2]


def test_a_dataset_of_splits_names_them(tmp_path):
    dataset = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "d")
    with pytest.raises(CorpusError, match=f"name the folder of one of them: {tmp_path / 'd' / 'train'}, "):
        Corpus.open(tmp_path / "d")
    assert content(Corpus.open(tmp_path / "d" / "test")) == DOCUMENTS


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"splits": 3}'])
def test_a_damaged_list_of_splits(tmp_path, content):
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(CorpusError, match=r"dataset_dict\.json is damaged"):
        Corpus.open(tmp_path)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=5), st.data())
def test_lengths_of_many_shards_are_those_of_one_array(lengths, data):
    class Shard:
        def __init__(self, lengths):
            self._lengths, self.documents = np.array(lengths, dtype=np.int64), len(lengths)

        def lengths(self, rows):
            return self._lengths[rows]

    whole = np.concatenate([np.array(part, dtype=np.int64) for part in lengths])
    found = Lengths([Shard(part) for part in lengths])
    assert len(found) == len(whole)
    assert np.asarray(found).tolist() == whole.tolist()
    bounds = st.integers(-3, len(whole) + 3) | st.none()
    part = slice(data.draw(bounds), data.draw(bounds))
    assert found[part].tolist() == whole[part].tolist()
    if len(whole):
        rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12)), dtype=np.int64)
        assert found[rows].tolist() == whole[rows].tolist()


def test_the_fingerprint_follows_the_content_and_not_the_place(builder, tmp_path):
    def fingerprint(folder, documents):
        (tmp_path / folder).mkdir()
        return Corpus.open(write_megatron(builder, tmp_path / folder / "d", documents)).fingerprint

    first = fingerprint("a", DOCUMENTS)
    assert fingerprint("b", DOCUMENTS) == first
    assert fingerprint("c", [*DOCUMENTS[:3], [9] * 39 + [8], *DOCUMENTS[4:]]) != first
    assert fingerprint("d", [*DOCUMENTS, [1]]) != first


def test_another_column_is_another_corpus(tmp_path):
    columns = {"input_ids": DOCUMENTS, "others": [tokens[::-1] for tokens in DOCUMENTS], "loss_mask": MASKS}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "d")
    opened = [
        Corpus.open(tmp_path / "d", column=column, mask=mask).fingerprint
        for column in ("input_ids", "others")
        for mask in ("none", "auto")
    ]
    assert len(set(opened)) == 4


def test_ids_beyond_the_vocabulary_are_found(builder, tmp_path):
    corpus = Corpus.open(write_megatron(builder, tmp_path / "d", DOCUMENTS))
    corpus.check_sample(301)
    with pytest.raises(CorpusError, match=r"Document 5 \(d.bin\[5\]\) .* token id 300, .* has 300 entries"):
        corpus.check_sample(300)
    with pytest.raises(CorpusError, match="token id -1"):
        corpus.check_ids(0, np.array([3, -1]), 300)


def test_a_corpus_without_tokenizer_asks_for_it(builder, tmp_path, tokenizer):
    prefix = write_megatron(builder, tmp_path / "d", DOCUMENTS)
    with pytest.raises(CorpusError, match=r"comes without its tokenizer.*wlb\.corpus\.tokenizer"):
        _ = Corpus.open(prefix).tokenizer_path
    with pytest.raises(CorpusError, match=r"There is no .*nowhere/tokenizer\.json"):
        Corpus.open(prefix, tokenizer="nowhere")
    assert Corpus.open(prefix, tokenizer=str(tokenizer)).tokenizer.vocab_size <= 300


def test_a_mixture_is_its_parts_one_after_the_other(builder, tmp_path):
    files = {"0.ds": DOCUMENTS[:4]}
    (tmp_path / "trove").mkdir()
    write_datatrove(tmp_path / "trove", files, files)
    write_megatron(builder, tmp_path / "d", DOCUMENTS)
    parts = [Corpus.open(tmp_path / name) for name in ("trove", "d")]
    corpus = Corpus.joined(parts)
    assert content(corpus) == [*DOCUMENTS[:4], *DOCUMENTS]
    assert [len(part) for part in corpus.parts] == [4, 7]
    assert Corpus.joined(parts[::-1]).fingerprint != corpus.fingerprint
    assert str(corpus) == "a mixture of trove, d"


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "m.bin").unlink(), "go together; there is no .*m.bin"),
        (lambda d: cut(d / "m.bin", 40), "m.bin is cut off .buffer is smaller"),
        (lambda d: cut(d / "m.idx", 20), "is no index of a Megatron dataset"),
        (lambda d: cut(d / "m.idx", 100), "m.idx is cut off"),
        (lambda d: (d / "m.idx").write_bytes(b"x" * 100), "is no index of a Megatron dataset"),
        (
            lambda d: (d / "m.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 7, 1, 1)),
            "tokens of type 7",
        ),
    ],
)
def test_damaged_megatron_files(builder, tmp_path, damage, message):
    write_megatron(builder, tmp_path / "m", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(CorpusError, match=message):
        Corpus.open(tmp_path / "m.idx" if (tmp_path / "m.idx").exists() else tmp_path / "m")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "t.ds.index").unlink(), "has no index t.ds.index"),
        (lambda d: cut(d / "t.ds", 40), "has 40 bytes, but t.ds.index speaks of 53 tokens"),
        (lambda d: [cut(d / "t.ds", 0), cut(d / "t.ds.index", 0)], "holds no tokens"),
    ],
)
def test_damaged_datatrove_files(tmp_path, damage, message):
    write_datatrove(tmp_path, ["t.ds"], {"t.ds": DOCUMENTS})
    damage(tmp_path)
    with pytest.raises(CorpusError, match=message):
        Corpus.open(tmp_path)


def test_damaged_datasets(tmp_path):
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(tmp_path / "d")
    (tmp_path / "d" / "data-00000-of-00001.arrow").write_bytes(b"no arrow file")
    with pytest.raises(CorpusError, match=r"arrow cannot be read"):
        Corpus.open(tmp_path / "d")
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"state\.json is damaged"):
        Corpus.open(tmp_path / "d")


def test_an_unknown_folder_says_what_is_known(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(CorpusError, match=r"Megatron \(\.idx and \.bin\), datatrove \(\.ds\)"):
        Corpus.open(tmp_path)


MASKS = [[0, 1, 1], [1], [], [1, 0] * 20, [1, 1], [0] * 7, []]


def learned(corpus):
    """Of each document its mask, read whole and in two pieces, and counted."""
    result = []
    for row, length in enumerate(np.asarray(corpus.lengths).tolist()):
        whole, half = corpus.learned(row, 0, length), length // 2
        pieces = [corpus.learned(row, 0, half), corpus.learned(row, half, length - half)]
        assert np.concatenate(pieces).tolist() == whole.tolist()
        edges = np.array([0, half]), np.array([half, length])
        counted = corpus.count_learned(np.array([row, row]), *edges)
        assert counted.tolist() == [piece.sum() for piece in pieces]
        result.append(whole.astype(int).tolist())
    return result


def save_dataset(path: Path, **columns) -> Path:
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS, **columns}).save_to_disk(path)
    return path


def next_name(columns):
    return next(iter(columns))


LABELS = [
    [token if on else -100 for token, on in zip(tokens, mask, strict=True)]
    for tokens, mask in zip(DOCUMENTS, MASKS, strict=True)
]


@pytest.mark.parametrize(
    "columns",
    [{"labels": LABELS}, {"loss_mask": MASKS}, {"assistant_masks": MASKS}],
    ids=next_name,
)
def test_a_dataset_s_column_says_what_is_learned(tmp_path, columns):
    path = save_dataset(tmp_path / "chat", **columns)
    assert learned(Corpus.open(path)) == MASKS
    unmasked = Corpus.open(path, mask="none")
    assert learned(unmasked) == [[1] * len(tokens) for tokens in DOCUMENTS]
    assert unmasked.fingerprint != Corpus.open(path).fingerprint


def test_two_columns_that_say_what_is_learned_are_refused_by_name(tmp_path):
    path = save_dataset(tmp_path / "chat", labels=LABELS, loss_mask=MASKS)
    with pytest.raises(CorpusError, match="labels, loss_mask, which all say") as refused:
        Corpus.open(path)
    assert refused.value.setting == "corpus.mask"
    assert learned(Corpus.open(path, mask="loss_mask")) == MASKS
    with pytest.raises(CorpusError, match="no column 'mask'; it has input_ids, labels, loss_mask"):
        Corpus.open(path, mask="mask")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"labels": [tokens[1:] + [-100] * bool(tokens) for tokens in DOCUMENTS]}, "shifted by one"),
        (
            {"loss_mask": [[2] * len(tokens) for tokens in DOCUMENTS]},
            "the value 2 in the mask 'loss_mask'",
        ),
        ({"loss_mask": [[1], *MASKS[1:]]}, r"has 1 values for .*\[0\], which has 3 tokens"),
    ],
    ids=["shifted", "no mask", "wrong length"],
)
def test_masks_that_are_none_are_refused(tmp_path, columns, said):
    path = save_dataset(tmp_path / "chat", **columns)
    with pytest.raises(CorpusError, match=said):
        Corpus.open(path).check_sample(1000)


def test_megatron_s_and_datatrove_s_masks_are_second_files(builder, tmp_path):
    tokens = write_megatron(builder, tmp_path / "tokens", DOCUMENTS)
    mask = write_megatron(builder, tmp_path / "mask", MASKS, dtype=np.uint8)
    assert learned(Corpus.open(tokens, mask=str(mask))) == MASKS
    assert not Corpus.open(tokens).masked
    with pytest.raises(CorpusError, match="0 pairs"):
        Corpus.open(tokens, mask="nowhere")
    (tmp_path / "ds").mkdir()
    write_datatrove(tmp_path / "ds", ["a.ds"], {"a.ds": DOCUMENTS})
    (tmp_path / "ds" / "a.ds.loss").write_bytes(bytes(value for mask in MASKS for value in mask))
    assert learned(Corpus.open(tmp_path / "ds")) == MASKS
    (tmp_path / "ds" / "a.ds.loss").write_bytes(b"\1")
    with pytest.raises(CorpusError, match=r"a\.ds\.loss has 1 bytes"):
        Corpus.open(tmp_path / "ds")
