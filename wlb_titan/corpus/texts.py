"""From texts to documents of token ids, a bounded amount of text at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from wlb_titan.corpus.sources import Source
from wlb_titan.corpus.tokenizer import CorpusTokenizer

PIECE_CHARACTERS = 1_000_000
"""Longer texts are tokenized in pieces that end with a line, so that all cores work on one long text."""

BATCH_CHARACTERS = 2_000_000
"""Text tokenized at a time; the tokenizer takes about 40 bytes a character while it works."""

TRAINING_CHARACTERS = 8_000_000
"""Text that the BPE is trained on: enough for some ten thousand entries, and trained in about a second."""

TRAINING_DOCUMENTS = 64
"""At least so many documents share that text (if there are so many), however long the first ones are."""


class Document(NamedTuple):
    """A document as token ids.

    Attributes:
        position: in the order that was asked for.
        tokens: int32 (n,).
        spans: int32, of conversations, as of `SpanMask`; None learns every token.
    """

    position: int
    name: str
    tokens: np.ndarray
    spans: np.ndarray | None = None


@dataclass
class LeftOut:
    """What of a source does not become a document as it was.

    Attributes:
        empty: documents left out because they hold white space only.
        cut: conversations of which the end was left out.
        skipped: conversations left out because they are too long.
        unreadable: names and reasons of what could not be read.
    """

    empty: int = 0
    cut: int = 0
    skipped: int = 0
    unreadable: list[str] = field(default_factory=list)


def tokenized(
    source: Source,
    order: Sequence[int],
    tokenizer: CorpusTokenizer,
    left_out: LeftOut,
    *,
    piece_characters: int = PIECE_CHARACTERS,
    batch_characters: int = BATCH_CHARACTERS,
) -> Iterator[Document]:
    """The documents of a source, each with the tokenizer's end-of-text token behind it.

    Text flows through in batches that know nothing of documents, so neither many short documents nor one of a
    hundred megabytes leave a core idle.

    Args:
        order: the documents' numbers.
        left_out: counts on while documents are taken.
    """
    end = np.array([tokenizer.end_of_text_id], dtype=np.int32)
    batches = _batches(_pieces(source, order, left_out, piece_characters), batch_characters)
    arrays = (
        (position, tokens)
        for batch in batches
        for (position, _), tokens in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True)
    )
    for position, pieces in groupby(arrays, key=itemgetter(0)):
        tokens = np.concatenate([*(tokens for _, tokens in pieces), end])
        yield Document(position, source.name(order[position]), tokens)


def _pieces(source: Source, order: Sequence[int], left_out: LeftOut, size: int) -> Iterator[tuple[int, str]]:
    """(position of its document, text)."""
    for position, document in enumerate(order):
        try:
            text = source.read(document)
        except ValueError as error:
            left_out.unreadable.append(f"{source.name(document)}: {error}")
            continue
        if not text or text.isspace():
            left_out.empty += 1
        else:
            yield from ((position, piece) for piece in split_at_lines(text, size))


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


def split_at_lines(text: str, size: int) -> Iterator[str]:
    """Cut `text` into pieces of at most `size` characters, behind a line's end wherever a piece has one.

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
        try:
            text = source.read(document)[: min(share, missing)]
        except ValueError:
            continue
        yield text
        missing -= len(text)
        if missing == 0:
            return
