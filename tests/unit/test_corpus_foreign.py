"""Corpora of other tools, written by these tools: Megatron's builder, datatrove's tokenizer, `datasets`."""

import shutil
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
MASKS = [[0, 1, 1], [1], [], [1, 0] * 20, [1, 1], [0] * 7, []]
LABELS = [
    [token if on else -100 for token, on in zip(tokens, mask, strict=True)]
    for tokens, mask in zip(DOCUMENTS, MASKS, strict=True)
]


def write_megatron(prefix: Path, documents, dtype=np.int32, *, ends=True) -> Path:
    """PREFIX.bin and PREFIX.idx of documents: lists of tokens, lists of sequences, or None for none."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of extensions that are not installed
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    file = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        whole = document == [] or (document and isinstance(document[0], int))
        for sequence in [document] if whole else document or []:
            file.add_item(torch.tensor(sequence, dtype=torch.int64))
        if ends:
            file.end_document()
    file.finalize(f"{prefix}.idx")
    return prefix


def write_datatrove(path: Path, documents, token_size=2) -> Path:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    path.parent.mkdir(exist_ok=True)
    file = TokenizedFile(str(path.parent), path.name, token_size=token_size)
    for document in documents:
        file.write(document, None)
    file.close()
    return path


def save_dataset(path: Path, **columns) -> Path:
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS, **columns}).save_to_disk(path)
    return path


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Path:
    """DOCUMENTS as `m` of Megatron's, `t.ds` of datatrove's and `d` of Hugging Face's, to be read only."""
    folder = tmp_path_factory.mktemp("forms") / "forms"
    write_datatrove(folder / "t.ds", DOCUMENTS)
    write_megatron(folder / "m", DOCUMENTS)
    save_dataset(folder / "d")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(["some words to train on"], 300, folder)
    return folder


def content(corpus):
    return [corpus.tokens(row).tolist() for row in range(len(corpus))]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("sentences", [False, True], ids=["documents", "sentences"])
def test_megatrons_builder(tmp_path, dtype, sentences):
    documents = [d for d in DOCUMENTS if d or not sentences]
    written = [[[token] for token in d] for d in documents] if sentences else documents
    prefix = write_megatron(tmp_path / "code_text_document", written, dtype)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path):
        corpus = Corpus.open(path)
        assert content(corpus) == documents
        assert corpus.tokens(0).dtype == dtype
        assert np.asarray(corpus.lengths).tolist() == [len(d) for d in documents]
        assert corpus.lengths.sum() == sum(len(d) for d in documents)
    assert corpus.source(1) == "code_text_document.bin[1]"
    assert corpus.tokenizer is None and corpus.manifest is None


def test_megatron_documents_of_one_sequence_each_and_others(tmp_path):
    """Without ends of documents each sequence is one, as for Megatron's own GPTDataset; and there may be
    as many documents as sequences, and yet not one each."""
    write_megatron(tmp_path / "no_ends", DOCUMENTS[:2], ends=False)
    assert content(Corpus.open(tmp_path / "no_ends")) == DOCUMENTS[:2]
    write_megatron(tmp_path / "two_none_one", [[[5, 6], [7]], None, [[8]]])
    assert content(Corpus.open(tmp_path / "two_none_one")) == [[5, 6, 7], [], [8]]


@pytest.mark.parametrize("token_size", [2, 4])
def test_datatroves_tokenized_files(tmp_path, token_size):
    write_datatrove(tmp_path / "00001_x.ds", DOCUMENTS[3:], token_size)
    write_datatrove(tmp_path / "00000_x.ds", DOCUMENTS[:3], token_size)
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
    file = str(tokenizer / "tokenizer.json")
    step = DocumentTokenizer(str(tmp_path / "tokens"), file, eos_token="<|endoftext|>", seed=1)
    documents = [Document(text=text, id=text) for text in texts]
    LocalPipelineExecutor([documents, step], logging_dir=str(tmp_path / "log"), skip_completed=False).run()
    corpus = Corpus.open(tmp_path / "tokens", tokenizer=str(tokenizer))
    decode = Tokenizer.from_file(file).decode
    assert {decode(tokens[:-1]) for tokens in content(corpus)} == texts
    assert corpus.tokenizer_path == tokenizer
    corpus.check_sample(corpus.tokenizer.vocab_size)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("large", [False, True])
