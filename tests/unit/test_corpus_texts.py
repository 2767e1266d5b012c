"""From texts to tokens: cutting, batching, the tokenizer and its end-of-text token."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from wlb_titan.commands.prepare import length_histogram
from wlb_titan.corpus.tokenizer import (
    TRAINING_CHARACTERS,
    CorpusTokenizer,
    LeftOut,
    copy_tokenizer,
    split_at_lines,
    tokenized,
    train_tokenizer,
    training_texts,
)
from wlb_titan.errors import CorpusError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "the cat sat on the mat\n" * 20,
    "Grüße, 世界 🙂\n",
    "a\r\nb\tc  d\n\n\n",
]


class Texts:
    """A source of these texts, None for one that cannot be read."""

    def __init__(self, texts: list[str | None]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def name(self, document: int) -> str:
        return f"text {document}"

    def read(self, document: int) -> str:
        if (text := self.texts[document]) is None:
            raise ValueError("not UTF-8")
        return text


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
    texts=st.lists(st.none() | any_text, max_size=12),
    piece=st.integers(1, 20),
    batch=st.integers(1, 60),
    data=st.data(),
)
def test_documents_decode_to_their_texts(tokenizer_folder, tokenizer, texts, piece, batch, data):
    """What is blank is counted, what cannot be read is named."""
    order, left_out = data.draw(st.permutations(range(len(texts)))), LeftOut()
    sizes = {"piece_characters": piece, "batch_characters": batch}
    found = list(tokenized(Texts(texts), order, tokenizer, left_out, **sizes))
    expected = [(at, number) for at, number in enumerate(order) if texts[number] and texts[number].strip()]
    assert [(position, name) for position, name, *_ in found] == [(at, f"text {n}") for at, n in expected]
    for (_, number), (_, _, tokens, spans) in zip(expected, found, strict=True):
        assert tokens[-1] == tokenizer.end_of_text_id
        assert tokenizer.end_of_text_id not in tokens[:-1]
        assert decode(tokenizer_folder, tokens[:-1]) == texts[number]
        assert spans is None
    assert left_out.empty == sum(text is not None and not text.strip() for text in texts)
    bad = [number for number in order if texts[number] is None]
    assert left_out.unreadable == [f"text {number}: not UTF-8" for number in bad]


def test_text_that_spells_the_end_of_text_token_does_not_end_the_document(tokenizer_folder, tokenizer):
    text = "EOT = '<|endoftext|>'\n"
    [(_, _, tokens, _)] = tokenized(Texts([text]), [0], tokenizer, LeftOut())
    assert (tokens == tokenizer.end_of_text_id).sum() == 1
    assert decode(tokenizer_folder, tokens[:-1]) == text


def test_training_depends_on_nothing_but_texts_and_size(tokenizer_folder, tmp_path):
    train_tokenizer(TEXTS, 300, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tokenizer_folder / name).read_bytes()
    train_tokenizer(TEXTS, 257, tmp_path / "least")
    sizes = [CorpusTokenizer(folder).vocab_size for folder in (tokenizer_folder, tmp_path / "least")]
    assert sizes == [300, 257]


def test_torchtitan_loads_the_trained_tokenizer(tokenizer_folder, tokenizer):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    loaded = HuggingFaceTokenizer(tokenizer_path=str(tokenizer_folder))
    assert loaded.eos_id == tokenizer.end_of_text_id
    assert loaded.get_vocab_size() == tokenizer.vocab_size
    text = TEXTS[0]
    assert loaded.encode(text) == tokenizer.encode([text])[0].tolist()
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize(
    ("count", "from_each"), [(1, 100_000), (3, 100_000), (200, TRAINING_CHARACTERS // 64)]
)
def test_the_training_sample_is_spread_over_documents(count, from_each):
    texts = ["x " * 30_000 + chr(200 + number) * 90_000 for number in range(count)]
    sample = "".join(training_texts(Texts([*texts, None]), [count, *range(count)]))
    assert len(sample) == min(TRAINING_CHARACTERS, 150_000 * count)
    most = max(60_000 + sample.count(chr(200 + number)) for number in range(count))
    assert from_each <= most <= 150_000


def test_a_users_tokenizer_is_copied(tokenizer_folder, tmp_path):
    copy_tokenizer(tokenizer_folder, tmp_path / "t")
    names = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    assert names == {path.name: path.read_bytes() for path in tokenizer_folder.iterdir()}
    config = {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    assert CorpusTokenizer(tmp_path / "t").end_of_text == "<|endoftext|>", "a table may describe it"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json"),
        *(("tokenizer.json", text, "tokenizer.json is not a tokenizer") for text in ("", "{", "[]", "{}")),
        ("tokenizer.json", '{"model": null}', "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "{}", "names no eos_token"),
        ("tokenizer_config.json", '{"eos_token": 5}', "names no eos_token"),
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
