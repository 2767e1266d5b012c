"""From texts to tokens: cutting, batching, the tokenizer."""

import json

import numpy as np
import pytest
from corpora import decode
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from wlb_titan.commands.prepare import length_rows
from wlb_titan.errors import CorpusError
from wlb_titan.prepare import tokenizer as tokenizing
from wlb_titan.prepare.tokenizer import CorpusTokenizer, LeftOut, copy_tokenizer, train_tokenizer

TEXTS = ["def f(x):\n    return x\n", "a cat sat on the mat\n" * 20, "Grüße, 世界 🙂\n", "a\r\nb\tc  d\n\n\n"]


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
def tokenizer(tmp_path_factory) -> CorpusTokenizer:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(TEXTS, 300, folder)
    return CorpusTokenizer(folder)


@given(text=st.text(alphabet="ab\n", max_size=60), size=st.integers(1, 10))
def test_cutting_at_lines_loses_nothing(text, size):
    pieces = list(tokenizing.split_at_lines(text, size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces) or pieces == [""]
    for piece in pieces[:-1]:
        assert piece.endswith("\n") or ("\n" not in piece and len(piece) == size)


# Decoding bytes as UTF-8 needs whole characters, and surrogates are none.
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=50) | st.just("E = '<|endoftext|>'\n")


@settings(max_examples=60)
@given(
    texts=st.lists(st.none() | any_text, max_size=12),
    piece=st.integers(1, 30),
    batch=st.integers(1, 60),
    data=st.data(),
)
def test_documents_decode_to_their_texts(tokenizer, texts, piece, batch, data):
    """Also where one spells the end of text. What is blank is counted, what cannot be read is named."""
    order, left_out = data.draw(st.permutations(range(len(texts)))), LeftOut()
    sizes = {"piece_characters": piece, "batch_characters": batch}
    found = list(tokenizing.tokenized(Texts(texts), order, tokenizer, left_out, **sizes))
    expected = [(at, number) for at, number in enumerate(order) if texts[number] and texts[number].strip()]
    assert [(position, name) for position, name, *_ in found] == [(at, f"text {n}") for at, n in expected]
    for (_, number), (_, _, tokens, learned) in zip(expected, found, strict=True):
        assert tokens[-1] == tokenizer.end_of_text_id
        assert tokenizer.end_of_text_id not in tokens[:-1]
        assert decode(tokenizer.folder, tokens[:-1]) == texts[number]
        assert learned is None
    assert left_out.empty == sum(text is not None and not text.strip() for text in texts)
    bad = [number for number in order if texts[number] is None]
    assert left_out.unreadable == [f"text {number}: not UTF-8" for number in bad]


LOSING = {
    "left out": models.BPE(vocab={letter: number for number, letter in enumerate("helo")}, merges=[]),
    "unknown": models.WordLevel(vocab={"hello": 0, "[UNK]": 1}, unk_token="[UNK]"),
}


@pytest.mark.parametrize("name", LOSING)
def test_characters_that_a_tokenizer_loses_are_told(name, tmp_path):
    own = Tokenizer(LOSING[name])
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(["</s>"])
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.warns(UserWarning, match="does not give back 4 of the first 10 characters, such as 'Ä'"):
        CorpusTokenizer(tmp_path).encode(["hello ÄÖ42"])


def test_a_trained_tokenizer_has_as_many_entries_as_asked(tokenizer, tmp_path):
    train_tokenizer(TEXTS, 257, tmp_path / "least")
    assert (tokenizer.vocab_size, CorpusTokenizer(tmp_path / "least").vocab_size) == (300, 257)


@pytest.mark.parametrize(("count", "least"), [(1, 0), (3, 0), (200, tokenizing.TRAINING_CHARACTERS // 64)])
def test_the_training_sample_is_spread_over_documents(count, least):
    texts = ["x " * 30_000 + chr(200 + number) * 90_000 for number in range(count)]
    sample = "".join(tokenizing.training_texts(Texts([*texts, None]), [count, *range(count)]))
    assert len(sample) == min(tokenizing.TRAINING_CHARACTERS, 150_000 * count)
    longest = max(60_000 + sample.count(chr(200 + number)) for number in range(count))
    assert (least or 100_000) <= longest <= 150_000


def test_a_users_tokenizer_is_copied(tokenizer, tmp_path):
    copy_tokenizer(tokenizer.folder, tmp_path / "t")
    copies = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in tokenizer.folder.iterdir()}
    config = {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    assert CorpusTokenizer(tmp_path / "t").end_of_text == "<|endoftext|>", "a table may describe it"


NO_EOS = (None, "{}", '{"eos_token": null}')
DAMAGED = ("{", "[]", *(f'{{"eos_token": {value}}}' for value in ('["a"]', "{}", "5")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("tokenizer.json", text, "cannot be opened as a tokenizer") for text in (None, "", "[]", "{}")),
        *(("tokenizer_config.json", text, "names no eos_token") for text in NO_EOS),
        *(("tokenizer_config.json", text, "cannot be opened as a tokenizer") for text in DAMAGED),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "The eos_token '</s>' of"),
    ],
)
def test_tokenizers_that_cannot_be_used(tokenizer, tmp_path, name, content, message):
    copy_tokenizer(tokenizer.folder, tmp_path / "t")
    (tmp_path / "t" / name).unlink()
    if content is not None:
        (tmp_path / "t" / name).write_text(content)
    with pytest.raises(CorpusError, match=message) as caught:
        CorpusTokenizer(tmp_path / "t")
    assert str(tmp_path / "t") in str(caught.value) and name in str(caught.value)


@given(lengths=st.lists(st.integers(1, 2**40), min_size=1, max_size=50))
def test_the_table_of_lengths_counts_everything_once(lengths):
    rows = length_rows(np.array(lengths, dtype=np.int64))
    for number, row in enumerate(rows):
        low, documents, tokens = (int(row[key].strip("+").replace(",", "")) for key in list(row)[:3])
        inside = [length for length in lengths if low <= length < 2 * low]
        assert (documents, tokens) == (len(inside), sum(inside))
        assert documents or 0 < number < len(rows) - 1
    assert sum(int(row["documents"]) for row in rows) == len(lengths)