def test_hugging_face_datasets(tmp_path, kind, large):
    lists = datasets.LargeList if large else datasets.List
    features = datasets.Features({"id": datasets.Value("string"), "ids": lists(datasets.Value(kind))})
    rows = {"id": [str(n) for n in range(len(DOCUMENTS))], "ids": DOCUMENTS}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "d", num_shards=3)
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
    rows = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12)) if len(whole) else []
    rows = np.array(rows, dtype=np.int64)
    assert found[rows].tolist() == whole[rows].tolist()


def test_the_fingerprint_follows_content_and_reading_and_not_the_place(forms, tmp_path):
    copy = shutil.copytree(forms, tmp_path / "copy")
    found = {name: Corpus.open(forms / name).fingerprint for name in ("m", "t.ds", "d")}
    assert found == {name: Corpus.open(copy / name).fingerprint for name in found}
    for name, documents in {
        "token": [*DOCUMENTS[:3], [9] * 39 + [8], *DOCUMENTS[4:]],
        "longer": [*DOCUMENTS, [1]],
    }.items():
        (tmp_path / name).mkdir()
        assert Corpus.open(write_megatron(tmp_path / name / "m", documents)).fingerprint != found["m"]
    columns = {"others": [tokens[::-1] for tokens in DOCUMENTS], "loss_mask": MASKS}
    path = save_dataset(tmp_path / "d", **columns)
    ways = [{"column": column, "mask": m} for column in ("input_ids", "others") for m in ("none", "auto")]
    assert len({Corpus.open(path, **way).fingerprint for way in ways}) == 4


def test_ids_beyond_the_vocabulary_are_found(forms):
    corpus = Corpus.open(forms / "m")
    corpus.check_sample(301)
    with pytest.raises(CorpusError, match=r"Document 5 \(m.bin\[5\]\) .* token id 300, .* has 300 entries"):
        corpus.check_sample(300)
    with pytest.raises(CorpusError, match="token id -1"):
        corpus.check_ids(0, np.array([3, -1]), 300)


def test_a_corpus_without_tokenizer_asks_for_it(forms, tokenizer):
    with pytest.raises(CorpusError, match=r"comes without its tokenizer.*wlb\.corpus\.tokenizer"):
        _ = Corpus.open(forms / "m").tokenizer_path
    with pytest.raises(CorpusError, match=r"There is no .*nowhere/tokenizer\.json"):
        Corpus.open(forms / "m", tokenizer="nowhere")
    assert Corpus.open(forms / "m", tokenizer=str(tokenizer)).tokenizer.vocab_size <= 300


def test_a_mixture_is_its_parts_one_after_the_other(forms):
    parts = [Corpus.open(forms / name) for name in ("t.ds", "m")]
    corpus = Corpus.joined(parts)
    assert content(corpus) == [*DOCUMENTS, *DOCUMENTS]
    assert [len(part) for part in corpus.parts] == [7, 7]
    assert Corpus.joined(parts[::-1]).fingerprint != corpus.fingerprint
    assert str(corpus) == "a mixture of t.ds, m"


TYPE_7 = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 7, 1, 1)
DATA = "d/data-00000-of-00001.arrow"


