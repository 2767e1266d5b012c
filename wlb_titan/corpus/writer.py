"""Writing a corpus, or one of given lengths without text, for plans where the real one is not at hand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from wlb_titan.arrays import Ints
from wlb_titan.corpus.corpus import Corpus
from wlb_titan.corpus.folder import (
    DOCUMENTS_FILE,
    LOCK_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    digest,
    written_whole,
)
from wlb_titan.corpus.shards import SOURCE, SPANS, TOKENS
from wlb_titan.corpus.tokenizer import MIN_VOCAB_SIZE, CorpusTokenizer, train_tokenizer

RECORD_BATCH_TOKENS = 1 << 20  # written at a time, or one document if it has more

LISTS = pa.list_(pa.int32())

SIGMA = 1.5  # of the logarithm of a synthetic length
SHAPE = f"log-normal with a median of a 32nd of the context window and sigma {SIGMA:g}, cut at the window"
"""The distribution of `long_tailed_lengths`, for reports."""


class DocumentWriter:
    """A context manager that writes one row per document; if `masked`, with spans (`SpanMask`)."""

    def __init__(self, path: Path, *, masked: bool = False, batch_tokens: int = RECORD_BATCH_TOKENS) -> None:
        columns = [(TOKENS, LISTS), ("length", pa.int32()), (SOURCE, pa.string())]
        self._schema = pa.schema([*columns, (SPANS, LISTS)] if masked else columns)
        self._writer = pa.ipc.new_stream(str(path), self._schema)
        self.masked = masked
        self._batch_tokens = batch_tokens
        self._names: list[str] = []
        self._tokens: list[np.ndarray] = []
        self._spans: list[np.ndarray] = []
        self._waiting = 0
        self._hash = hashlib.sha256()
        self.documents = self.tokens = self.learned = 0

    def add(self, name: str, tokens: np.ndarray, spans: np.ndarray | None = None) -> None:
        """Appends a document: its source, its int32 token ids, and if masked its int32 spans."""
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
        lengths = pa.array(np.array([len(tokens) for tokens in self._tokens], dtype=np.int32))
        columns = [_lists(self._tokens), lengths, pa.array(self._names, pa.string())]
        if self.masked:
            columns.append(_lists(self._spans))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._names, self._tokens, self._spans, self._waiting = [], [], [], 0

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._names:
            self._flush()
        self._writer.close()


def _lists(arrays: list[np.ndarray]) -> pa.ListArray:
    ends = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(arrays)))


def write_manifest(
    folder: Path,
    writer: DocumentWriter,
    tokenizer: CorpusTokenizer,
    settings: dict[str, Any],
    **counts: int,
) -> None:
    """Completes a corpus; `counts` of documents left out or cut are fields of the manifest."""
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


def long_tailed_lengths(tokens: int, longest: int, seed: int = 0) -> Ints:
    """int64 (documents,), lengths from `SHAPE` that add up to at least `tokens`. About one in a hundred is
    `longest`, and these have about a tenth of the tokens."""
    draw = np.random.default_rng(seed)
    median = max(longest // 32, 1)
    lengths = np.empty(0, dtype=np.int64)
    while lengths.sum() < tokens:
        more = draw.lognormal(np.log(median), SIGMA, size=max(256, tokens // (2 * median)))
        lengths = np.concatenate([lengths, np.clip(more, 1, longest).astype(np.int64)])
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def write_synthetic_corpus(path: Path, lengths: Ints) -> Corpus:
    """A new corpus of documents of these lengths, int64 (documents,), whose tokens are all 0."""
    with written_whole(path, replace=False) as folder:
        train_tokenizer(["a"], MIN_VOCAB_SIZE, folder / TOKENIZER_FOLDER)
        tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)
        zeros = np.zeros(int(lengths.max()), dtype=np.int32)
        with DocumentWriter(folder / DOCUMENTS_FILE) as writer:
            for number, length in enumerate(lengths.tolist()):
                writer.add(f"synthetic {number}", zeros[:length])
        write_manifest(folder, writer, tokenizer, {"source": "synthetic"}, empty_documents=0, unreadable=0)
    return Corpus.open(path)
