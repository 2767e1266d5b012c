"""The documents that a job trains on, as planning sees them: their lengths, and the endless order in which a
corpus, or a mixture of several, is read.

A document's place in that order is its id, from 0. All else is computed from the id, so nothing is stored
however many documents there are, and the state of a stream is one number:

    id  ->  part (a source, or its long or its short documents), and how many of its documents came before
        ->  epoch of that part, and place in the epoch
        ->  row of the corpus (`permutation`)

Parts take turns as evenly as whole documents allow: after n documents the first part has had floor(n p),
where p is its share of the documents; the others divide the rest in the same way. Shares are wanted in
tokens, so a part's share of the documents is its share of the tokens over its mean length, normalised.

Example: sources of 3 and 2 documents, half of all documents from each. Not shuffled, the ids 0, 1, 2, ... are
the rows 3, 0, 4, 1, 3, 2, 4, 0, ...: a source that is used up starts again.

Documents that are held out for validation have length 0, and documents of length 0 are skipped. A row is held
out if its SplitMix64 hash, as a number from 0 to 1, is below the share: every rank and every run knows them
without a list, whatever its seed, policy or degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Bools, Ints
from wlb_titan.documents.permutation import permuted
from wlb_titan.errors import PlanError

BLOCK = 1 << 20  # lengths that are read at a time when all of them are
SAMPLE = 1 << 20  # documents whose lengths stand for those of a larger corpus
UNIT = 1 << 30  # shares of documents are whole multiples of 1 / UNIT


class Lengths(Protocol):
    """Tokens of every corpus row: an array of integers, or something that looks them up when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any:
        """The lengths of a slice, or of an int64 array of rows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Consecutive rows of the corpus and their share of the mixture."""

    name: str  # for reports
    documents: int  # number of rows; sources follow each other
    weight: float = 1.0  # share of the tokens, relative to the sum of all weights; above 0
    long_length: int | None = None  # upsamples documents of at least this many tokens
    long_share: float | None = None  # share of the source's tokens that they get, between 0 and 1

    def __post_init__(self) -> None:
        if (self.long_length is None) != (self.long_share is None):
            raise PlanError(
                f"The source {self.name!r} has only one of long_length and long_share; upsampling by length "
                "needs both: the length from which documents count as long, and their share of the tokens."
            )


