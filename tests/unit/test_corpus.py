"""Reading a corpus, whichever tool wrote it: `wlb-titan prepare`, `datasets`, Megatron, datatrove."""

import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
from corpora import content, decode, write_datatrove, write_megatron, write_prepared
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.corpus.shards import Lengths
from wlb_titan.prepare import prepare
from wlb_titan.prepare.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow

DOCUMENTS = [[5, 6, 7], [8], [], [9] * 40, [1, 2], [300] * 7, []]
MASKS = [[0, 1, 1], [1], [], [1, 0] * 20, [1, 1], [0] * 7, []]
LABELS = [
    [token if on else -100 for token, on in zip(tokens, mask, strict=True)]
    for tokens, mask in zip(DOCUMENTS, MASKS, strict=True)
]
DATA = "data-00000-of-00001.arrow"


def save_dataset(path: Path, **columns) -> Path:
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS, **columns}).save_to_disk(path)
    return path


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Path:
    """DOCUMENTS in four forms, to be read only: `m` of Megatron's, `t.ds` of datatrove's, `d` of Hugging
    Face's, `p` of our own."""
    folder = tmp_path_factory.mktemp("forms")
    write_datatrove(folder / "t.ds", DOCUMENTS)
    write_megatron(folder / "m", DOCUMENTS)
    save_dataset(folder / "d")
    write_prepared(folder / "p", DOCUMENTS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(["some words to train on"], 300, folder)
    return folder


# Tokens and lengths, whoever wrote them.


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

    texts = {f"some words {'to train ' * number}on" for number in range(30)}
    file = str(tokenizer / "tokenizer.json")
    step = DocumentTokenizer(str(tmp_path / "tokens"), file, eos_token="<|endoftext|>", seed=1)
    documents = [Document(text=text, id=text) for text in texts]
    LocalPipelineExecutor([documents, step], logging_dir=str(tmp_path / "log")).run()
    corpus = Corpus.open(tmp_path / "tokens", tokenizer=str(tokenizer))
    assert {decode(tokenizer, tokens[:-1]) for tokens in content(corpus)} == texts
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


def test_a_prepared_corpus_brings_its_tokenizer_and_names(forms, tokenizer):
    corpus = Corpus.open(forms / "p")
    assert corpus.preparation.end_of_text == "<|fin…|>"
    assert (corpus.tokenizer_path, corpus.tokenizer.vocab_size) == (forms / "p" / "tokenizer", 1000)
    assert [corpus.source(row) for row in (0, 4)] == ["document 0", "document 4"]
    with pytest.raises(CorpusError, match="was not made with the tokenizer in"):
        Corpus.open(forms / "p", tokenizer=str(tokenizer))
    with pytest.raises(CorpusError, match="were made with different tokenizers"):
        Corpus.joined([corpus, Corpus.open(forms / "d", tokenizer=str(tokenizer))])


def test_a_corpus_without_tokenizer_asks_for_it(forms, tokenizer):
    with pytest.raises(CorpusError, match=r"comes without its tokenizer.*wlb\.corpus\.tokenizer"):
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
    path = save_dataset(tmp_path / "d", loss_mask=MASKS)
    ways = [{}, {"mask": "none"}, {"column": "loss_mask", "mask": "none"}]
    assert len({Corpus.open(path, **way).fingerprint for way in ways}) == 3


def test_ids_beyond_the_vocabulary_are_found(forms):
    corpus = Corpus.open(forms / "m")
    corpus.check_sample(301)
    with pytest.raises(CorpusError, match=r"Document 5 \(m.bin\[5\]\) .* token id 300, .* has 300 entries"):
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


# Folders that are none, and damage.


def test_folders_without_a_corpus(tmp_path):
    def refused(name):
        with pytest.raises(CorpusError) as caught:
            Corpus.open(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    assert f"Make one with `wlb-titan prepare {tmp_path / 'c'}`" in refused("c")
    (tmp_path / ".c.partial").mkdir()
    assert "was interrupted, or is still running" in refused("c")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text("{}")
    assert "not a complete corpus" in refused("old")


def index(lengths=(3, 1, 0, 40, 2, 7, 0), begins=None, ends=range(8), kind=4) -> bytes:
    """Megatron's of DOCUMENTS, or one that is damaged."""
    begins = np.cumsum([0, *lengths[:-1]]) * 4 if begins is None else begins
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, kind, len(lengths), len(ends))
    return head + b"".join(
        np.array(v, t).tobytes() for v, t in ((lengths, "<i4"), (begins, "<i8"), (ends, "<i8"))
    )


ENDLESS = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2**64 - 1, 1)
TYPE_7 = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 7, 1, 1)
HEAD = pa.schema({"input_ids": pa.list_(pa.int32()), "source": pa.string()}).serialize().to_pybytes()
"""An Arrow file that ends before its first batch, which pyarrow takes for whole."""


