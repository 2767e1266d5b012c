"""Writing documents into an Arrow file with the `datasets` library."""

import hashlib
from pathlib import Path
from types import TracebackType

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "length": datasets.Value("int32"),
        "source": datasets.Value("string"),
    }
)

RECORD_BATCH_TOKENS = 1 << 20
"""Tokens written at a time, or one document if it has more; bounds the memory, not the documents."""


class DocumentWriter:
    """A context manager that writes one row a document.

    Attributes:
        documents: number of documents added so far.
        tokens: number of tokens added so far.
    """

    def __init__(self, path: Path, *, batch_tokens: int = RECORD_BATCH_TOKENS) -> None:
        self._writer = ArrowWriter(stream=path.open("wb"), features=FEATURES)
        self._batch_tokens = batch_tokens
        self._names: list[str] = []
        self._tokens: list[np.ndarray] = []
        self._waiting = 0
        self._hash = hashlib.sha256()
        self.documents = 0
        self.tokens = 0

    def add(self, name: str, tokens: np.ndarray) -> None:
        """Append a document: where it comes from, and its int32 token ids."""
        self._names.append(name)
        self._tokens.append(tokens)
        self._waiting += len(tokens)
        self._hash.update(len(tokens).to_bytes(8, "little"))
        self._hash.update(tokens.tobytes())
        self.documents += 1
        self.tokens += len(tokens)
        if self._waiting >= self._batch_tokens:
            self._flush()

    def digest(self) -> bytes:
        """SHA-256 of the lengths and token ids added so far."""
        return self._hash.digest()

    def _flush(self) -> None:
        lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int32)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        table = pa.table(
            {
                "input_ids": pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(self._tokens))),
                "length": pa.array(lengths),
                "source": pa.array(self._names, pa.string()),
            }
        )
        self._writer.write_table(table, writer_batch_size=len(self._names))
        self._names, self._tokens, self._waiting = [], [], 0

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._names:
            self._flush()
        self._writer.finalize()
