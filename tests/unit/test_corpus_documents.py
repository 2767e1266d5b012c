"""From texts to tokens: cutting, batching, the tokenizer and its end-of-text token."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from wlb_titan.commands.prepare import length_histogram
from wlb_titan.corpus.documents import (
    MOST_UNBROKEN,
    TRAINING_CHARACTERS,
    Documents,
    split,
    split_at_lines,
    training_texts,
)
from wlb_titan.corpus.sources import Unreadable
from wlb_titan.corpus.tokenizer import (
    CorpusTokenizer,
    copy_tokenizer,
    train_tokenizer,
)
from wlb_titan.errors import CorpusError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "the cat sat on the mat\n" * 20,
    "Grüße, 世界 🙂\n",
    "a\r\nb\tc  d\n\n\n",
]


class Texts:
    """A source whose documents are lists of texts."""

    def __init__(self, documents: list[list[str | Unreadable]]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def name(self, document: int) -> str:
        return f"text {document}"

    def read(self, document: int):
        return iter(self.documents[document])


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(TEXTS, 300, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> CorpusTokenizer:
    return CorpusTokenizer(tokenizer_folder)


def decode(folder: Path, tokens: np.ndarray) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        tokens.tolist(), skip_special_tokens=False
    )


@given(text=st.text(alphabet="ab\n", max_size=60), size=st.integers(1, 10))
def test_cutting_at_lines_loses_nothing(text, size):
    pieces = list(split_at_lines(text, size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces) or pieces == [""]
    for piece in pieces[:-1]:
        assert piece.endswith("\n") or ("\n" not in piece and len(piece) == size)


# Decoding bytes as UTF-8 needs whole characters, and surrogates are none.
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(any_text, max_size=4), max_size=12),
    piece=st.integers(1, 20),
    batch=st.integers(1, 60),
    data=st.data(),
)
def test_documents_decode_to_their_texts(tokenizer_folder, tokenizer, documents, piece, batch, data):
    order = data.draw(st.permutations(range(len(documents))))
    stream = Documents(Texts(documents), order, tokenizer, piece_characters=piece, batch_characters=batch)
    found = list(stream)
    expected = [(at, "".join(documents[number]), number) for at, number in enumerate(order)]
    assert [position for position, *_ in found] == [at for at, text, _ in expected if text.strip()]
    for position, name, tokens, _ in found:
        _, text, number = expected[position]
        assert name == f"text {number}"
        assert tokens[-1] == tokenizer.end_of_text_id
        assert tokenizer.end_of_text_id not in tokens[:-1]
        assert decode(tokenizer_folder, tokens[:-1]) == text
    # A document without a single text (nothing of it could be read) is not an empty one.
    assert stream.empty == sum(1 for texts in documents if texts and not "".join(texts).strip())


def test_what_cannot_be_read_is_left_out_and_named(tokenizer_folder, tokenizer):
    bad = Unreadable("b.py", "not UTF-8")
    stream = Documents(Texts([["one ", bad, "two"], [bad], ["three"]]), [0, 1, 2], tokenizer)
    found = [(position, decode(tokenizer_folder, tokens[:-1])) for position, _, tokens, _ in stream]
    assert found == [(0, "one two"), (2, "three")]
    assert stream.unreadable == [bad, bad]
    assert stream.empty == 0


def test_text_that_spells_the_end_of_text_token_does_not_end_the_document(tokenizer_folder, tokenizer):
    text = "EOT = '<|endoftext|>'\n"
    [(_, _, tokens, _)] = Documents(Texts([[text]]), [0], tokenizer)
    assert (tokens == tokenizer.end_of_text_id).sum() == 1
    assert decode(tokenizer_folder, tokens[:-1]) == text


def test_training_depends_on_nothing_but_the_texts(tokenizer_folder, tmp_path):
    train_tokenizer(TEXTS, 300, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tokenizer_folder / name).read_bytes()


@pytest.mark.parametrize("vocab_size", [257, 300])
def test_vocabulary_has_the_size_asked_for(tmp_path, vocab_size):
    train_tokenizer(TEXTS, vocab_size, tmp_path / "t")
    assert CorpusTokenizer(tmp_path / "t").vocab_size == vocab_size


def test_torchtitan_loads_the_trained_tokenizer(tokenizer_folder, tokenizer):
    titan = pytest.importorskip("torchtitan.components.tokenizer")
    loaded = titan.HuggingFaceTokenizer(tokenizer_path=str(tokenizer_folder))
    assert loaded.eos_id == tokenizer.end_of_text_id
    assert loaded.get_vocab_size() == tokenizer.vocab_size
    text = TEXTS[0]
    assert loaded.encode(text) == tokenizer.encode([text])[0].tolist()
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize(
    ("count", "from_each"), [(1, 100_000), (3, 100_000), (1000, TRAINING_CHARACTERS // 64)]
)
def test_the_training_sample_is_spread_over_documents(count, from_each):
    texts = [["x " * 30_000, Unreadable("a", "b"), chr(200 + number) * 90_000] for number in range(count)]
    sample = "".join(training_texts(Texts(texts), range(count)))
    assert len(sample) == min(TRAINING_CHARACTERS, 150_000 * count)
    most = max(60_000 + sample.count(chr(200 + number)) for number in range(count))
    assert from_each <= most <= 150_000


def test_text_without_white_space_is_tokenized_in_bounded_pieces():
    """A word of 4 M characters takes no longer than many short ones, and none is lost."""
    text = "ab " + "ACGT" * 5_000 + "\n" + " " * 9_000 + "cd"
    pieces = list(split(text, 10_000))
    assert "".join(pieces) == text
    assert max(len(word) for piece in pieces for word in re.findall(r"\S+|\s+", piece)) <= MOST_UNBROKEN
    assert list(split("", 10)) == [""]


def test_a_users_tokenizer_is_copied(tokenizer_folder, tmp_path):
    copy_tokenizer(tokenizer_folder, tmp_path / "copy")
    names = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert names == {path.name: path.read_bytes() for path in tokenizer_folder.iterdir()}


def test_the_end_of_text_token_may_be_described_by_a_table(tokenizer_folder, tmp_path):
    copy_tokenizer(tokenizer_folder, tmp_path / "t")
    config = {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    assert CorpusTokenizer(tmp_path / "t").end_of_text == "<|endoftext|>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "{}", "names no eos_token"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "The eos_token '</s>' of"),
    ],
)
def test_tokenizers_that_cannot_be_used(tokenizer_folder, tmp_path, name, content, message):
    copy_tokenizer(tokenizer_folder, tmp_path / "t")
    if content is None:
        (tmp_path / "t" / name).unlink()
    else:
        (tmp_path / "t" / name).write_text(content)
    with pytest.raises(CorpusError, match=message) as caught:
        CorpusTokenizer(tmp_path / "t")
    assert str(tmp_path / "t") in str(caught.value)


@given(lengths=st.lists(st.integers(1, 2**40), min_size=1, max_size=50))
def test_histogram_counts_everything_once(lengths):
    buckets = length_histogram(np.array(lengths, dtype=np.int64))
    assert [bucket.low for bucket in buckets] == [buckets[0].low << k for k in range(len(buckets))]
    for low, documents, tokens in buckets:
        inside = [length for length in lengths if low <= length < 2 * low]
        assert (documents, tokens) == (len(inside), sum(inside))
    assert sum(bucket.documents for bucket in buckets) == len(lengths)
