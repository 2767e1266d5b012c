"""Files of documents, each read by the index that came with it, and many of them read as one.

Index and tokens are memory-mapped: opening reads only headers, and all processes of a machine share one copy
in the page cache.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.errors import CorpusError, reading, regular

if TYPE_CHECKING:
    from wlb_titan.corpus.formats import LabelMask

Tokens = NDArray[np.integer[Any]]

# Columns of a prepared corpus: token ids, which of them are learned, and where the text came from.
TOKENS, MASK, SOURCE = "input_ids", "assistant_masks", "source"

ROWS, POSITIONS = "seq_lengths", "position_ids"
PLAIN: dict[str, Any] = {"attention_mask": 1, "token_type_ids": 0, POSITIONS: None, ROWS: None}
"""Columns that may lie beside the tokens, with what they say of a row that is one document."""

BLOCK = 1 << 20  # lengths compared at a time
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


class ArrowShard(Shard):
    """An Arrow file in stream format, as of `datasets`; `column` has a list of integers per document."""

    def __init__(self, path: Path, column: str = TOKENS) -> None:
        self.path, self._column = path, column
        self.beside: dict[str, ArrowShard] = {}  # those of `PLAIN`
        with reading(lambda reason: CorpusError(f"{path} cannot be read ({reason}).")):
            self._pages = pa.memory_map(str(regular(path))).read_buffer()
            table = self._table()
            table.validate()
            self.columns, self.schema = table.column_names, table.schema
        offset_type, dtype = _list_types(table.schema, column, path)
        # The whole file as offsets and as values, so that one lookup serves all record batches.
        self._offsets, self.values = (
            np.frombuffer(self._pages, kind, self._pages.size // kind.itemsize)
            for kind in (offset_type, dtype)
        )
        lists = [chunk for chunk in table.column(column).chunks if len(chunk)]
        at = np.array([_addresses(chunk) for chunk in lists], dtype=np.int64).reshape(-1, 2)
        at -= self._pages.address
        if ((at < 0) | (at >= self._pages.size)).any():
            raise CorpusError(
                f"{path} is compressed, so it cannot be read in place; write it without compression."
            )
        offsets_at, self._values_at = at[:, 0] // offset_type.itemsize, at[:, 1] // dtype.itemsize
        self._sizes = np.array([len(chunk.values) for chunk in lists], dtype=np.int64)
        counts = np.array([len(chunk) for chunk in lists], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts  # rows
        for first, chunk in zip(self._firsts, lists, strict=True):
            if chunk.null_count or chunk.values.null_count:
                nulls = (i for i, row in enumerate(chunk) if row.values is None or row.values.null_count)
                where = f"Row {first + next(nulls, 0)} of {path}"
                raise CorpusError(
                    f"{where} has a null in the column {column!r}, where every entry must be a number."
                )
        self._first_offsets = offsets_at - self._firsts  # where that of row 0 would be
        self.documents = int(counts.sum())
        begins, ends = self._offsets[offsets_at], self._offsets[offsets_at + counts]
        self.tokens = int((ends - begins).sum(dtype=np.int64))

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        batches = np.searchsorted(self._firsts, rows, side="right") - 1
        at = self._first_offsets[batches] + rows
        begins, ends = self._offsets[at], self._offsets[at + 1]
        if ((begins < 0) | (ends < begins) | (ends > self._sizes[batches])).any():
            raise CorpusError(
                f"{self.path} is damaged: offsets of its column {self._column!r} point outside the file. "
                "Copy it again."
            )
        values_at = self._values_at[batches]
        return values_at + begins, values_at + ends

    def check_columns(self) -> None:
        rows = max((1 << 18) * self.documents // max(self.tokens, 1), 1)  # at a time
        for name, column in self.beside.items():
            for start in range(0, self.documents, rows):
                block = np.arange(start, min(start + rows, self.documents))
                lengths = self.lengths(block)
                counts, wanted = column.lengths(block), np.ones_like(lengths) if name == ROWS else lengths
                plain: Any = lengths if name == ROWS else PLAIN.get(name)
                if name == POSITIONS:
                    plain = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                if (counts != wanted).any() or (column.gathered(block, 1 << 62) != plain).any():
                    raise CorpusError(
                        f"{self.path} has a column {name!r} that shows rows with padding or with several "
                        "documents. Save the dataset as it was before it was padded or packed: documents are "
                        "packed during training."
                    )

    def source(self, row: int) -> str:
        return str(self._table().column(SOURCE)[row]) if SOURCE in self.columns else super().source(row)

    def _table(self) -> pa.Table:
        """Views of the file."""
        with pa.ipc.open_stream(self._pages) as stream:
            return stream.read_all()


def _addresses(lists: pa.Array) -> tuple[int, int]:
    _, offsets, _, values = lists.buffers()
    return offsets.address, (values or offsets).address


def _list_types(schema: pa.Schema, column: str, path: Path) -> tuple[np.dtype[Any], np.dtype[Any]]:
    if column not in schema.names:
        lists = [field.name for field in schema if pa.types.is_list(field.type)]
        raise CorpusError(
            f"{path} has no column {column!r}; it has {', '.join(schema.names)}. Name the one that holds the "
            f"token ids with `column`{f', such as {lists[0]!r}' if lists else ''}."
        )
    kind = schema.field(column).type
    large = pa.types.is_large_list(kind)
    if not (large or pa.types.is_list(kind)) or not pa.types.is_integer(kind.value_type):
        raise CorpusError(
            f"The column {column!r} of {path} holds {kind}, but must hold a list of integers. Save the "
            f"dataset with .cast_column({column!r}, datasets.List(datasets.Value('int32')))."
        )
    return np.dtype(np.int64 if large else np.int32), np.dtype(str(kind.value_type))


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
    with reading(lambda reason: CorpusError(f"{what} ({reason}); copy it again.")):
        return np.frombuffer(pa.memory_map(str(regular(path))).read_buffer(), dtype, count, offset)
