"""Reading a corpus: lengths and tokens on demand, from the files as they lie.

A corpus that `wlb-titan prepare` made is a folder:

    documents.arrow    one row a document: input_ids (list of int32), length (int32), source (where the text
                       came from); also readable with `datasets.Dataset.from_file`. Several workers write
                       documents-00000.arrow, documents-00001.arrow, ...
    tokenizer/         tokenizer.json and tokenizer_config.json
    unreadable.txt     files and records that could not be read, if there were any
    *.batches          of each file of documents: where its record batches lie
    *.sums             of each: a checksum of every block, compared when it is first read
    manifest.json      counts, settings, sizes and checksums of the files above; written last

Others are opened as `foreign` says. All files are memory-mapped: a slice of tokens is a view of the mapped
pages, and the processes of a machine share one copy in the page cache.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wlb_titan.corpus.arrow import ArrowShard
from wlb_titan.corpus.folder import partial_folder
from wlb_titan.corpus.foreign import files_of, fingerprint_of_files, open_foreign
from wlb_titan.corpus.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, Manifest
from wlb_titan.corpus.shards import Lengths, Shard, Tokens
from wlb_titan.errors import CorpusError


@dataclass(frozen=True)
class TokenizerFacts:
    """What is known of the tokenizer that made a corpus' token ids.

    Attributes:
        path: folder in Hugging Face's layout.
        sha256: of its tokenizer.json.
        vocab_size: the largest id, plus one.
    """

    path: Path
    sha256: str
    vocab_size: int


class Corpus:
    """Tokenized documents on disk, numbered from 0. Make one with `Corpus.open`
    or `Corpus.joined`.

    Reading is thread-safe: nothing changes after `open`.

    Attributes:
        path: where it lies, absolute.
        lengths: the number of tokens of each document; an int64 array to look at (see `Lengths`).
        fingerprint: 16 hexadecimal digits that identify token ids and order of the documents.
        tokenizer: None where it is not known, which is enough to plan and not to train.
        shards: its files.
        manifest: counts, settings and tokenizer facts of a corpus that `wlb-titan prepare` made, else None.
        parts: the corpora that it is made of, whose documents follow each other; none if it is one.
    """

    def __init__(
        self,
        path: Path,
        shards: Sequence[Shard],
        fingerprint: str,
        tokenizer: TokenizerFacts | None = None,
        manifest: Manifest | None = None,
        parts: "Sequence[Corpus]" = (),
    ) -> None:
        self.path = path
        self.parts = tuple(parts)
        self.lengths = Lengths(shards)
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.manifest = manifest
        self.shards = list(shards)

    def __str__(self) -> str:
        if self.parts:
            return f"a mixture of {', '.join(part.path.name for part in self.parts)}"
        return str(self.path)

    @classmethod
    def open(cls, path: str | Path, *, column: str = "input_ids", tokenizer: str = "") -> "Corpus":
        """Open the corpus at `path`, without reading tokens.

        Args:
            path: a folder or file, as described above.
            column: of Hugging Face's datasets, the one with the token ids.
            tokenizer: folder of the tokenizer that made the token ids; a prepared corpus has its own.

        Raises:
            CorpusError: there is no corpus, it is half-written, or its files do not match each other.
        """
        path = Path(path).absolute()
        if (path / MANIFEST_FILE).is_file():
            return _open_prepared(path, tokenizer)
        shards = open_foreign(path, column)
        if shards is None:
            raise CorpusError(_no_corpus(path))
        if not sum(shard.tokens for shard in shards):
            raise CorpusError(f"{path} holds no tokens; write it again.")
        fingerprint = fingerprint_of_files(file for shard in shards for file in files_of(shard))
        return cls(path, shards, fingerprint, tokenizer_facts(Path(tokenizer)) if tokenizer else None)

    @classmethod
    def joined(cls, parts: "Sequence[Corpus]") -> "Corpus":
        """Several corpora as one: the documents of the first, then those of the second, and so on.

        Raises:
            CorpusError: they were made with different tokenizers.
        """
        known = [(part, part.tokenizer) for part in parts if part.tokenizer is not None]
        for part, tokenizer in known[1:]:
            if tokenizer.sha256 != known[0][1].sha256:
                raise CorpusError(
                    f"{part} and {known[0][0]} were made with different tokenizers, so their token ids do "
                    "not mean the same. Prepare one of them anew with the tokenizer of the other."
                )
        fingerprint = hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()[:16]
        shards = [shard for part in parts for shard in part.shards]
        return cls(parts[0].path, shards, fingerprint, known[0][1] if known else None, None, parts)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.lengths)

    def tokens(self, row: int, start: int = 0, length: int | None = None) -> Tokens:
        """Tokens `start` .. `start + length - 1` of document `row`; without `length`, all from `start` on.

        Returns:
            An array of integers, a read-only view of the memory-mapped file: nothing is copied.

        Raises:
            IndexError: no such document, or the slice reaches outside it.
        """
        shard, place = self._place(row)
        total = int(shard.lengths(np.array([place]))[0])
        if length is None:
            length = total - start
        if start < 0 or length < 0 or start + length > total:
            raise IndexError(f"tokens {start}:{start + length} of document {row}, which has {total} tokens")
        return shard.read(place, start, length)

    def source(self, row: int) -> str:
        """Where document `row` came from, such as `stdlib/json/decoder.py`."""
        shard, place = self._place(row)
        return shard.source(place)

    @property
    def known_tokenizer(self) -> TokenizerFacts:
        """The tokenizer that made the token ids.

        Raises:
            CorpusError: none is known.
        """
        if self.tokenizer is None:
            raise CorpusError(
                f"The corpus {self.path} comes without its tokenizer. Name the folder of the tokenizer that "
                "made it, with tokenizer.json and tokenizer_config.json: wlb.corpus.tokenizer.",
                setting="corpus.tokenizer",
            )
        return self.tokenizer

    @property
    def tokenizer_path(self) -> Path:
        """Folder of `known_tokenizer`, in Hugging Face's layout."""
        return self.known_tokenizer.path

    def _place(self, row: int) -> tuple[Shard, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"document {row} of a corpus of {len(self)} documents")
        number = int(np.searchsorted(self.lengths.firsts, row, side="right")) - 1
        return self.shards[number], row - int(self.lengths.firsts[number])


