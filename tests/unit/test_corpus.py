"""Reading a corpus: slices, bounds, threads, and what is said about a folder that is no corpus."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.corpus import Corpus, CorpusError, Manifest
from wlb_titan.corpus.corpus import verify
from wlb_titan.corpus.folder import _hash
from wlb_titan.corpus.shards import SPANS, TOKENS
from wlb_titan.corpus.writer import DocumentWriter, write_manifest
from wlb_titan.errors import UserError

DIGEST = hashlib.sha256(b"{}").digest()
END = SimpleNamespace(digest=DIGEST, vocab_size=1000, end_of_text="<|fin…|>", end_of_text_id=0)


def make_corpus(
    folder: Path, documents: list[list[int]], batch_tokens: int = 16, spans: list[list[int]] | None = None
) -> Path:
    """A corpus of given token ids. Its tokenizer is never loaded, so any bytes do."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    masked = spans is not None
    with DocumentWriter(folder / "documents.arrow", masked=masked, batch_tokens=batch_tokens) as writer:
        for number, tokens in enumerate(documents):
            learned = np.array(spans[number], dtype=np.int32) if masked else None
            writer.add(f"document {number}", np.array(tokens, dtype=np.int32), learned)
    write_manifest(folder, writer, END, {"source": "made by a test"}, empty_documents=0, unreadable=0)
    return folder


