"""Arrow files with a column of token lists, as the `datasets` library writes them.

A file is a row of record batches, each with the offsets of its lists and their values. What is kept of a
batch is where these two begin in the file, 24 bytes; everything else is looked up in the mapped pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wlb_titan.corpus.shards import Ints, Tokens, map_file
from wlb_titan.errors import CorpusError


class ArrowShard:
    """One Arrow file in stream format. See `Shard`.

    Args:
        path: the file.
        column: holds one list of token ids a document.

    Raises:
        CorpusError: the file cannot be read or has no such column of integers.
    """

    def __init__(self, path: Path, column: str = "input_ids") -> None:
        self.path = path
        firsts, offsets_at, values_at = [0], [], []
        self.tokens = 0
        try:
            with pa.memory_map(str(path)) as file:
                base, size = file.read_buffer().address, file.size()
                file.seek(0)
                with pa.ipc.open_stream(file) as stream:
                    wide, self._dtype = _list_type(stream.schema, column, path)
                    for batch in stream:
                        if not batch.num_rows:
                            continue
                        lists = batch.column(column)
                        _, offsets, _, values = lists.buffers()
                        at = (offsets.address - base, (values.address if values else offsets.address) - base)
                        if not all(0 <= place < size for place in at):
                            raise CorpusError(f"{path} is compressed, so it cannot be read in place.")
                        firsts.append(firsts[-1] + len(lists))
                        offsets_at.append(at[0] // (8 if wide else 4) + lists.offset)
                        values_at.append(at[1] // self._dtype.itemsize)
                        self.tokens += lists.offsets[-1].as_py() - lists.offsets[0].as_py()
        except (OSError, pa.ArrowInvalid) as error:
            raise CorpusError(f"{path} cannot be read ({error}).") from error
        self._firsts = np.array(firsts, dtype=np.int64)
        self._offsets_at = np.array(offsets_at, dtype=np.int64)
        self._values_at = np.array(values_at, dtype=np.int64)
        pages = map_file(path)
        self._offsets = _seen_as(pages, np.dtype(np.int64 if wide else np.int32))
        self._values = _seen_as(pages, self._dtype)
        self.documents = firsts[-1]

    def lengths(self, rows: Ints) -> Ints:
        batches = np.searchsorted(self._firsts, rows, side="right") - 1
        places = self._offsets_at[batches] + (rows - self._firsts[batches])
        lengths: Ints = (self._offsets[places + 1] - self._offsets[places]).astype(np.int64)
        return lengths

    def run_of_lengths(self, start: int, stop: int) -> Ints:
        return self.lengths(np.arange(start, stop))

    def read(self, row: int, start: int, length: int) -> Tokens:
        batch = int(np.searchsorted(self._firsts, row, side="right")) - 1
        place = self._offsets_at[batch] + (row - self._firsts[batch])
        begin = int(self._values_at[batch] + self._offsets[place]) + start
        return self._values[begin : begin + length]

    def source(self, row: int) -> str:
        with pa.memory_map(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            if "source" in stream.schema.names:
                return str(stream.read_all().column("source")[row].as_py())
        return f"{self.path.name}[{row}]"


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
            f"The column {column!r} of {path} holds {kind}, but a document must be a list of integers of its "
            "own length."
        )
    return pa.types.is_large_list(kind), np.dtype(str(kind.value_type))
