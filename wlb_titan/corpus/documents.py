"""From texts to documents of token ids, a bounded amount of text at a time."""

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np

from wlb_titan.corpus.pieces import split
from wlb_titan.corpus.sources import Source, Unreadable
from wlb_titan.corpus.tokenizer import CorpusTokenizer

PIECE_CHARACTERS = 1_000_000
"""Longer texts are tokenized in pieces that end with a line, so that all cores work on one long text."""

BATCH_CHARACTERS = 2_000_000
"""Text tokenized at a time; the tokenizer takes about 40 bytes a character while it works."""


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

    def __init__(
        self,
        source: Source,
        order: list[int],
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
