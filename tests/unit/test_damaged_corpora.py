"""Folders that are not corpora, and corpora of which bytes or files are wrong."""

import shutil
import struct

import numpy as np
import pyarrow as pa
import pytest
from corpora import DOCUMENTS, MASKS, write_prepared
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.corpus import Corpus, CorpusError

pytestmark = pytest.mark.slow

DATA = "data-00000-of-00001.arrow"


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
    parts = ((lengths, "<i4"), (begins, "<i8"), (ends, "<i8"))
    return head + b"".join(np.array(*part).tobytes() for part in parts)


ENDLESS = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2**64 - 1, 1)
TYPE_7 = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 7, 1, 1)
HEAD = pa.schema({"input_ids": pa.list_(pa.int32()), "source": pa.string()}).serialize().to_pybytes()
"""An Arrow file that ends before its first batch, which pyarrow takes for whole."""


@pytest.mark.parametrize(
    ("corpus", "changes", "message"),
    [
        ("m", {"m.bin": None}, "consists of .*; there is no .*m.bin"),
        ("m", {"m.bin": 40}, "m.idx and m.bin do not belong together"),
        ("m", {"m.idx": 100}, "m.idx is truncated"),
        ("m.bin", {"m.idx": TYPE_7}, "tokens of type 7"),
        ("m", {"m.idx": ENDLESS}, "m.idx is truncated"),
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
        ("t.ds", {"t.ds": 40}, "has 40 bytes, but t.ds.index describes 53 tokens"),
        ("t.ds", {"t.ds.index": 41}, "t.ds.index is truncated"),
        ("t.ds", {"t.ds": 0, "t.ds.index": 0}, "contains no tokens"),
        ("t.ds", {"t.ds.loss": b"\1"}, r"t\.ds\.loss has 1 bytes"),
        ("d", {f"d/{DATA}": b"no arrow file"}, "arrow cannot be read"),
        ("d", {"d/state.json": b"{}"}, r"state\.json is damaged"),
        ("d", {"d/state.json": b'{"_data_files": [], "_fingerprint": ""}'}, r"state\.json is damaged"),
        ("p", {"p/tokenizer/tokenizer.json": b"{"}, "tokenizer.json is not the tokenizer that made it"),
        ("p", {"p/corpus.json": ('"documents": 7', '"documents": "7"')}, 'documents is "7", but should'),
        ("p", {"p/corpus.json": ('"settings": {}', '"settings": null')}, "settings is null, but should be"),
        ("p", {"p/corpus.json": ('"tokenizer_sha256": "', '"tokenizer_sha256": "0')}, "not the tokenizer"),
        ("p", {f"p/{DATA}": tuple(np.full(40, i, "<i4").tobytes() for i in (9, -1))}, "fingerprint"),
        ("d", {"d/state.json": None}, r"Megatron \(\.idx and \.bin\) or datatrove \(\.ds\)"),
        ("p", {f"p/{DATA}": 900}, "arrow cannot be read"),
        ("p", {f"p/{DATA}": HEAD}, "holds 0 documents and 0 tokens, but should hold 7 and 53"),
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