@pytest.mark.parametrize(
    ("corpus", "changes", "message"),
    [
        ("m", {"m.bin": None}, "go together; there is no .*m.bin"),
        ("m", {"m.bin": 40}, "m.idx and m.bin do not belong together"),
        ("m", {"m.idx": 100}, "m.idx is cut off"),
        ("m.bin", {"m.idx": TYPE_7}, "tokens of type 7"),
        ("m", {"m.idx": ENDLESS}, "m.idx is cut off"),
        ("m", {"m.idx": index(kind=8)}, "do not belong together"),
        ("m", {"m.idx": index(lengths=[3, 1, 0, 40, 2, -7, 14])}, "do not belong together"),
        ("m", {"m.idx": index(begins=[0] * 7)}, "do not belong together"),
        ("m", {"m.idx": index(begins=[0, 12, 16, 16, 176, 184, -4])}, "do not belong together"),
        ("m", {"m.idx": index(ends=[0, 2, 1, 3, 4, 5, 6, 7])}, "do not belong together"),
        ("m", {"m.idx": index(ends=[0, 1, 2, 3])}, "do not belong together"),
        ("m", {"m.idx": index(ends=[1, 2, 3, 4, 5, 6, 7])}, "do not belong together"),
        ("m", {"m.idx": index() + bytes([0, 1, 0, 0, 0, 0, 0])}, "do not belong together"),
        ("m", {"m.bin": bytes(400)}, "do not belong together"),
        ("t.ds", {"t.ds.index": np.array([3, 2, 4, 44, 46, 53, 53]).tobytes()}, "do not ascend"),
        ("t.ds", {"t.ds.index": np.array([-1, 2, 4, 44, 46, 53, 53]).tobytes()}, "do not ascend"),
        ("t.ds", {"t.ds.index": np.array([3, 4, 99, 44, 46, 53, 53]).tobytes()}, "do not ascend"),
        ("t.ds", {"t.ds.index": None}, "has no index t.ds.index"),
        ("t.ds", {"t.ds": 40}, "has 40 bytes, but t.ds.index speaks of 53 tokens"),
        ("t.ds", {"t.ds.index": 41}, "t.ds.index is cut off"),
        ("t.ds", {"t.ds": 0, "t.ds.index": 0}, "holds no tokens"),
        ("t.ds", {"t.ds.loss": b"\1"}, r"t\.ds\.loss has 1 bytes"),
        ("d", {f"d/{DATA}": b"no arrow file"}, "arrow cannot be read"),
        ("d", {"d/state.json": b"{}"}, r"state\.json is damaged"),
        ("d", {"d/state.json": b'{"_data_files": [], "_fingerprint": ""}'}, r"state\.json is damaged"),
        ("p", {"p/tokenizer/tokenizer.json": b"{"}, "tokenizer.json is not the tokenizer that made it"),
        ("p", {"p/corpus.json": ('"documents": 7', '"documents": "7"')}, "documents is '7'"),
        ("p", {"p/corpus.json": ('"settings": {}', '"settings": null')}, "settings is None"),
        ("p", {"p/corpus.json": ('"tokenizer_sha256": "', '"tokenizer_sha256": "0')}, "not the tokenizer"),
        (
            "p",
            {f"p/{DATA}": (np.full(40, 9, "<i4").tobytes(), np.full(40, -1, "<i4").tobytes())},
            "fingerprint",
        ),
        ("d", {"d/state.json": None}, r"Megatron \(\.idx and \.bin\) or datatrove \(\.ds\)"),
        ("p", {f"p/{DATA}": 900}, "arrow cannot be read"),
        ("p", {f"p/{DATA}": HEAD}, "holds 0 documents and 0 tokens, and should hold 7 and 53"),
        ("p", {"p/corpus.json": b'{"documents": 3}'}, r"damaged: corpus\.json cannot be read"),
        ("p", {"p/tokenizer/tokenizer.json": None}, r"there is no tokenizer/tokenizer\.json"),
    ],
)
def test_damaged_files(forms, tmp_path, corpus, changes, message):
    """Each file is removed, cut to so many bytes, has another content, or something replaced in it."""
    folder = shutil.copytree(forms, tmp_path / "copy")
    for name, change in changes.items():
        file = folder / name
        if change is None:
            file.unlink()
        elif isinstance(change, tuple):
            content = file.read_bytes()
            old, new = (part.encode() if isinstance(part, str) else part for part in change)
            assert old in content
            file.write_bytes(content.replace(old, new))
        else:
            file.write_bytes(file.read_bytes()[:change] if isinstance(change, int) else change)
    with pytest.raises(CorpusError, match=message):
        Corpus.open(folder / corpus)