@pytest.mark.parametrize(
    ("corpus", "changes", "message"),
    [
        ("m", {"m.bin": None}, "go together; there is no .*m.bin"),
        ("m", {"m.bin": 40}, "m.bin is cut off .buffer is smaller"),
        ("m", {"m.idx": 20}, "is no index of a Megatron dataset"),
        ("m", {"m.idx": 100}, "m.idx is cut off"),
        ("m", {"m.idx": b"x" * 100}, "is no index of a Megatron dataset"),
        ("m.bin", {"m.idx": TYPE_7}, "tokens of type 7"),
        ("t.ds", {"t.ds.index": None}, "has no index t.ds.index"),
        ("t.ds", {"t.ds": 40}, "has 40 bytes, but t.ds.index speaks of 53 tokens"),
        ("t.ds", {"t.ds.index": 41}, "t.ds.index is cut off"),
        ("t.ds", {"t.ds": 0, "t.ds.index": 0}, "holds no tokens"),
        ("t.ds", {"t.ds.loss": b"\1"}, r"t\.ds\.loss has 1 bytes"),
        ("d", {DATA: b"no arrow file"}, "arrow cannot be read"),
        ("d", {"d/state.json": b"{}"}, r"state\.json is damaged"),
        ("d", {"d/state.json": None}, r"Megatron \(\.idx and \.bin\), datatrove \(\.ds\)"),
        *(
            ("d", {"d/dataset_dict.json": splits}, r"dataset_dict\.json is damaged")
            for splits in (b"{", b"[]", b"{}", b'{"splits": 3}')
        ),
    ],
)
def test_damaged_files(forms, tmp_path, corpus, changes, message):
    """Each file is removed, cut to so many bytes, or has another content."""
    folder = shutil.copytree(forms, tmp_path / "copy")
    for name, change in changes.items():
        file = folder / name
        if change is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:change] if isinstance(change, int) else change)
    with pytest.raises(CorpusError, match=message):
        Corpus.open(folder / corpus)


def learned(corpus):
    """The mask of each document, read whole and in two pieces, and counted."""
    result = []
    for row, length in enumerate(np.asarray(corpus.lengths).tolist()):
        whole, half = corpus.learned(row, 0, length), length // 2
        pieces = [corpus.learned(row, 0, half), corpus.learned(row, half, length - half)]
        assert np.concatenate(pieces).tolist() == whole.tolist()
        counted = corpus.count_learned(np.array([row, row]), np.array([0, half]), np.array([half, length]))
        assert counted.tolist() == [piece.sum() for piece in pieces]
        result.append(whole.astype(int).tolist())
    return result


@pytest.mark.parametrize("column", ["labels", "loss_mask", "assistant_masks"])
def test_a_dataset_s_column_says_what_is_learned(tmp_path, column):
    path = save_dataset(tmp_path / "chat", **{column: LABELS if column == "labels" else MASKS})
    assert learned(Corpus.open(path)) == MASKS
    assert learned(Corpus.open(path, mask="none")) == [[1] * len(tokens) for tokens in DOCUMENTS]


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
        ({"loss_mask": [[2] * len(tokens) for tokens in DOCUMENTS]}, "the value 2 in the mask 'loss_mask'"),
        ({"loss_mask": [[1], *MASKS[1:]]}, r"has 1 values for .*\[0\], which has 3 tokens"),
    ],
    ids=["shifted", "no mask", "wrong length"],
)
def test_masks_that_are_none_are_refused(tmp_path, columns, said):
    with pytest.raises(CorpusError, match=said):
        Corpus.open(save_dataset(tmp_path / "chat", **columns)).check_sample(1000)


def test_megatron_s_and_datatrove_s_masks_are_second_files(forms, tmp_path):
    mask = write_megatron(tmp_path / "mask", MASKS, dtype=np.uint8)
    assert learned(Corpus.open(forms / "m", mask=str(mask))) == MASKS
    assert not Corpus.open(forms / "m").masked
    with pytest.raises(CorpusError, match="0 pairs"):
        Corpus.open(forms / "m", mask="nowhere")
    write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    (tmp_path / "a.ds.loss").write_bytes(bytes(value for mask in MASKS for value in mask))
    assert learned(Corpus.open(tmp_path / "a.ds")) == MASKS
