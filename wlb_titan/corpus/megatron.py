"""Megatron's indexed datasets: PREFIX.bin holds the tokens, PREFIX.idx says where documents begin.

The index (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`), little-endian:

    9 bytes   MMIDIDX, two zero bytes
    uint64    version, 1
    uint8     type of the tokens
    uint64    S, number of sequences
    uint64    D + 1, number of documents, plus one
    int32     (S,) tokens of each sequence
    int64     (S,) first byte of each sequence in PREFIX.bin
    int64     (D + 1,) first sequence of each document, and S
    int8      (S,) modes, in multimodal datasets only; not read

A document is a sequence unless it was split into sentences; then it is all its sequences. Where no ends of
documents were written (D = 0), every sequence is a document.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.corpus.shards import TokenFile, map_file
from wlb_titan.errors import CorpusError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
BLOCK = 1 << 16  # documents looked at together, as many as a cache holds
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class MegatronShard(TokenFile):
    """PREFIX.bin and PREFIX.idx.

    Raises:
        CorpusError: a file is missing, damaged or of another version.
    """

    def __init__(self, prefix: Path) -> None:
        index, self.path = (prefix.with_name(prefix.name + ending) for ending in (".idx", ".bin"))
        for file in (index, self.path):
            if not file.is_file():
                raise CorpusError(
                    f"Megatron's {index.name} and {self.path.name} go together; there is no {file}."
                )
        with index.open("rb") as stream:
            header = stream.read(HEADER.size)
        if not header.startswith(MAGIC) or len(header) < HEADER.size:
            raise CorpusError(f"{index} is no index of a Megatron dataset: it does not begin like one.")
        _, version, code, sequences, ends = HEADER.unpack(header)
        if version != 1 or code not in TOKEN_TYPES:
            raise CorpusError(
                f"{index} has version {version} and tokens of type {code}; known are version 1 and the "
                f"types {', '.join(map(str, TOKEN_TYPES))}, which are integers."
            )
        dtype = np.dtype(TOKEN_TYPES[code])
        begins_at = HEADER.size + 4 * sequences
        lengths = map_file(index, "<i4", offset=HEADER.size, count=sequences)
        self._begins = map_file(index, "<i8", offset=begins_at, count=sequences)
        firsts = map_file(index, "<i8", offset=begins_at + 8 * sequences, count=ends)
        self._itemsize = dtype.itemsize
        size = self.path.stat().st_size
        last = int(self._begins[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
        if last > size:
            raise CorpusError(
                f"{self.path} has {size:,} bytes, but its index speaks of {last:,}; copy it again."
            )
        self._values = map_file(self.path, dtype)
        self._end = last
        # Most often each document is one sequence, and then there is nothing to look up.
        single = ends <= 1 or (ends - 1 == sequences and _consecutive(firsts))
        self._lengths = lengths if single else None
        self._firsts = firsts
        self.documents = sequences if self._lengths is not None else ends - 1
        self.tokens = last // dtype.itemsize

    def bounds(self, rows: Ints) -> tuple[Ints, Ints]:
        if self._lengths is not None:
            begins = self._begins[rows] // self._itemsize
            return begins, begins + self._lengths[rows]
        return self._byte(rows) // self._itemsize, self._byte(rows + 1) // self._itemsize

    def _byte(self, rows: Ints) -> Ints:
        """The first byte of documents of several sequences; of the one past the last, the file's end."""
        sequences = self._firsts[rows]
        inside = sequences < len(self._begins)
        result = np.full(len(rows), self._end, dtype=np.int64)
        result[inside] = self._begins[sequences[inside]]
        return result


def _consecutive(firsts: Ints) -> bool:
    """Whether these are 0, 1, 2, ... They are not where one document has no sequences and another has two."""
    blocks = (firsts[at : at + BLOCK + 1] for at in range(0, len(firsts) - 1, BLOCK))
    return all((np.diff(block) == 1).all() for block in blocks)
