"""Reading a corpus: lengths and tokens on demand, from the files as they lie.

A corpus that `wlb-titan prepare` made is a folder:

    documents.arrow    one row per document: input_ids (list of int32), length (int32), source (where the
                       text came from); for chat data also learned (list of int32, see `SpanMask`). Readable
                       with `datasets.Dataset.from_file`.
    tokenizer/         tokenizer.json and tokenizer_config.json
    unreadable.txt     files and records that could not be read, if any
    manifest.json      counts, settings, sizes and SHA-256 of the files above; written last

Opening checks all sizes, and all SHA-256 except the documents', which `verify` checks. `foreign` opens
corpora of other tools.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.corpus.folder import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    partial_folder,
)
from wlb_titan.corpus.foreign import fingerprint_of_files, open_foreign
from wlb_titan.corpus.masks import SpanMask
from wlb_titan.corpus.shards import SPANS, ArrowShard, Lengths, Shard, Tokens
from wlb_titan.errors import CorpusError

SAMPLE_TOKENS = 1 << 24
SPOTS = 256


@dataclass(frozen=True)
class TokenizerFacts:
    path: Path  # folder in Hugging Face's layout
    sha256: str  # of its tokenizer.json
    vocab_size: int  # the largest id, plus one

    @classmethod
    def of(cls, folder: Path) -> "TokenizerFacts":
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
        return cls(file.parent, hashlib.sha256(content).hexdigest(), max(vocabulary.values()) + 1)


class Corpus:
    """Tokenized documents on disk, numbered from 0; thread-safe. Made by `Corpus.open` or `Corpus.joined`."""

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
        self.shards = tuple(shards)
        self.lengths = Lengths(shards)  # tokens of each document
        self.fingerprint = fingerprint  # 16 hexadecimal digits for token ids, label mask and order
        self.tokenizer = tokenizer  # None if unknown, which is enough to plan but not to train
        self.manifest = manifest  # None unless `wlb-titan prepare` made the corpus
        self.parts = tuple(parts)  # of a joined corpus, in order

    def __str__(self) -> str:
        if self.parts:
            return f"a mixture of {', '.join(part.path.name for part in self.parts)}"
        return str(self.path)

    @classmethod
    def open(
        cls, path: str | Path, *, column: str = "input_ids", tokenizer: str = "", mask: str = "auto"
    ) -> "Corpus":
        """Opens a corpus without reading tokens; for `column` and `mask` see `open_foreign`. A prepared one
        has its own tokenizer, and takes only the masks "auto" and "none"."""
        path = Path(path).absolute()
        if (path / MANIFEST_FILE).is_file():
            return _open_prepared(path, tokenizer, mask)
        found = open_foreign(path, column, mask)
        if found is None:
            raise CorpusError(_no_corpus(path))
        if not sum(shard.tokens for shard in found.shards):
            raise CorpusError(f"{path} holds no tokens; write it again.")
        facts = TokenizerFacts.of(Path(tokenizer)) if tokenizer else None
        return cls(path, found.shards, fingerprint_of_files(found), facts)

    @classmethod
    def joined(cls, parts: "Sequence[Corpus]") -> "Corpus":
        """Several corpora as one, their documents one after the other."""
        known = [(part, part.tokenizer) for part in parts if part.tokenizer is not None]
        for part, tokenizer in known[1:]:
            if tokenizer.sha256 != known[0][1].sha256:
                raise CorpusError(
                    f"{part} and {known[0][0]} were made with different tokenizers. Prepare one of them "
                    "again with the tokenizer of the other."
                )
        fingerprint = hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()[:16]
        shards = [shard for part in parts for shard in part.shards]
        return cls(parts[0].path, shards, fingerprint, known[0][1] if known else None, parts=parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, row: int, start: int = 0, length: int | None = None) -> Tokens:
        """A read-only view of document `row` from token `start` on: `length` tokens, or all."""
        shard, place = self._place(row)
        begin, end = (int(bound[0]) for bound in shard.bounds(np.array([place])))
        if length is None:
            length = end - begin - start
        if start < 0 or length < 0 or begin + start + length > end:
            raise IndexError(
                f"tokens {start}:{start + length} of document {row}, which has {end - begin} tokens"
            )
        return shard.values[begin + start : begin + start + length]

    @property
    def masked(self) -> bool:
        """Whether any document has a label mask."""
        return any(shard.mask for shard in self.shards)

    def learned(self, row: int, start: int, length: int) -> Bools:
        """bool (length,), which of these tokens of document `row` are learned."""
        shard, place = self._place(row)
        return shard.mask.read(place, start, length) if shard.mask else np.ones(length, dtype=np.bool_)

    def count_learned(self, rows: Ints, starts: Ints, stops: Ints) -> Ints:
        """int64 (n,), learned tokens among start .. stop - 1 of each document."""
        counts = stops - starts
        for shard, mine, places in self.lengths.by_shard(rows):
            if shard.mask:
                counts[mine] = shard.mask.count(places, starts[mine], stops[mine])
        return counts

    def source(self, row: int) -> str:
        """Where document `row` came from, e.g. `stdlib/json/decoder.py`."""
        shard, place = self._place(row)
        return shard.source(place)

    def check_ids(self, row: int, tokens: Tokens, vocabulary: int) -> None:
        """Refuses ids outside the vocabulary: on a GPU a model fails on them later, without a message."""
        found = [int(tokens.min()), int(tokens.max())] if len(tokens) else []
        for wrong in (id_ for id_ in found if not 0 <= id_ < vocabulary):
            raise CorpusError(
                f"Document {row} ({self.source(row)}) of {self} has the token id {wrong}, but the vocabulary "
                f"has {vocabulary:,} entries. The corpus is damaged, or was made with another tokenizer."
            )

    def check_sample(self, vocabulary: int) -> None:
        """Checks ids and masks of at most 16 M tokens, in 256 runs of documents spread over the corpus."""
        spots = np.linspace(0, len(self), SPOTS, endpoint=False).astype(np.int64)
        for start, stop in zip(spots, [*spots[1:], len(self)], strict=True):
            left = SAMPLE_TOKENS // SPOTS if self.lengths.sum() > SAMPLE_TOKENS else SAMPLE_TOKENS
            for row in range(int(start), int(stop)):
                tokens = self.tokens(row)[:left]
                self.check_ids(row, tokens, vocabulary)
                self.learned(row, 0, len(tokens))  # complains about a mask with other values
                left -= len(tokens)
                if left <= 0:
                    break

    @property
    def known_tokenizer(self) -> TokenizerFacts:
        """`tokenizer`; a CorpusError if unknown."""
        if self.tokenizer is None:
            raise CorpusError(
                f"The corpus {self.path} comes without its tokenizer. Name the folder of the one that made "
                "it with wlb.corpus.tokenizer.",
                setting="corpus.tokenizer",
            )
        return self.tokenizer

    @property
    def tokenizer_path(self) -> Path:
        return self.known_tokenizer.path

    def _place(self, row: int) -> tuple[Shard, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"document {row} of a corpus of {len(self)} documents")
        number = int(np.searchsorted(self.lengths.firsts, row, side="right")) - 1
        return self.shards[number], row - int(self.lengths.firsts[number])


def _open_prepared(path: Path, tokenizer: str, mask: str) -> Corpus:
    manifest = Manifest.load(path)
    masked, fingerprint = manifest.masked, manifest.fingerprint
    if masked and mask == "none":
        masked, fingerprint = False, hashlib.sha256(f"{fingerprint} unmasked".encode()).hexdigest()[:16]
    for damage in manifest.damage(path, whole=False):
        raise _damaged(path, damage)
    if mask not in ("auto", "none"):
        raise CorpusError(
            f"The prepared corpus {path} knows itself what is learned; `mask` is {mask!r}, and can be "
            '"auto", or "none" to learn every token.',
            setting="corpus.mask",
        )
    if tokenizer and TokenizerFacts.of(Path(tokenizer)).sha256 != manifest.tokenizer_sha256:
        raise CorpusError(
            f"The corpus {path} was not made with the tokenizer in {tokenizer}; it brings its own, so leave "
            "wlb.corpus.tokenizer out.",
            setting="corpus.tokenizer",
        )
    try:
        shard = ArrowShard(path / DOCUMENTS_FILE)
        if masked:
            shard.mask = SpanMask(ArrowShard(path / DOCUMENTS_FILE, SPANS))
    except CorpusError as error:
        raise _damaged(path, str(error).rstrip(".")) from error
    if (shard.documents, shard.tokens) != (manifest.documents, manifest.tokens):
        counts = f"{shard.documents:,} documents and {shard.tokens:,} tokens"
        said = f"{manifest.documents:,} and {manifest.tokens:,}"
        raise _damaged(path, f"it holds {counts}, the manifest says {said}")
    facts = TokenizerFacts(path / TOKENIZER_FOLDER, manifest.tokenizer_sha256, manifest.vocab_size)
    return Corpus(path, [shard], fingerprint, facts, manifest)


def verify(path: Path, report: Callable[[str, int, int], None]) -> Corpus:
    """Reads all of a prepared corpus to find any damage, and opens it; for `report` see `prepare.Report`."""
    path = path.absolute()
    if not (path / MANIFEST_FILE).is_file():
        Corpus.open(path)  # says what is wrong where there is no corpus at all
        raise CorpusError(f"{path} was not made by `wlb-titan prepare`, so nothing says what it should be.")
    manifest, done = Manifest.load(path), 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        report("Reading bytes", done, sum(manifest.files.values()))

    if damage := list(manifest.damage(path, whole=True, read=read)):
        raise _damaged(path, "; ".join(damage))
    return Corpus.open(path)


def _no_corpus(path: Path) -> str:
    if path.name and partial_folder(path).exists():
        return (
            f"There is no corpus at {path} yet: its preparation was interrupted, or is still running. Start "
            f"it again with `wlb-titan prepare {path}` and the same options."
        )
    if path.is_dir() and any(path.iterdir()):
        return (
            f"{path} is not a complete corpus: it has no {MANIFEST_FILE}, nor files of Megatron (.idx and "
            ".bin), datatrove (.ds) or Hugging Face's save_to_disk. Name another folder."
        )
    return f"There is no corpus at {path}. Make one with `wlb-titan prepare {path}`."


def _damaged(path: Path, what: str) -> CorpusError:
    return CorpusError(
        f"The corpus {path} is damaged: {what}. Copy it again from where it came, or make it again with "
        f"`wlb-titan prepare {path} --overwrite`; `wlb-titan prepare {path} --verify` names all damage."
    )
