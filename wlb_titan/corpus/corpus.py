"""Reading a corpus: lengths at once, tokens on demand.

A corpus is a folder:

    documents.arrow    one row a document, in training order: input_ids (list of int32), length (int32),
                       source (where the text came from); also readable with `datasets.Dataset.from_file`
    tokenizer/         tokenizer.json and tokenizer_config.json
    unreadable.txt     files and records that could not be read, if there were any
    manifest.json      counts, settings, sizes of the files above; written last

The Arrow file is memory-mapped and never read as a whole: opening a corpus touches the lengths and offsets,
8 bytes a document, and a slice of tokens is a view of the mapped pages. All processes of a machine that open
the same corpus share one copy in the page cache.
"""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from wlb_titan.corpus.errors import CorpusError
from wlb_titan.corpus.folder import partial_folder
from wlb_titan.corpus.manifest import DOCUMENTS_FILE, MANIFEST_FILE, TOKENIZER_FOLDER, Manifest


class Corpus:
    """Tokenized documents on disk, numbered from 0 in training order. Make one with `Corpus.open`.

    Reading is thread-safe: nothing changes after `open`.

    Attributes:
        path: the corpus folder, absolute.
        manifest: counts, settings and tokenizer facts.
        lengths: int64 array, the number of tokens of each document, end-of-text included; read-only.
    """

    def __init__(self, path: Path, manifest: Manifest, table: pa.Table) -> None:
        self.path = path
        self.manifest = manifest
        self._sources = table.column("source")
        # One entry a record batch of the file: where each row begins and ends in the batch's tokens.
        self._offsets: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        # By DLPack, as pyarrow's own to_numpy() imports pandas, which takes a second.
        for chunk in table.column("input_ids").chunks:
            self._offsets.append(np.from_dlpack(chunk.offsets))
            self._tokens.append(np.from_dlpack(chunk.values))
        rows = [len(offsets) - 1 for offsets in self._offsets]
        self._first_rows = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        lengths = [np.from_dlpack(chunk) for chunk in table.column("length").chunks]
        self.lengths = np.concatenate(lengths, dtype=np.int64)
        self.lengths.setflags(write=False)

    @classmethod
    def open(cls, path: str | Path) -> "Corpus":
        """Open the corpus in folder `path`, without reading tokens.

        Raises:
            CorpusError: there is no corpus, it is half-written, or its files do not match its manifest.
        """
        path = Path(path).absolute()
        if not path.is_dir():
            raise CorpusError(_no_corpus(path))
        if not (path / MANIFEST_FILE).is_file():
            raise CorpusError(
                f"{path} is not a complete corpus: it has no {MANIFEST_FILE}, the file that is written last. "
                f"Make it again with `wlb-titan prepare {path} --overwrite`, or name another folder."
            )
        manifest = Manifest.load(path)
        _check_files(path, manifest)
        table = _map_table(path)
        corpus = cls(path, manifest, table)
        counts = (len(corpus), int(corpus.lengths.sum()), sum(len(tokens) for tokens in corpus._tokens))
        expected = (manifest.documents, manifest.tokens, manifest.tokens)
        if counts != expected:
            raise _mismatch(
                path,
                f"{DOCUMENTS_FILE} holds {counts[0]:,} documents and {counts[2]:,} tokens, the manifest says "
                f"{expected[0]:,} and {expected[2]:,}",
            )
        return corpus

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.lengths)

    def tokens(self, row: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `start` .. `start + length - 1` of document `row`; without `length`, all from `start` on.

        Returns:
            An int32 array, a read-only view of the memory-mapped file: nothing is copied.

        Raises:
            IndexError: no such document, or the slice reaches outside it.
        """
        if not 0 <= row < len(self.lengths):
            raise IndexError(f"document {row} of a corpus of {len(self.lengths)} documents")
        total = int(self.lengths[row])
        if length is None:
            length = total - start
        if start < 0 or length < 0 or start + length > total:
            raise IndexError(f"tokens {start}:{start + length} of document {row}, which has {total} tokens")
        batch = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        begin = int(self._offsets[batch][row - self._first_rows[batch]]) + start
        return self._tokens[batch][begin : begin + length]

    def source(self, row: int) -> str:
        """Where document `row` came from, such as `stdlib/json/decoder.py`."""
        return str(self._sources[row].as_py())

    @property
    def tokenizer_path(self) -> Path:
        """Folder of the corpus' tokenizer, in Hugging Face's layout."""
        return self.path / TOKENIZER_FOLDER

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify tokenizer, token ids and order of the documents."""
        return self.manifest.fingerprint


def _no_corpus(path: Path) -> str:
    if partial_folder(path).exists():
        return (
            f"There is no corpus at {path} yet: its preparation was interrupted, or is still running. If it "
            f"is not running, start it again with `wlb-titan prepare {path}` and the same options."
        )
    return (
        f"There is no corpus at {path}. Make one with `wlb-titan prepare {path}` (--help lists its options)."
    )


def _mismatch(path: Path, what: str) -> CorpusError:
    return CorpusError(
        f"The corpus {path} does not match its manifest: {what}. Copy it again from where it came, or make "
        f"it again with `wlb-titan prepare {path} --overwrite`."
    )


def _check_files(path: Path, manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise _mismatch(path, f"the file {name} is missing")
        if file.stat().st_size != size:
            raise _mismatch(path, f"the file {name} has {file.stat().st_size:,} bytes instead of {size:,}")
    tokenizer = (path / TOKENIZER_FOLDER / "tokenizer.json").read_bytes()
    if hashlib.sha256(tokenizer).hexdigest() != manifest.tokenizer_sha256:
        raise _mismatch(path, f"{TOKENIZER_FOLDER}/tokenizer.json was changed")


def _map_table(path: Path) -> pa.Table:
    try:
        # What `datasets.Dataset.from_file` does, without the seconds that importing `datasets` takes.
        with pa.memory_map(str(path / DOCUMENTS_FILE)) as file, pa.ipc.open_stream(file) as stream:
            return stream.read_all()
    except pa.ArrowInvalid as error:
        raise _mismatch(path, f"{DOCUMENTS_FILE} cannot be read ({error})") from error
