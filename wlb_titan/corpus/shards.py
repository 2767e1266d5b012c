"""Files of documents, each read by the index that came with it, and many of them read as one.

Index and tokens are memory-mapped: opening reads only headers, and all processes of a machine share one copy
in the page cache.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wlb_titan.arrays import Bools, Ints
from wlb_titan.errors import CorpusError, refusing, regular_file

Tokens = NDArray[np.integer[Any]]

BLOCK = 1 << 20  # lengths compared at a time
IGNORED = -100  # the label of a token that is not learned
INDEX_BLOCK = 1 << 16  # documents of an index compared at a time; they fit into a cache
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
DATATROVE_TYPES = {2: "<u2", 4: "<u4"}


class Shard:
    """Documents of one file, numbered from 0. Subclasses find them."""

    path: Path
    documents: int
    tokens: int  # of all documents
    values: Tokens  # all numbers of the file, in its own integer type; read-only, mapped
    mask: LabelMask | None = None  # which tokens are learned; None learns all

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        """int64 (n,) each: the documents' first tokens in `values`, and the ones after their last."""
        raise NotImplementedError

    def lengths(self, rows: Ints) -> Ints:
        begins, ends = self.bounds(rows)
        return ends - begins

    def read(self, row: int, start: int, length: int | None = None) -> Tokens:
        """A read-only view of a document from token `start` on: `length` tokens, or all."""
        begin, end = (int(bound[0]) for bound in self.bounds(np.array([row])))
        if length is None:
            length = end - begin - start
        if start < 0 or length < 0 or begin + start + length > end:
            tokens = f"tokens {start}:{start + length} of {self.source(row)}"
            raise IndexError(f"{tokens}, which has {end - begin} tokens")
        return self.values[begin + start : begin + start + length]

    def gathered(self, rows: Ints, most: int) -> Tokens:
        """The first `most` tokens of each document, one after the other."""
        begins, ends = self.bounds(rows)
        ends = np.minimum(ends, begins + most)
        gaps = np.flatnonzero(begins[1:] != ends[:-1]) + 1  # documents mostly follow each other
        runs = zip(begins[[0, *gaps]].tolist(), ends[[*(gaps - 1), -1]].tolist(), strict=True)
        return np.concatenate([self.values[begin:end] for begin, end in runs])

    def check_columns(self) -> None:
        """Refuses columns beside the tokens by which these are not just a document."""

    def source(self, row: int) -> str:
        """Where the document came from, if the file tells."""
        return f"{self.path.name}[{row}]"


