"""From texts to documents of token ids, a bounded amount of text at a time."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from wlb_titan.corpus.sources import Source, Unreadable
from wlb_titan.corpus.tokenizer import CorpusTokenizer

PIECE_CHARACTERS = 1_000_000
"""Longer texts are tokenized in pieces that end with a line, so that all cores work on one long text."""

BATCH_CHARACTERS = 2_000_000
"""Text tokenized at a time; the tokenizer takes about 40 bytes a character while it works."""

MOST_UNBROKEN = 4096
"""Longest run of characters without white space, or of white space alone, that is tokenized as a whole: the
time of byte-pair encoding grows with the square of a word's length."""

TRAINING_CHARACTERS = 8_000_000
"""Text that the BPE is trained on: enough for some ten thousand entries, and trained in about a second."""

TRAINING_DOCUMENTS = 64
"""At least so many documents share that text (if there are so many), however long the first ones are."""


class Documents:
    """The documents of a source as token ids, in a given order.

    Iterating gives (position in the order, name, int32 token ids, None for a label mask). Text flows through
    in batches that know nothing of documents, so neither many short documents nor one of a hundred megabytes
    leave a core idle.

    Args:
        order: their numbers.
        tokenizer: each document ends with its end-of-text token.
        piece_characters: longer texts are cut into pieces.
        batch_characters: text tokenized at a time.

    Attributes:
        progress: called with the position of a document after each batch that only it fills, so that a long
            one does not look like a standstill.
        empty: number of documents left out because they hold white space only.
        unreadable: what could not be read. A document is made of the rest, if there is any.
    """

    cut = skipped = 0  # as `Conversations` are

    def __init__(
        self,
        source: Source,
        order: Sequence[int],
        tokenizer: CorpusTokenizer,
        *,
        piece_characters: int = PIECE_CHARACTERS,
        batch_characters: int = BATCH_CHARACTERS,
    ) -> None:
        self._source = source
        self._order = order
        self._tokenizer = tokenizer
        self._piece_characters = piece_characters
        self._batch_characters = batch_characters
        self.progress: Callable[[int], None] = lambda position: None
        self.empty = 0
        self.unreadable: list[Unreadable] = []

    def __iter__(self) -> Iterator[tuple[int, str, np.ndarray, None]]:
        end = np.array([self._tokenizer.end_of_text_id], dtype=np.int32)
        for position, pieces in groupby(self._tokenized_pieces(), key=itemgetter(0)):
            _, blank, tokens = zip(*pieces, strict=True)
            if all(blank):
                self.empty += 1
            else:
                name = self._source.name(self._order[position])
                yield position, name, np.concatenate([*tokens, end]), None

    def _tokenized_pieces(self) -> Iterator[tuple[int, bool, np.ndarray]]:
        """(position of its document, whether it is blank, token ids) of each piece of text."""
        for batch in _batches(self._pieces(), self._batch_characters):
            arrays = self._tokenizer.encode([text for _, text in batch])
            for (position, text), tokens in zip(batch, arrays, strict=True):
                yield position, not text or text.isspace(), tokens
            if batch[0][0] == batch[-1][0]:
                self.progress(batch[0][0])

    def _pieces(self) -> Iterator[tuple[int, str]]:
        for position, document in enumerate(self._order):
            for text in self._source.read(document):
                if isinstance(text, Unreadable):
                    self.unreadable.append(text)
                else:
                    for piece in split(text, self._piece_characters):
                        yield position, piece


def _batches(pieces: Iterator[tuple[int, str]], size: int) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= size:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def split(text: str, size: int, unbroken: int = MOST_UNBROKEN) -> Iterator[str]:
    """Cut `text` into pieces of at most `size` characters, behind a line's end wherever a piece has one, and
    into shorter ones where no white space comes, or nothing else, for `unbroken` characters.

    An empty text is one empty piece.

    >>> list(split("ab ACGTACGTA cd", 100, unbroken=4))
    ['ab ACGT', 'ACGT', 'A cd']
    """
    start = 0
    for run in re.finditer(rf"\S{{{unbroken}}}|\s{{{unbroken}}}", text):
        yield from split_at_lines(text[start : run.end()], size)
        start = run.end()
    if start < len(text) or not text:
        yield from split_at_lines(text[start:], size)


def split_at_lines(text: str, size: int) -> Iterator[str]:
    """Cut `text` into pieces of at most `size` characters, behind a line's end wherever a piece has one.

    An empty text is one empty piece.

    >>> list(split_at_lines("ab\\ncd\\nefghijkl", 6))
    ['ab\\ncd\\n', 'efghij', 'kl']
    """
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    yield text[start:]


def training_texts(source: Source, order: Iterable[int]) -> Iterator[str]:
    """A sample of the source of at most `TRAINING_CHARACTERS`, from the first documents of `order`."""
    share = TRAINING_CHARACTERS // max(1, min(len(source), TRAINING_DOCUMENTS))
    missing = TRAINING_CHARACTERS
    for document in order:
        room = min(share, missing)
        for text in source.read(document):
            if isinstance(text, Unreadable):
                continue
            yield from split(text[:room], room)
            missing -= len(text[:room])
            room -= len(text[:room])
            if room == 0:
                break
        if missing == 0:
            return
