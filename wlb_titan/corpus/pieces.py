"""Long texts in pieces that a tokenizer can take: bounded ones, cut where it does not matter."""

import re
from collections.abc import Iterator

MOST_UNBROKEN = 4096
"""Longest run of characters without white space, or of white space alone, that is tokenized as a whole: the
time of byte-pair encoding grows with the square of a word's length."""


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