class LabelMask:
    """A value for each token: 0 or 1, or with `labels` a label. Messages say `name`, the column or file."""

    def __init__(self, values: Shard, tokens: Shard, *, labels: bool, name: str) -> None:
        if values.documents != tokens.documents:
            raise CorpusError(
                f"The mask {name} has {values.documents:,} documents, but {tokens.path} has "
                f"{tokens.documents:,}; write both from the same documents."
            )
        for start in range(0, tokens.documents, BLOCK):
            rows = np.arange(start, min(start + BLOCK, tokens.documents))
            counts, wanted = values.lengths(rows), tokens.lengths(rows)
            if (different := np.flatnonzero(counts != wanted)).size:
                place = int(different[0])
                raise CorpusError(
                    f"The mask {name} has {counts[place]:,} values for {tokens.source(start + place)}, which "
                    f"has {wanted[place]:,} tokens; it must have one value for each token."
                )
        self._values, self._tokens, self._labels, self._name = values, tokens, labels, name

    def read(self, row: int, start: int, length: int) -> Bools:
        """bool (length,), which of these tokens of a document are learned; other values are refused."""
        values = self._values.read(row, start, length)
        refused = self._refused(values, self._tokens.read(row, start, length))
        if refused.any():
            place = int(np.argmax(refused))
            raise CorpusError(self._complaint(row, start + place, int(values[place])))
        return self._learned(values)

    def fits(self, rows: Ints, most: int) -> bool:
        """Whether `read` takes the first `most` values of each of these documents."""
        return not self._refused(self._values.gathered(rows, most), self._tokens.gathered(rows, most)).any()

    def count(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        """int64 (n,), learned tokens among start .. stop - 1 of each document; most are there whole."""
        begins, ends = self._values.bounds(rows)
        counts, values = self._of_documents[rows], self._values.values
        (parts,) = np.nonzero((starts != 1) | (begins + stops != ends))
        for part, begin in zip(parts.tolist(), begins[parts].tolist(), strict=True):
            counts[part] = np.count_nonzero(self._learned(values[begin + starts[part] : begin + stops[part]]))
        return counts

    @cached_property
    def _of_documents(self) -> Ints:
        """int64 (documents,), learned tokens of each document without its first. Reads the whole mask, which
        takes a second for 10^9 tokens, in the first step and not when a corpus is opened."""
        documents, labels = self._values.documents, [np.zeros(0, dtype=np.int64)]
        at_a_time = max(BLOCK * documents // max(self._values.tokens, 1), 1)
        for start in range(0, documents, at_a_time):
            rows = np.arange(start, min(start + at_a_time, documents))
            lengths, learned = self._values.lengths(rows), self._learned(self._values.gathered(rows, 1 << 62))
            ends, before = np.cumsum(lengths), np.cumsum(np.append(0, learned))
            labels.append(before[ends] - before[np.minimum(ends - lengths + 1, ends)])
        return np.concatenate(labels)

    def _refused(self, values: Tokens, tokens: Tokens) -> Bools:
        learned = self._learned(values)
        refused: Bools = learned & (values != tokens) if self._labels else ~learned & (values != 0)
        return refused

    def _learned(self, values: Tokens) -> Bools:
        learned: Bools = values != IGNORED if self._labels else values == 1
        return learned

    def _complaint(self, row: int, place: int, value: int) -> str:
        where = f"Token {place} of {self._tokens.source(row)}"
        if not self._labels:
            return f"{where} has the value {value} in the mask {self._name}; a mask has 1 and 0 only."
        token = int(self._tokens.read(row, place, 1)[0])
        return (
            f"{where} is {token}, and its label in {self._name} is {value}; a label is the token at its own "
            f"place, or {IGNORED}. Labels that are shifted by one already must be shifted back."
        )


class MegatronShard(Shard):
    """PREFIX.bin and PREFIX.idx (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`), little-endian:

        9 bytes   MMIDIDX, two zero bytes
        uint64    version, 1
        uint8     type of the tokens
        uint64    S, number of sequences
        uint64    D + 1, number of documents, plus one
        int32     (S,) tokens of each sequence
        int64     (S,) first byte of each sequence in PREFIX.bin
        int64     (D + 1,) first sequence of each document, and S
        int8      (S,) modes, in multimodal datasets only; not read

    A document that was split into sentences has several sequences. Without ends of documents (D = 0), every
    sequence is a document.
    """

    def __init__(self, prefix: Path) -> None:
        index, self.path = (prefix.with_name(prefix.name + ending) for ending in (".idx", ".bin"))
        for file in (index, self.path):
            if not file.is_file():
                names = f"{index.name} and {self.path.name}"
                raise CorpusError(f"A Megatron dataset consists of {names}; there is no {file}.")
        with index.open("rb") as stream:
            header = stream.read(MEGATRON_HEADER.size)
        if not header.startswith(MEGATRON_MAGIC) or len(header) < MEGATRON_HEADER.size:
            raise CorpusError(f"{index} is not the index of a Megatron dataset.")
        _, version, code, sequences, ends = MEGATRON_HEADER.unpack(header)
        if version != 1 or code not in MEGATRON_TYPES:
            readable = f"known are version 1 and the types {', '.join(map(str, MEGATRON_TYPES))}"
            raise CorpusError(f"{index} has version {version} and tokens of type {code}; {readable}.")
        dtype = np.dtype(MEGATRON_TYPES[code])
        begins_at = MEGATRON_HEADER.size + 4 * sequences
        modes_at = begins_at + 8 * (sequences + ends)
        if index.stat().st_size < modes_at:
            raise CorpusError(f"{index} is truncated; copy it again.")
        lengths = mapped(index, "<i4", sequences, MEGATRON_HEADER.size)
        self._begins = mapped(index, "<i8", sequences, begins_at)  # bytes
        self._firsts = mapped(index, "<i8", ends, begins_at + 8 * sequences)
        modes = mapped(index, np.int8, -1, modes_at)
        self._end = 0
        whole = len(modes) in (0, sequences) and not modes.any()
        for at in range(0, sequences, INDEX_BLOCK):
            sizes = lengths[at : at + INDEX_BLOCK].astype(np.int64) * dtype.itemsize
            stops = self._end + np.cumsum(sizes)
            whole &= bool(((self._begins[at : at + INDEX_BLOCK] == stops - sizes) & (sizes >= 0)).all())
            self._end = int(stops[-1])
        least, most = _steps(self._firsts)
        if ends > 1:
            whole &= self._firsts[0] == 0 and least >= 0 and self._firsts[-1] == sequences
        if not whole or self._end != self.path.stat().st_size:
            raise CorpusError(
                f"{index} and {self.path.name} do not belong together: sequences must follow each other from "
                f"byte 0 to the end, and documents likewise. Copy or write both again."
            )
        self.values = mapped(self.path, dtype)
        self.tokens = len(self.values)
        # Usually each document is one sequence, and there is nothing to look up.
        single = ends <= 1 or least == most == 1
        self._lengths = lengths if single else None
        self.documents = sequences if single else ends - 1

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        if self._lengths is not None:
            begins = self._begins[rows] // self.values.itemsize
            return begins, begins + self._lengths[rows]
        return self._first_token(rows), self._first_token(rows + 1)

    def _first_token(self, rows: Ints) -> Ints:
        """For documents of several sequences; after the last, the file's end."""
        sequences = self._firsts[rows]
        inside = sequences < len(self._begins)
        result = np.full(len(rows), self._end, dtype=np.int64)
        result[inside] = self._begins[sequences[inside]]
        return result // self.values.itemsize


def _steps(numbers: Ints) -> tuple[int, int]:
    """The smallest and the largest difference of neighbours; (1, 1) of 0, 1, 2, ..."""
    steps = (np.diff(numbers[at : at + INDEX_BLOCK + 1]) for at in range(0, len(numbers) - 1, INDEX_BLOCK))
    bounds = [(int(step.min()), int(step.max())) for step in steps] or [(1, 1)]
    return min(least for least, _ in bounds), max(most for _, most in bounds)


class DatatroveShard(Shard):
    """NAME.ds and NAME.ds.index (datatrove, `pipeline/tokens/tokenizer.py`).

    Tokens are uint16 or uint32, which the files' sizes tell; the index has a uint64 per document, the number
    of tokens up to its end. With `loss` the values are those of NAME.ds.loss (`save_loss_metadata`): a byte
    for each token, 1 if learned.
    """

    def __init__(self, path: Path, *, loss: bool = False) -> None:
        index = path.with_name(path.name + ".index")
        if not index.is_file():
            raise CorpusError(f"{path} has no index {index.name}; write it with datatrove's save_index=True.")
        self.path = path.with_name(path.name + ".loss") if loss else path
        # Signed, so that they can be subtracted; tokens are far fewer than 2^63.
        self._ends = mapped(index, "<i8")
        self.documents = len(self._ends)
        self.tokens = int(self._ends[-1]) if self.documents else 0
        if self.documents and min(self._ends[0], _steps(self._ends)[0]) < 0:
            raise CorpusError(f"{index} is damaged: its numbers do not ascend. Copy it again.")
        size, types = self.path.stat().st_size, {1: "u1"} if loss else DATATROVE_TYPES
        dtype = next((kind for width, kind in types.items() if size == width * self.tokens), None)
        if dtype is None:
            tokens = f"{self.tokens:,} tokens of {' or '.join(map(str, types))} bytes"
            raise CorpusError(
                f"{self.path} has {size:,} bytes, but {index.name} describes {tokens}; copy both again."
            )
        self.values = mapped(self.path, dtype)

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        return np.where(rows > 0, self._ends[rows - 1], 0), self._ends[rows]


class Lengths:
    """The lengths of all documents of several shards, looked up on demand.

    Like a read-only int64 array (documents,): `lengths[17]`, `lengths[5:9]`, `lengths[rows]`, `len(lengths)`,
    `np.asarray(lengths)`. Only the last copies all of them.
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
            assert step == 1, "lengths are read in runs without gaps"
            parts = [np.empty(0, dtype=np.int64)]
            for shard, first in zip(self._shards, self.firsts.tolist(), strict=False):
                inside = np.arange(max(start - first, 0), min(stop - first, shard.documents))
                if len(inside):
                    parts.append(shard.lengths(inside))
            return np.concatenate(parts)
        if isinstance(rows, int | np.integer):
            return int(self[np.array([rows])][0])
        rows = np.asarray(rows, dtype=np.int64)
        result = np.empty(len(rows), dtype=np.int64)
        for shard, indices, places in self.by_shard(rows):
            result[indices] = shard.lengths(places)
        return result

    def by_shard(self, rows: Ints) -> Iterator[tuple[Shard, Ints, Ints]]:
        """The shards of these documents, with their indices in `rows` and their numbers in the shard."""
        numbers = np.searchsorted(self.firsts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        shards, begins = np.unique(numbers[order], return_index=True)
        for number, indices in zip(shards, np.split(order, begins[1:]), strict=False):
            yield self._shards[number], indices, rows[indices] - self.firsts[number]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        lengths: Ints = self[:]
        return lengths.astype(dtype or np.int64, copy=False)

    def sum(self) -> int:
        return sum(shard.tokens for shard in self._shards)


def mapped(path: Path, dtype: Any, count: int = -1, offset: int = 0) -> NDArray[Any]:
    """A file's numbers, mapped and read-only: all, or `count` of them from byte `offset` on."""
    what = f"{path} is truncated or cannot be read"
    with refusing(lambda reason: CorpusError(f"{what} ({reason}); copy it again.")):
        return np.frombuffer(pa.memory_map(str(regular_file(path))).read_buffer(), dtype, count, offset)