@settings(max_examples=100)
@given(data=st.data())
def test_who_reads_damaged_lists_has_an_error_or_as_many_tokens(tmp_path_factory, data):
    """A bit is flipped in lengths, tokens or masks; headers are pyarrow's to read. Without masks there is
    nothing that the lengths could be compared with."""
    masks = data.draw(st.sampled_from([MASKS, None]))
    folder = write_prepared(tmp_path_factory.mktemp("flipped") / "c", DOCUMENTS, masks)
    pages = pa.memory_map(str(folder / DATA)).read_buffer()
    lists = data.draw(st.sampled_from(["input_ids", "assistant_masks"] if masks else ["input_ids"]))
    [chunk] = pa.ipc.open_stream(pages).read_all().column(lists).chunks
    buffer = data.draw(st.sampled_from([chunk.buffers()[1], chunk.buffers()[3]]))
    begin = 8 * (buffer.address - pages.address)
    bit = data.draw(st.integers(begin, begin + 8 * buffer.size - 1))
    damaged = bytearray(pages)
    damaged[bit // 8] ^= 1 << bit % 8
    (folder / DATA).write_bytes(damaged)
    try:
        corpus = Corpus.open(folder)
        lengths = np.asarray(corpus.lengths)
        assert [len(corpus.tokens(row)) for row in range(7)] == lengths.tolist()
        assert lengths.sum() == 53
        for row, length in enumerate(lengths.tolist()):
            corpus.learned(row, 0, length)
        corpus.count_learned(np.arange(7), np.zeros(7, dtype=np.int64), lengths)
    except CorpusError as error:
        assert str(folder) in str(error)


# Label masks.


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


@pytest.mark.parametrize("column", ["labels", "loss_mask", "assistant_masks", "completion_mask", "prepared"])
def test_a_column_says_what_is_learned(tmp_path, column):
    if column == "prepared":
        path = write_prepared(tmp_path / "p", DOCUMENTS, MASKS)
        assert Corpus.open(path).preparation.learned_tokens == sum(map(sum, MASKS))
    else:
        path = save_dataset(tmp_path / "chat", **{column: LABELS if column == "labels" else MASKS})
    assert learned(Corpus.open(path)) == MASKS
    unmasked = Corpus.open(path, mask="none")
    assert learned(unmasked) == [[1] * len(tokens) for tokens in DOCUMENTS] and not unmasked.masked


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


def of_rows(value):
    return [[value(place) for place in range(len(tokens))] for tokens in DOCUMENTS]


COLUMNS = {  # beside the tokens, and what is said about them
    "harmless": (
        {
            "attention_mask": of_rows(lambda place: 1),
            "token_type_ids": of_rows(lambda place: 0),
            "position_ids": of_rows(lambda place: place),
            "seq_lengths": [[len(tokens)] for tokens in DOCUMENTS],
            "text": ["a"] * 7,
            "length": [1] * 7,
            "words": [["a", "b"]] * 7,
            "messages": [[{"role": "user", "content": "a"}]] * 7,
        },
        "",
    ),
    "padding": ({"attention_mask": of_rows(lambda place: int(place < 9))}, "'attention_mask', by which"),
    "two texts": ({"token_type_ids": of_rows(lambda place: int(place > 9))}, "'token_type_ids', by which"),
    "restarts": ({"position_ids": of_rows(lambda place: place % 9)}, "'position_ids', by which"),
    "packed": ({"seq_lengths": [[1, len(tokens) - 1] for tokens in DOCUMENTS]}, "'seq_lengths', by which"),
    "weights": (
        {"loss_weights": of_rows(lambda place: 0.5)},
        r"'loss_weights'.*remove_columns\('loss_weights'\)",
    ),
    "a weight": ({"weight": [0.5] * 7}, "'weight', which nothing here follows"),
    "segments": ({"segment_ids": of_rows(lambda place: place % 2)}, "'segment_ids', which nothing"),
    "a null": ({"labels": [[None, *labels[1:]] if labels else [] for labels in LABELS]}, "Row 0 of .* null"),
    "a null row": (
        {"loss_mask": [*MASKS[:3], None, *MASKS[4:]]},
        "Row 3 of .* null in the column 'loss_mask'",
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_followed_known_to_be_harmless_or_refused(tmp_path, name):
    columns, message = COLUMNS[name]
    path = save_dataset(tmp_path / "d", **columns)
    if message:
        with pytest.raises(CorpusError, match=message):
            Corpus.open(path).check_sample(1000)
        left = datasets.load_from_disk(path).remove_columns(list(columns))
        left.save_to_disk(tmp_path / "left")  # what the message asks for
        path = tmp_path / "left"
    Corpus.open(path).check_sample(1000)
    assert content(Corpus.open(path)) == DOCUMENTS


def test_no_mask_overrules_columns_that_say_what_is_learned_and_not_padding(tmp_path):
    path = save_dataset(tmp_path / "d", segment_ids=DOCUMENTS, loss_mask=MASKS, labels=LABELS)
    Corpus.open(path, mask="none").check_sample(1000)
    with pytest.raises(CorpusError, match="'segment_ids'"):
        Corpus.open(path, mask="labels")
    path = save_dataset(tmp_path / "padded", attention_mask=MASKS)
    with pytest.raises(CorpusError, match="'attention_mask'"):
        Corpus.open(path, mask="none").check_sample(1000)


@pytest.mark.parametrize(("kind", "length"), [("bool", -1), ("float32", -1), ("int64", 2)])
def test_columns_of_other_kinds_name_the_cast_that_helps(tmp_path, kind, length):
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32"), length=length),
            "loss_mask": datasets.List(datasets.Value(kind), length=length),
        }
    )
    values = {"input_ids": [[5, 6], [7, 8]], "loss_mask": [[0, 1], [1, 1]]}
    datasets.Dataset.from_dict(values, features=features).save_to_disk(tmp_path / "d")
    with pytest.raises(
        CorpusError, match=r"cast_column\('\w+', datasets.List\(datasets.Value\('int32'\)\)\)"
    ):
        Corpus.open(tmp_path / "d")
    cast = datasets.load_from_disk(tmp_path / "d")
    for column in values:
        cast = cast.cast_column(column, datasets.List(datasets.Value("int32")))
    cast.save_to_disk(tmp_path / "cast")
    assert learned(Corpus.open(tmp_path / "cast")) == values["loss_mask"]


@pytest.mark.parametrize("form", ["d", "p"])
def test_a_mask_by_which_nothing_is_learned_is_refused(tmp_path, form):
    """A document's first token is never learned."""
    masks = [[1] * bool(tokens) + [0] * (len(tokens) - 1) for tokens in DOCUMENTS]
    if form == "p":
        path = write_prepared(tmp_path / "p", DOCUMENTS, masks)
    else:
        path = save_dataset(tmp_path / "d", loss_mask=masks)
    corpus = Corpus.open(path)
    with pytest.raises(CorpusError, match="not one token of these documents is learned"):
        corpus.check_learned(corpus.lengths)
    Corpus.open(path, mask="none").check_learned(corpus.lengths)


def test_a_prepared_corpus_is_sampled(tmp_path):
    path = write_prepared(tmp_path / "p", [[5, -1, 7], [8, 5000]])
    with pytest.raises(CorpusError, match="token id -1"):
        Corpus.open(path).check_sample(1000)


def test_a_folder_of_two_tools_hidden_files_and_missing_masks(forms, tmp_path):
    for number in range(2):
        write_datatrove(tmp_path / f"{number}.ds", DOCUMENTS)
    (tmp_path / "._0.ds").write_bytes(b"of macOS")
    (tmp_path / "._m.idx").write_bytes(b"of macOS")
    assert content(Corpus.open(tmp_path)) == [*DOCUMENTS, *DOCUMENTS]
    (tmp_path / "0.ds.loss").write_bytes(bytes(value for mask in MASKS for value in mask))
    with pytest.raises(CorpusError, match=r"1\.ds has no mask 1\.ds\.loss"):
        Corpus.open(tmp_path)
    write_megatron(tmp_path / "m", DOCUMENTS)
    (tmp_path / "two").mkdir()
    for name in ("tokens", "mask"):
        write_megatron(tmp_path / "two" / name, DOCUMENTS)
    with pytest.raises(CorpusError, match=r"two/mask\.idx lies among the documents"):
        Corpus.open(tmp_path / "two")
    with pytest.raises(CorpusError, match=r"of datatrove \(0\.ds\) and of Megatron \(m\.idx\)"):
        Corpus.open(tmp_path)


def test_megatron_s_and_datatrove_s_masks_are_second_files(forms, tmp_path):
    mask = write_megatron(tmp_path / "mask", MASKS, dtype=np.uint8)
    assert learned(Corpus.open(forms / "m", mask=str(mask))) == MASKS
    assert not Corpus.open(forms / "m").masked
    with pytest.raises(CorpusError, match="0 pairs"):
        Corpus.open(forms / "m", mask="nowhere")
    write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    (tmp_path / "a.ds.loss").write_bytes(bytes(value for mask in MASKS for value in mask))
    assert learned(Corpus.open(tmp_path / "a.ds")) == MASKS
