"""Writing documents into an Arrow file with the `datasets` library, and the manifest of a corpus."""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

from wlb_titan.corpus.arrow import SPANS, TOKENS
from wlb_titan.corpus.manifest import Manifest, digest
from wlb_titan.corpus.replace import LOCK_FILE
from wlb_titan.corpus.tokenizer import CorpusTokenizer

FEATURES = {
    TOKENS: datasets.List(datasets.Value("int32")),
    "length": datasets.Value("int32"),
    "source": datasets.Value("string"),
}

RECORD_BATCH_TOKENS = 1 << 20
"""Tokens written at a time, or one document if it has more; bounds the memory, not the documents."""


class DocumentWriter:
    """A context manager that writes one row a document.

    Args:
        masked: whether every document comes with the spans of its learned tokens, as of `SpanMask`.
    """

    def __init__(self, path: Path, *, masked: bool = False, batch_tokens: int = RECORD_BATCH_TOKENS) -> None:
        features = FEATURES | ({SPANS: datasets.List(datasets.Value("int32"))} if masked else {})
        self._writer = ArrowWriter(stream=path.open("wb"), features=datasets.Features(features))
        self.masked = masked
        self._spans: list[np.ndarray] = []
        self._batch_tokens = batch_tokens
        self._names: list[str] = []
        self._tokens: list[np.ndarray] = []
        self._waiting = 0
        self._hash = hashlib.sha256()
        self.documents = 0
        self.tokens = 0
        self.learned = 0

    def add(self, name: str, tokens: np.ndarray, spans: np.ndarray | None = None) -> None:
        """Append a document: where it comes from, its int32 token ids, of masked ones the int32 spans."""
        assert (spans is not None) == self.masked
        self._names.append(name)
        self._tokens.append(tokens)
        self._waiting += len(tokens)
        self._hash.update(len(tokens).to_bytes(8, "little"))
        self._hash.update(tokens.tobytes())
        if spans is not None:
            self._spans.append(spans)
            self._hash.update(spans.tobytes())
            self.learned += int(spans[1::2].sum() - spans[::2].sum())
        self.documents += 1
        self.tokens += len(tokens)
        if self._waiting >= self._batch_tokens:
            self._flush()

    def digest(self) -> bytes:
        """SHA-256 of the lengths, token ids and spans added so far."""
        return self._hash.digest()

    def _flush(self) -> None:
        columns = {
            TOKENS: _lists(self._tokens),
            "length": pa.array(np.array([len(tokens) for tokens in self._tokens], dtype=np.int32)),
            "source": pa.array(self._names, pa.string()),
        }
        if self.masked:
            columns[SPANS] = _lists(self._spans)
            self._spans = []
        self._writer.write_table(pa.table(columns), writer_batch_size=len(self._names))
        self._names, self._tokens, self._waiting = [], [], 0

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._names:
            self._flush()
        self._writer.finalize()


def write_manifest(
    folder: Path,
    writer: DocumentWriter,
    tokenizer: CorpusTokenizer,
    settings: dict[str, Any],
    **counts: Any,
) -> None:
    """Completes the corpus in a folder by its manifest.

    Args:
        writer: has written its documents.
        settings, counts: of the manifest; `counts` are of documents that are not as they were.
    """
    there = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK_FILE]
    files = {path.relative_to(folder).as_posix(): path for path in there}
    Manifest(
        fingerprint=hashlib.sha256(tokenizer.digest + writer.digest()).hexdigest()[:16],
        documents=writer.documents,
        tokens=writer.tokens,
        masked=writer.masked,
        learned_tokens=writer.learned,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        tokenizer_sha256=tokenizer.digest.hex(),
        settings=settings,
        files={name: path.stat().st_size for name, path in files.items()},
        digests={name: digest(path) for name, path in files.items()},
        **counts,
    ).save(folder)


def _lists(arrays: list[np.ndarray]) -> pa.ListArray:
    """A list for each array of int32."""
    ends = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(arrays)))