def tokenizer_facts(folder: Path) -> TokenizerFacts:
    """What is to be known of a tokenizer.

    Raises:
        CorpusError: the folder has no tokenizer.json, or a damaged one.
    """
    file = folder.absolute() / "tokenizer.json"
    if not file.is_file():
        raise CorpusError(
            f"There is no {file}; `tokenizer` names the folder of a tokenizer in Hugging Face's layout.",
            setting="corpus.tokenizer",
        )
    from tokenizers import Tokenizer  # not needed for corpora that were prepared

    content = file.read_bytes()
    try:
        vocabulary = Tokenizer.from_str(content.decode("utf-8")).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exceptions
        raise CorpusError(f"{file} is not a tokenizer: {error}", setting="corpus.tokenizer") from error
    return TokenizerFacts(file.parent, hashlib.sha256(content).hexdigest(), max(vocabulary.values()) + 1)


def _open_prepared(path: Path, tokenizer: str) -> Corpus:
    manifest = Manifest.load(path)
    _check_files(path, manifest)
    if tokenizer and tokenizer_facts(Path(tokenizer)).sha256 != manifest.tokenizer_sha256:
        raise CorpusError(
            f"The corpus {path} was not made with the tokenizer in {tokenizer}; it brings its own, so leave "
            "wlb.corpus.tokenizer out.",
            setting="corpus.tokenizer",
        )
    try:
        shards = [ArrowShard(path / name, checked=manifest.checked) for name in manifest.document_files]
    except CorpusError as error:
        raise _mismatch(path, str(error)) from error
    counts = (sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards))
    expected = (manifest.documents, manifest.tokens)
    if counts != expected:
        raise _mismatch(
            path,
            f"it holds {counts[0]:,} documents and {counts[1]:,} tokens, the manifest says "
            f"{expected[0]:,} and {expected[1]:,}",
        )
    facts = TokenizerFacts(path / TOKENIZER_FOLDER, manifest.tokenizer_sha256, manifest.vocab_size)
    return Corpus(path, shards, manifest.fingerprint, facts, manifest)


def _no_corpus(path: Path) -> str:
    if path.name and partial_folder(path).exists():
        return (
            f"There is no corpus at {path} yet: its preparation was interrupted, or is still running. If it "
            f"is not running, start it again with `wlb-titan prepare {path}` and the same options."
        )
    if path.is_dir() and any(path.iterdir()):
        return (
            f"{path} is not a complete corpus: it has no {MANIFEST_FILE}, the file that is written last, nor "
            "files of Megatron (.idx and .bin), datatrove (.ds) or Hugging Face's save_to_disk. "
            "Name another folder."
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
    wanted = {**manifest.checksums, f"{TOKENIZER_FOLDER}/tokenizer.json": manifest.tokenizer_sha256}
    for name, checksum in wanted.items():
        if not (path / name).is_file() or hashlib.sha256((path / name).read_bytes()).hexdigest() != checksum:
            raise _mismatch(path, f"{name} was changed")
