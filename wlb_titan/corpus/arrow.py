"""Arrow files with a column of token lists, as the `datasets` library writes them.

A file is a row of record batches, each with the offsets of its lists and their values. What is kept of a
batch are six numbers (`BATCH_COLUMNS`), found by going through the headers with pyarrow; everything else is
looked up in the mapped pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.corpus.shards import Tokens, map_file
from wlb_titan.errors import CorpusError

BATCH_COLUMNS = ("documents", "tokens", "offsets_at", "values_at", "begin", "end")
"""Of a batch: how many documents and tokens, the first byte of its offsets and of its values, the first byte
of its message and the first after it."""

TOKENS, SPANS = "input_ids", "learned"
"""Columns of a prepared corpus: token ids; of chat data which of them are learned, as `SpanMask` reads it."""


class ArrowShard:
    """One Arrow file in stream format. See `Shard`.

    Args:
        column: holds one list of token ids a document.

    Raises:
        CorpusError: the file cannot be read, is damaged, or has no such column of integers.
    """

    def __init__(self, path: Path, column: str = TOKENS) -> None:
        self.path = path
        self._column = column
        self._schema, self._batches = find_batches(path, column)
        wide, self._dtype = _list_type(self._schema, column, path)
        self._firsts = np.concatenate([[0], np.cumsum(self._batches[:, 0])])
        self.documents = int(self._firsts[-1])
        self.tokens = int(self._batches[:, 1].sum())
        self._pages = map_file(path)
        offset_type = np.dtype(np.int64 if wide else np.int32)
        self._offsets_at = self._batches[:, 2] // offset_type.itemsize
        self._offsets = _seen_as(self._pages, offset_type)
        self._values_at = self._batches[:, 3] // self._dtype.itemsize
        self._values = _seen_as(self._pages, self._dtype)

    def lengths(self, rows: Ints) -> Ints:
        batches, places = self._places(rows)
        lengths: Ints = (self._offsets[places + 1] - self._offsets[places]).astype(np.int64)
        if ((lengths < 0) | (lengths > self._batches[batches, 1])).any():
            raise self._damaged()
        return lengths

    def read(self, row: int, start: int, length: int) -> Tokens:
        batch, place = (int(found[0]) for found in self._places(np.array([row])))
        begin = int(self._values_at[batch] + self._offsets[place]) + start
        if not 0 <= begin <= begin + length <= len(self._values):
            raise self._damaged()
        return self._values[begin : begin + length]

    def read_several(self, rows: Ints) -> tuple[Tokens, Ints]:
        """The lists of several rows, one after the other, and int64 (n,), the length of each."""
        counts = self.lengths(rows)
        batches, places = self._places(rows)
        begins = self._values_at[batches] + self._offsets[places]
        if ((begins < 0) | (begins + counts > len(self._values))).any():
            raise self._damaged()
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._values[np.repeat(begins, counts) + within], counts

    def source(self, row: int) -> str:
        if "source" not in self._schema.names:
            return f"{self.path.name}[{row}]"
        batch = int(np.searchsorted(self._firsts, row, side="right")) - 1
        begin, end = self._batches[batch, 4:6].tolist()
        records = pa.ipc.read_record_batch(pa.py_buffer(self._pages[begin:end]), self._schema)
        return str(records.column("source")[row - int(self._firsts[batch])].as_py())

    def _places(self, rows: Ints) -> tuple[Ints, Ints]:
        """int64 (n,) each: the batch that has a row, and the place of the row's first offset."""
        batches = np.searchsorted(self._firsts, rows, side="right") - 1
        return batches, self._offsets_at[batches] + (rows - self._firsts[batches])

    def _damaged(self) -> CorpusError:
        return CorpusError(
            f"{self.path} is damaged: offsets of its lists {self._column!r} point outside them. Copy it "
            "again from where it came, or write it again."
        )


def columns_of(path: Path) -> list[str]:
    """The names of a file's columns."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            return list(stream.schema.names)
    except (OSError, pa.ArrowInvalid) as error:
        raise CorpusError(f"{path} cannot be read ({error}).") from error


def find_batches(path: Path, column: str) -> tuple[pa.Schema, Ints]:
    """Goes through the messages of a file.

    Returns:
        The file's schema, and int64 (batches, 6), `BATCH_COLUMNS` of the batches that have documents.

    Raises:
        CorpusError: the file cannot be read, is compressed, or has no such column of integers.
    """
    batches = []
    try:
        with pa.memory_map(str(path)) as file:
            base, size = file.read_buffer().address, file.size()
            file.seek(0)
            with pa.ipc.open_stream(file) as stream:
                schema, end = stream.schema, file.tell()
                wide, _ = _list_type(schema, column, path)
                for records in stream:
                    begin, end = end, file.tell()
                    records.validate()
                    if not records.num_rows:
                        continue
                    lists = records.column(column)
                    _, offsets, _, values = lists.buffers()
                    at = (offsets.address - base, (values.address if values else offsets.address) - base)
                    if not all(0 <= place < size for place in at):
                        raise CorpusError(f"{path} is compressed, so it cannot be read in place.")
                    first = at[0] + lists.offset * (8 if wide else 4)
                    tokens = lists.offsets[-1].as_py() - lists.offsets[0].as_py()
                    batches.append((len(lists), tokens, first, at[1], begin, end))
    except (OSError, pa.ArrowInvalid) as error:
        raise CorpusError(f"{path} cannot be read ({error}).") from error
    return schema, np.array(batches, dtype=np.int64).reshape(-1, len(BATCH_COLUMNS))


def _seen_as(pages: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    return pages[: len(pages) // dtype.itemsize * dtype.itemsize].view(dtype)


def _list_type(schema: pa.Schema, column: str, path: Path) -> tuple[bool, np.dtype[Any]]:
    """Whether the lists' offsets have 64 bits, and the type of the token ids."""
    if column not in schema.names:
        lists = [field.name for field in schema if pa.types.is_list(field.type)]
        raise CorpusError(
            f"{path} has no column {column!r}; it has {', '.join(schema.names)}. Name the one that holds the "
            f"token ids with `column`{f', such as {lists[0]!r}' if lists else ''}."
        )
    kind = schema.field(column).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(
        kind.value_type
    ):
        raise CorpusError(
            f"The column {column!r} of {path} holds {kind}, but must hold a list of integers for each "
            "document, of its own length."
        )
    return pa.types.is_large_list(kind), np.dtype(str(kind.value_type))