def all_learned(rows: Ints, starts: Ints, stops: Ints) -> Ints:
    """`Documents.learned` where there is no label mask."""
    return stops - starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A corpus, or several mixed."""

    lengths: Lengths  # tokens of every corpus row
    name: str = ""  # where they come from, for reports
    sources: tuple[Source, ...] = ()  # empty: all rows are one source
    seed: int | None = 0  # shuffles each epoch; None reads the corpus in its own order
    learned: Callable[[Ints, Ints, Ints], Ints] = all_learned
    """(rows, starts, stops) of pieces -> how many of their tokens are learned; int64 (n,) each."""
    fingerprint: str = ""  # identifies the content; a planner continues only with the same one

    def mixture(self) -> Mixture:
        masked = self.learned is not all_learned
        return Mixture(self.lengths, self.sources, seed=self.seed, masked=masked)

    def describe(self, window: int, tokens: int) -> list[str]:
        """A sentence on the corpus, and for a mixture one on each source, for steps of `tokens` tokens."""
        mixture = self.mixture()
        blocks = _blocks(self.lengths, 0, len(self.lengths))
        long = sum(int(np.count_nonzero(block > window)) for _, block in blocks)
        cut = f", {long:,} of them longer than the window and cut" if long else ""
        head = f"{self.name}: {mixture.filled:,} documents, {mixture.tokens:,} tokens{cut}."
        return [head, *mixture.describe(tokens)]


LEAST_SHARE = 1e-6  # of a part; a document of it comes up once in a million


@dataclass(slots=True)
class _Part:
    """A source, or its long or short documents: `count` places an epoch, some of which may be empty."""

    source: int
    first: int  # row of the corpus
    count: int
    share: float  # of the mixture's tokens
    tokens: int  # of an epoch
    documents: int  # that have tokens
    rows: NDArray[np.integer[Any]] | None = None  # of the long documents, counted from `first`
    below: int | None = None  # documents of at least this many tokens leave their place empty


class Mixture:
    """The order of the documents; arguments as in `Documents`."""

    def __init__(
        self, lengths: Lengths, sources: Sequence[Source] = (), *, seed: int | None, masked: bool = False
    ) -> None:
        self._lengths = lengths
        self.seed, self.masked = seed, masked
        self.documents = len(lengths)
        self.sources = tuple(sources) or (Source(name="", documents=self.documents),)
        if not self.documents:
            raise PlanError("The corpus has no documents, so there is nothing to plan.")
        self._parts: list[_Part] = []
        whole = sum(source.weight for source in self.sources)
        first = longest = 0
        for number, source in enumerate(self.sources):
            parts, top = _parts(lengths, first, number, source, source.weight / whole)
            if not all(part.share > LEAST_SHARE for part in parts):
                less = f"less than {LEAST_SHARE:g} of all tokens"
                raise PlanError(
                    f"The weight or long_share of the source {source.name} leaves one of its parts {less}."
                )
            self._parts += parts
            first, longest = first + source.documents, max(longest, top)
        if longest < 2:
            raise PlanError("All documents have one token, so there is no next token to learn to predict.")
        self.tokens = sum(part.tokens for part in self._parts)  # of an epoch of all sources
        self.filled = sum(part.documents for part in self._parts)  # documents that have tokens
        frequencies = [part.share * part.count / part.tokens for part in self._parts]
        rest = np.cumsum(frequencies[::-1])[::-1]
        self._turns = [
            min(max(round(mine / left * UNIT), 1), UNIT - 1)
            for mine, left in zip(frequencies[:-1], rest[:-1], strict=True)
        ]

    def read(self, ids: Ints) -> tuple[Ints, Ints]:
        """Rows and tokens of documents by id, int64 (n,) each; tokens are 0 where a place is empty."""
        rows = np.empty(len(ids), dtype=np.int64)
        tokens = np.empty(len(ids), dtype=np.int64)
        for number, mine, before in self._by_part(ids):
            part = self._parts[number]
            epochs, places = np.divmod(before, part.count)
            if self.seed is not None:
                places = permuted(places, part.count, self.seed + (number << 32), epochs)
            found = part.first + (places if part.rows is None else part.rows[places].astype(np.int64))
            lengths = np.asarray(self._lengths[found], dtype=np.int64)
            if part.below is not None:
                lengths = np.where(lengths < part.below, lengths, 0)
            rows[mine], tokens[mine] = found, lengths
        return rows, tokens

    def sources_of(self, rows: Ints) -> Ints:
        """int64 (n,), numbers of the sources that have these rows."""
        return np.searchsorted(np.cumsum([source.documents for source in self.sources]), rows, side="right")

    def epochs(self, id_: int) -> list[float]:
        """How often each source has been read when the stream comes to this id, in tokens over its tokens."""
        read = [0.0] * len(self.sources)
        tokens = [0] * len(self.sources)
        for part, share in zip(self._parts, [*self._turns, UNIT], strict=True):
            before = id_ * share // UNIT
            id_ -= before
            read[part.source] += before / part.count * part.tokens
            tokens[part.source] += part.tokens
        return [done / whole for done, whole in zip(read, tokens, strict=True)]

    def sample(self) -> Ints:
        """int64 (n,), lengths with the stream's distribution: all of one small corpus, else a million."""
        if len(self._parts) == 1 and self.documents <= SAMPLE:
            lengths = np.asarray(self._lengths[: self.documents], dtype=np.int64)
        else:
            lengths = self.read(np.random.default_rng(0).integers(0, 1 << 40, SAMPLE))[1]
        return lengths[lengths > 0]

    def facts(self) -> list[list[Any]]:
        """All that the order depends on besides lengths and seed; JSON-able."""
        return [[s.documents, s.weight, s.long_length, s.long_share] for s in self.sources]

    def describe(self, tokens_a_step: int) -> list[str]:
        """For each source of a mixture its share, and in how many steps it is read once."""
        lines = []
        for number, source in enumerate(self.sources):
            parts = [part for part in self._parts if part.source == number]
            share = sum(part.share for part in parts)
            documents, tokens = sum(part.documents for part in parts), sum(part.tokens for part in parts)
            line = f"{source.name}: {share:.1%} of the tokens; has {documents:,} documents, {tokens:,} tokens"
            if len(parts) == 2:
                long, short = (part.tokens / (part.share * tokens_a_step) for part in parts)
                line += (
                    f"; {source.long_share:.1%} from the {parts[0].count:,} documents of "
                    f"{source.long_length:,} tokens or more, each read once in {long:,.1f} steps, the others "
                    f"in {short:,.1f}"
                )
            else:
                line += f", each read once in {parts[0].tokens / (share * tokens_a_step):,.1f} steps"
            lines.append(line)
        return lines if self.sources[0].name else []

    def _by_part(self, ids: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """For each part that has some of the ids: its number, their places in `ids`, and how many of its
        documents come before each of them."""
        where = np.arange(len(ids))
        for number, share in enumerate(self._turns):
            before = _multiplied(ids, share)
            mine = _multiplied(ids + 1, share) > before
            if mine.any():
                yield number, where[mine], before[mine]
            ids, where = (ids - before)[~mine], where[~mine]
        if len(ids):
            yield len(self._turns), where, ids


def _multiplied(numbers: Ints, share: int) -> Ints:
    """floor(numbers x share / UNIT) without overflow."""
    return numbers // UNIT * share + numbers % UNIT * share // UNIT


def _blocks(lengths: Lengths, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
    for begin in range(start, stop, BLOCK):
        yield begin, np.asarray(lengths[begin : min(begin + BLOCK, stop)])


def _parts(
    lengths: Lengths, first: int, number: int, source: Source, share: float
) -> tuple[list[_Part], int]:
    """The parts of a source whose rows begin at `first`, and the tokens of its longest document."""
    tokens = documents = longest = long_tokens = 0
    rows: list[NDArray[np.integer[Any]]] = []
    for begin, block in _blocks(lengths, first, first + source.documents):
        if (shortest := int(block.min())) < 0:
            row = begin + int(block.argmin())
            raise PlanError(
                f"Document {row} of the corpus has length {shortest}; lengths cannot be negative."
            )
        tokens += int(block.sum(dtype=np.int64))
        documents += int(np.count_nonzero(block))
        longest = max(longest, int(block.max()))
        if source.long_length is not None:
            long = np.flatnonzero(block >= source.long_length)
            long_tokens += int(block[long].sum(dtype=np.int64))
            rows.append((long + (begin - first)).astype(np.int32 if source.documents < 2**31 else np.int64))
    name = f"The source {source.name!r}" if source.name else "The corpus"
    if not tokens:
        key = "validation.hold_out" * isinstance(lengths, HoldOut)
        raise PlanError(f"{name} has no tokens left, so there is nothing to plan.", setting=key)
    if source.long_length is not None and not 0 < long_tokens < tokens:
        raise PlanError(
            f"{name} has {'no documents' if not long_tokens else 'only documents'} of at least "
            f"{source.long_length:,} tokens (the longest has {longest:,}), so "
            "long_share cannot be met. Set another long_length."
        )
    if source.long_share is None:
        return [_Part(number, first, source.documents, share, tokens, documents)], longest
    found, of_long, below = np.concatenate(rows), source.long_share, source.long_length
    tokens, documents = tokens - long_tokens, documents - len(found)
    return [
        _Part(number, first, len(found), share * of_long, long_tokens, len(found), rows=found),
        _Part(number, first, source.documents, share * (1 - of_long), tokens, documents, below=below),
    ], longest


def is_held_out(rows: Ints, share: float) -> Bools:
    """bool (n,), whether the documents with these rows, int64 (n,), are held out."""
    with np.errstate(over="ignore"):
        bits = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return bits / 2.0**64 < share


class HoldOut:
    """`Lengths` of only the held-out documents, or only the others, within `rows`; 0 for the rest."""

    def __init__(self, lengths: Lengths, share: float, *, held_out: bool, rows: range | None = None) -> None:
        self._lengths = lengths
        self._share = share
        self._held_out = held_out
        self._rows = range(len(lengths)) if rows is None else rows

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, rows: Any, /) -> Any:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        rows = np.asarray(rows, dtype=np.int64)
        kept = is_held_out(rows, self._share) == self._held_out
        kept &= (rows >= self._rows.start) & (rows < self._rows.stop)
        return np.where(kept, np.asarray(self._lengths[rows], dtype=np.int64), 0)
