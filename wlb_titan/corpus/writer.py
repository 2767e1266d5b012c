"""Writing a corpus: its documents, as `datasets` writes them, in a folder that appears when it is complete.

A corpus is written inside a sibling, `.NAME.partial`, and moved to its place at the end. The writer holds a
lock in there, which the kernel drops when the process dies: so what a killed process left can be told from a
folder in use, and is deleted by the next one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from wlb_titan.arrays import Ints
from wlb_titan.corpus.corpus import TOKENIZER_FOLDER, Corpus, Preparation, partial_folder
from wlb_titan.corpus.formats import fingerprint_of
from wlb_titan.corpus.shards import MASK, SOURCE, TOKENS
from wlb_titan.corpus.tokenizer import MIN_VOCAB_SIZE, CorpusTokenizer, Document, batched, train_tokenizer
from wlb_titan.errors import CorpusError

DOCUMENTS_FILE = "data-00000-of-00001.arrow"  # as `datasets` calls a file that is alone
BATCH_TOKENS = 1 << 20  # of a record batch, which has one document if that has more


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` at the end, or is deleted if anything fails."""
    partial = partial_folder(path)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(partial / "lock", timeout=0):
            folder = partial / "corpus"
            shutil.rmtree(folder, ignore_errors=True)  # of a killed process
            folder.mkdir()
            try:
                yield folder
                folder.rename(path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except Timeout:
        raise CorpusError(
            f"Another process is preparing {path} at this moment; wait for it, or name another folder."
        ) from None


class Written(NamedTuple):
    documents: int
    tokens: int
    learned_tokens: int | None  # None without masks


def write_documents(folder: Path, documents: Iterable[Document], *, masked: bool = False) -> Written:
    """Writes documents, which have masks or do not, so that `datasets.load_from_disk` opens the folder."""
    import datasets  # takes a second
    from datasets.arrow_writer import ArrowWriter

    columns: dict[str, Any] = {TOKENS: datasets.List(datasets.Value("int32"))}
    if masked:
        columns[MASK] = datasets.List(datasets.Value("int8"))
    features = datasets.Features(columns | {SOURCE: datasets.Value("string")})
    count = tokens = learned = 0
    file = folder / DOCUMENTS_FILE
    # Batches are bounded by their tokens, so not by their rows.
    with ArrowWriter(features=features, path=str(file), writer_batch_size=BATCH_TOKENS) as writer:
        for batch in batched(documents, lambda document: len(document.tokens), BATCH_TOKENS):
            values = {
                TOKENS: [document.tokens for document in batch],
                MASK: [document.learned for document in batch],
                SOURCE: [document.name for document in batch],
            }
            arrays = [pa.array(values[field.name], field.type) for field in features.arrow_schema]
            writer.write_table(pa.table(arrays, schema=features.arrow_schema))
            count += len(batch)
            tokens += sum(len(document.tokens) for document in batch)
            learned += sum(int(document.learned.sum()) for document in batch if document.learned is not None)
        writer.finalize()
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": DOCUMENTS_FILE}],
        "_fingerprint": fingerprint_of([file]),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return Written(count, tokens, learned if masked else None)


def write_synthetic_corpus(path: Path, lengths: Ints) -> Corpus:
    """A new corpus of documents of these lengths, int64 (documents,), whose tokens are all 0: for plans where
    the real one is not at hand."""
    zeros = np.zeros(int(lengths.max()), dtype=np.int32)
    documents = (
        Document(number, f"synthetic {number}", zeros[:length])
        for number, length in enumerate(lengths.tolist())
    )
    with written_whole(path) as folder:
        train_tokenizer(["a"], MIN_VOCAB_SIZE, folder / TOKENIZER_FOLDER)
        written = write_documents(folder, documents)
        tokenizer = CorpusTokenizer(folder / TOKENIZER_FOLDER)
        Preparation(
            **written._asdict(),
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            settings={"source": "synthetic"},
        ).save(folder)
    return Corpus.open(path)
