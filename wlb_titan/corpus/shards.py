"""One file of documents, and many of them read as one.

A shard knows where each of its documents begins from an index that came with the file. Index and tokens are
memory-mapped: opening reads headers only, a process holds nothing of its own, and all processes of a machine
share one copy in the page cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.errors import CorpusError

Tokens = NDArray[np.integer[Any]]

BLOCK = 1 << 20  # lengths looked at together where all of them are


class Shard(Protocol):
    """Documents of one file, numbered from 0.

    Attributes:
        path: the file, for messages.
        documents: how many there are.
        tokens: how many all of them have.
    """

    path: Path
    documents: int
    tokens: int

    def lengths(self, rows: Ints) -> Ints:
        """int64 (n,), tokens of each of these documents."""
        ...

    def read(self, row: int, start: int, length: int) -> Tokens:
        """(length,) of the file's own integer type: tokens of a document, a read-only view of the file."""
        ...

    def source(self, row: int) -> str:
        """Where the document came from, as far as the file tells."""
        ...


class TokenFile(Shard):
    """A shard whose file holds nothing but tokens. Those who inherit set its attributes and `_values`, all
    tokens, and say where documents lie."""

    _values: Tokens

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        """int64 (n,) each: the first token of each of these documents, and the first one after it."""
        raise NotImplementedError

    def lengths(self, rows: Ints) -> Ints:
        begins, ends = self.bounds(rows)
        return ends - begins

    def read(self, row: int, start: int, length: int) -> Tokens:
        begin = int(self.bounds(np.array([row]))[0][0]) + start
        return self._values[begin : begin + length]

    def source(self, row: int) -> str:
        return f"{self.path.name}[{row}]"


class Lengths:
    """The lengths of all documents of several shards, looked up when they are asked for.

    It behaves like a read-only int64 array (documents,): `lengths[17]`, `lengths[5:9]`, `lengths[rows]`,
    `len(lengths)`, `np.asarray(lengths)`. Only the last makes a copy of all of them.
    """

    dtype = np.dtype(np.int64)

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        self.firsts = np.cumsum([0, *(shard.documents for shard in shards)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step != 1:
                raise IndexError("The lengths of a corpus are read in runs without gaps.")
            return self._run(start, max(start, stop))
        if isinstance(rows, int | np.integer):
            return int(self[np.array([rows], dtype=np.int64)][0])
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return rows
        shards = np.searchsorted(self.firsts, rows, side="right") - 1
        order = np.argsort(shards, kind="stable")
        result = np.empty(len(rows), dtype=np.int64)
        numbers, begins = np.unique(shards[order], return_index=True)
        for number, mine in zip(numbers, np.split(order, begins[1:]), strict=True):
            result[mine] = self._shards[number].lengths(rows[mine] - self.firsts[number])
        return result

    def _run(self, start: int, stop: int) -> Ints:
        parts = [np.empty(0, dtype=np.int64)]
        number = int(np.searchsorted(self.firsts, start, side="right")) - 1
        while start < stop:
            first, end = int(self.firsts[number]), min(stop, int(self.firsts[number + 1]))
            parts.append(self._shards[number].lengths(np.arange(start - first, end - first)))
            start, number = end, number + 1
        return np.concatenate(parts) if len(parts) != 2 else parts[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("The lengths of a corpus lie in its files; an array of them is a copy.")
        lengths: Ints = self[:]
        return lengths.astype(dtype or np.int64, copy=False)

    def sum(self) -> int:
        return sum(shard.tokens for shard in self._shards)


def map_file(path: Path, dtype: Any = np.uint8, *, offset: int = 0, count: int | None = None) -> NDArray[Any]:
    """A file's numbers as a read-only array that is its pages; an empty file is an empty array.

    Args:
        dtype: data type of the numbers.
        offset: bytes before the first.
        count: how many; None takes all that the file has.

    Raises:
        CorpusError: the file cannot be read, or is too short.
    """
    size = np.dtype(dtype).itemsize
    try:
        there = max(path.stat().st_size - offset, 0) // size
        count = there if count is None else count
        if count > there:
            raise CorpusError(f"{path} is cut off: it should have {offset + count * size:,} bytes at least.")
        if count == 0:
            return np.empty(0, dtype)
        # A plain array, since slicing a np.memmap takes ten times as long.
        return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}.") from error