DOCUMENTS = [[5, 6, 7, 0], [8, 0], [0], [9] * 40 + [0], [1, 2, 0]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A corpus that nobody writes to."""
    return make_corpus(tmp_path_factory.mktemp("whole") / "corpus", DOCUMENTS)


@pytest.fixture
def corpus_folder(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "corpus")


@pytest.fixture(scope="module")
def masked_folder(tmp_path_factory) -> Path:
    spans = [[1, 3], [], [0, 1], [3, 20, 30, 41], [0, 3]]
    return make_corpus(tmp_path_factory.mktemp("masked") / "corpus", DOCUMENTS, spans=spans)


@settings(max_examples=50)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=9), data=st.data()
)
def test_spans_are_the_mask(tmp_path_factory, masks, data):
    """Of any piece, read and counted; the oracle is the mask itself."""
    spans = [np.flatnonzero(np.diff([0, *mask, 0])).tolist() for mask in masks]
    folder = make_corpus(tmp_path_factory.mktemp("spans") / "c", masks, spans=spans)
    corpus = Corpus.open(folder)
    assert corpus.manifest.learned_tokens == sum(map(sum, masks))
    rows = data.draw(st.lists(st.integers(0, len(masks) - 1), max_size=9))
    pieces = [sorted(data.draw(st.tuples(*[st.integers(0, len(masks[row]))] * 2))) for row in rows]
    expected = [masks[row][start:stop] for row, (start, stop) in zip(rows, pieces, strict=True)]
    counted = corpus.count_learned(
        np.array(rows, dtype=np.int64),
        np.array([start for start, _ in pieces], dtype=np.int64),
        np.array([stop for _, stop in pieces], dtype=np.int64),
    )
    assert counted.tolist() == [sum(mask) for mask in expected]
    for row, (start, stop), mask in zip(rows, pieces, expected, strict=True):
        assert corpus.learned(row, start, stop - start).tolist() == mask
    unmasked = Corpus.open(folder, mask="none")
    assert all(unmasked.learned(0, 0, len(masks[0]))) and not unmasked.masked
    assert unmasked.fingerprint != corpus.fingerprint == corpus.manifest.fingerprint
    with pytest.raises(CorpusError, match="knows itself what is learned"):
        Corpus.open(folder, mask="labels")


token_ids = st.integers(min_value=0, max_value=2**31 - 1)


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(token_ids, min_size=1, max_size=30), min_size=1, max_size=20),
    batch_tokens=st.integers(1, 100),
    data=st.data(),
)
def test_slices_are_those_of_the_documents_written(tmp_path_factory, documents, batch_tokens, data):
    corpus = Corpus.open(make_corpus(tmp_path_factory.mktemp("c") / "corpus", documents, batch_tokens))
    assert np.asarray(corpus.lengths).tolist() == [len(tokens) for tokens in documents]
    assert corpus.lengths.dtype == np.int64
    for row, expected in enumerate(documents):
        assert corpus.tokens(row).tolist() == expected
        start = data.draw(st.integers(0, len(expected)))
        length = data.draw(st.integers(0, len(expected) - start))
        found = corpus.tokens(row, start, length)
        assert found.tolist() == expected[start : start + length]
        assert found.dtype == np.int32


def test_slices_are_views_that_outlive_the_corpus_and_cannot_be_written(whole):
    corpus = Corpus.open(whole)
    document, part = corpus.tokens(3), corpus.tokens(3, 10, 5)
    assert np.shares_memory(document, part)
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    del corpus, document
    assert part.tolist() == [9] * 5


@pytest.mark.parametrize(
    ("row", "start", "length"),
    [(5, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 5), (0, 4, 1), (0, 5, None), (0, 0, -1)],
)
def test_slices_outside_a_document_are_refused(whole, row, start, length):
    with pytest.raises(IndexError):
        Corpus.open(whole).tokens(row, start, length)


def test_threads_read_at_the_same_time(tmp_path):
    documents = [[row] * (row % 37 + 1) for row in range(500)]
    corpus = Corpus.open(make_corpus(tmp_path / "corpus", documents, batch_tokens=64))
    rows = [row for _ in range(10) for row in range(500)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: corpus.tokens(row).tolist(), rows))
    assert found == [documents[row] for row in rows]


def test_what_a_corpus_tells_about_itself(whole):
    corpus = Corpus.open(whole)
    assert len(corpus) == 5
    assert corpus.fingerprint == Manifest.load(whole).fingerprint == corpus.manifest.fingerprint
    assert corpus.manifest.end_of_text == "<|fin…|>"
    assert corpus.tokenizer_path == whole / "tokenizer"
    assert [corpus.source(row) for row in (0, 4)] == ["document 0", "document 4"]
    rows = datasets.Dataset.from_file(str(whole / "documents.arrow"))
    assert rows[1] == {"input_ids": [8, 0], "length": 2, "source": "document 1"}
    assert rows["length"][:] == np.asarray(corpus.lengths).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "strangers"),
    [
        ("wlb_titan.corpus", {"torch", "torchtitan", "datasets", "tokenizers", "pandas"}),
        ("wlb_titan.corpus.prepare, wlb_titan.commands.prepare", {"torch", "torchtitan", "datasets"}),
    ],
)
def test_what_takes_long_is_not_imported(modules, strangers):
    """In a Python of its own: this one has imported all of it."""
    code = f"import sys, {modules}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "wlb_titan" in found.stdout.split()
    assert not strangers & set(found.stdout.split())


def error_of_opening(folder: Path) -> str:
    with pytest.raises(CorpusError) as caught:
        Corpus.open(folder)
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert str(folder) in message
    assert "wlb-titan prepare" in message or "another folder" in message, "it does not say what to do"
    assert "\n" not in message
    return message


def test_folders_without_a_corpus(tmp_path):
    assert "There is no corpus at" in error_of_opening(tmp_path / "corpus")
    (tmp_path / ".corpus.partial").mkdir()
    assert "was interrupted, or is still running" in error_of_opening(tmp_path / "corpus")


DOCUMENTS_FILE, TOKENIZER, MANIFEST = "documents.arrow", "tokenizer/tokenizer.json", "manifest.json"
REWRITTEN = {
    "cut": lambda content: content[:-100],
    "emptied": lambda content: b"",
    "grown": lambda content: content + b"\0",
    "overwritten": lambda content: b"x" * len(content),
}


def damage(file: Path, change: str | dict) -> None:
    """Does one of REWRITTEN to a file, removes it, puts a folder in its place, writes another text, or a
    manifest with other values and a right hash of itself."""
    if change in ("removed", "a folder"):
        file.unlink()
        if change == "a folder":
            file.mkdir()
    elif isinstance(change, dict):
        values = json.loads(file.read_text()) | change
        del values["manifest_sha256"]
        file.write_text(json.dumps(values | {"manifest_sha256": _hash(values)}))
    else:
        rewrite = REWRITTEN.get(change, lambda content: change.encode())
        file.write_bytes(rewrite(file.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        *((name, "removed", f"the file {name} is missing") for name in (DOCUMENTS_FILE, TOKENIZER)),
        *((name, "a folder", f"the file {name} is missing") for name in (DOCUMENTS_FILE, TOKENIZER)),
        (DOCUMENTS_FILE, "emptied", "documents.arrow has 0 bytes instead of"),
        (TOKENIZER, "emptied", "tokenizer.json has 0 bytes instead of"),
        (DOCUMENTS_FILE, "cut", "bytes instead of"),
        (DOCUMENTS_FILE, "grown", "bytes instead of"),
        (DOCUMENTS_FILE, "overwritten", "documents.arrow cannot be read"),
        (TOKENIZER, "overwritten", "tokenizer/tokenizer.json was changed"),
        (MANIFEST, "removed", "not a complete corpus: it has no manifest.json"),
        (MANIFEST, "a folder", "not a complete corpus: it has no manifest.json"),
        (MANIFEST, "cut", "manifest.json is damaged"),
        *(
            (MANIFEST, text, "manifest.json is damaged")
            for text in ("", "[]", "{}", "{", '{"format_version": 5, "documents": 3}', "[" * 100_000)
        ),
        (
            MANIFEST,
            {"format_version": 6, "of_the_future": 1},
            "version 6, but this wlb_titan reads version 5",
        ),
        (MANIFEST, {"documents": 3}, "holds 5 documents and 51 tokens, the manifest says 3 and 51"),
        (MANIFEST, {"tokens": 3}, "holds 5 documents and 51 tokens, the manifest says 5 and 3"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_files(corpus_folder, name, change, words):
    damage(corpus_folder / name, change)
    assert words in error_of_opening(corpus_folder)


@settings(max_examples=60)
@given(data=st.data())
def test_every_flipped_bit_is_found_by_verify(masked_folder, data):
    """Of any file of the corpus."""
    name = data.draw(st.sampled_from([*Manifest.load(masked_folder).files, "manifest.json"]))
    size = 8 * (masked_folder / name).stat().st_size
    with flipped(masked_folder / name, data.draw(st.integers(0, size - 1))):
        with pytest.raises(CorpusError, match=r"damaged|format version") as caught:
            verify(masked_folder, lambda *report: None)
        assert str(masked_folder) in str(caught.value)
        assert name in str(caught.value) or name == "manifest.json"
    assert len(verify(masked_folder, lambda *report: None)) == 5


@settings(max_examples=150)
@given(data=st.data())
def test_who_reads_damaged_documents_has_an_error_or_as_many_tokens(masked_folder, data):
    """Of lengths, tokens and spans; headers are pyarrow's to read."""
    file = masked_folder / "documents.arrow"
    pages = pa.memory_map(str(file)).read_buffer()
    batches = pa.ipc.open_stream(pages).read_all().to_batches()
    lists = data.draw(st.sampled_from(batches)).column(data.draw(st.sampled_from([TOKENS, SPANS])))
    buffers = [buffer for buffer in (lists.buffers()[1], lists.buffers()[3]) if buffer]
    buffer = data.draw(st.sampled_from(buffers))
    begin = 8 * (buffer.address - pages.address)
    with flipped(file, data.draw(st.integers(begin, begin + 8 * buffer.size - 1))):
        try:
            corpus = Corpus.open(masked_folder)
            lengths = np.asarray(corpus.lengths)
            assert [len(corpus.tokens(row)) for row in range(5)] == lengths.tolist()
            assert lengths.sum() == 51
            for row, length in enumerate(lengths.tolist()):
                corpus.learned(row, 0, length)
            corpus.count_learned(np.arange(5), np.zeros(5, dtype=np.int64), lengths)
        except CorpusError as error:
            assert str(masked_folder) in str(error)


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """A file in which one bit is not what it was."""
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    try:
        yield
    finally:
        file.write_bytes(content)


def test_verify_names_every_damaged_file_and_reports_its_progress(corpus_folder):
    reports = []
    assert len(verify(corpus_folder, lambda *report: reports.append(report))) == 5
    total = sum(Manifest.load(corpus_folder).files.values())
    assert reports[-1] == ("Reading bytes", total, total)
    for name in (TOKENIZER, DOCUMENTS_FILE):
        damage(corpus_folder / name, "overwritten")
    with pytest.raises(CorpusError, match=f"{DOCUMENTS_FILE} was changed; {TOKENIZER} was changed"):
        verify(corpus_folder, lambda *report: None)
