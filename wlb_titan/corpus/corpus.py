"""Reading a corpus: lengths and tokens on demand, from the files as they lie.

A corpus is a folder or file of one of the forms in `formats`. docs/corpus.md ("On disk") has that of
`wlb-titan prepare`.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wlb_titan.arrays import Bools, Ints
from wlb_titan.corpus.formats import fingerprint_of, open_shards
from wlb_titan.corpus.shards import Lengths, Shard, Tokens
from wlb_titan.errors import CorpusError, refusing, regular_file, shell_line
from wlb_titan.files import load, save

TOKENIZER_FOLDER = "tokenizer"
UNREADABLE_FILE = "unreadable.txt"
PREPARATION_FILE = "corpus.json"

DECIDING = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")  # which ids a text has

ADVICE = "Name a folder on this machine; `hf download NAME --local-dir FOLDER` brings one from the hub."

SAMPLE_TOKENS = 1 << 24
SPOTS = 256


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What `wlb-titan prepare` notes beside the documents, in corpus.json."""

    documents: int
    tokens: int  # end-of-text tokens included
    learned_tokens: int | None = None  # None: all, there is no label mask
    empty_documents: int = 0  # left out because they hold only white space
    long_documents: int = 0  # conversations left out because they were too long
    unlearned_documents: int = 0  # conversations left out because nothing of them is learned
    unreadable: int = 0  # files or records that could not be read; unreadable.txt gives each with the reason
    vocab_size: int  # rows that an embedding table needs: the largest id, plus one
    end_of_text: str  # the token that ends every document
    settings: dict[str, Any]  # `PrepareSettings`
    tokenizer_sha256: str = ""  # of tokenizer.json; `save` fills it in

    def save(self, folder: Path) -> None:
        tokenizer = TokenizerFacts.of(folder / TOKENIZER_FOLDER, self.vocab_size)
        facts = dataclasses.asdict(self) | {"tokenizer_sha256": tokenizer.sha256}
        save(folder / PREPARATION_FILE, facts, indent=2)

    @classmethod
    def load(cls, folder: Path) -> "Preparation | None":
        """None if the folder is not of `wlb-titan prepare`."""
        file = folder / PREPARATION_FILE
        if not file.is_file():
            return None
        with refusing(lambda reason: _damaged(folder, f"{file.name} cannot be read ({reason})")):
            preparation: Preparation = load(cls, file)
            return preparation

    def check(self, corpus: "Corpus", changed: bool) -> None:
        """Refuses a corpus whose file was cut off, of which pyarrow reads what is left, or has `changed`."""
        documents, tokens = len(corpus), corpus.lengths.sum()
        if (documents, tokens) != (self.documents, self.tokens):
            contents = f"it holds {documents:,} documents and {tokens:,} tokens"
            raise _damaged(corpus.path, f"{contents}, but should hold {self.documents:,} and {self.tokens:,}")
        if changed:
            raise _damaged(corpus.path, "its documents do not match the fingerprint in state.json")


@dataclass(frozen=True)
class TokenizerFacts:
    path: Path  # folder in Hugging Face's layout
    sha256: str  # of its tokenizer.json
    noted_size: int = 0  # `vocab_size`, where `wlb-titan prepare` noted it

    @cached_property
    def vocab_size(self) -> int:
        """The largest id, plus one."""
        return self.noted_size or max(open_tokenizer(self.path).get_vocab().values()) + 1

    @classmethod
    def of(cls, folder: Path, noted_size: int = 0) -> "TokenizerFacts":
        file = folder.absolute() / "tokenizer.json"
        if not file.is_file():
            raise CorpusError(
                f"There is no {file}; set `tokenizer` to a folder that contains a tokenizer in Hugging "
                "Face's layout.",
                setting="corpus.tokenizer",
            )
        return cls(file.parent, hashlib.sha256(file.read_bytes()).hexdigest(), noted_size)


def open_tokenizer(folder: Path, *, alone: bool = False) -> Any:
    """A folder's `PreTrainedTokenizerFast`, also with tokens that only files beside tokenizer.json have;
    `alone`: whatever a model's config.json there says."""
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # take seconds

    def wrong(reason: str) -> CorpusError:
        what = f"{folder / 'tokenizer.json'} and tokenizer_config.json cannot be opened as a tokenizer"
        return CorpusError(f"{what}: {reason}. {ADVICE}", setting="corpus.tokenizer")

    with refusing(wrong):
        for file in (folder / "tokenizer.json", *folder.glob("*.json"), *folder.rglob("*.jinja")):
            regular_file(file)
        with suppress(Exception):  # transformers lacks its class
            local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            config = PreTrainedConfig() if alone else None
            tokenizer = AutoTokenizer.from_pretrained(folder, config=config, **local)
            if tokenizer.is_fast:
                return tokenizer
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def differing_ids(one: Path, other: Path) -> str:
    """Why the tokenizers of two folders, as transformers reads them, give a text other ids; "" where they do
    not. Templates and the tokens that end and pad texts are a run's own."""
    contents, theirs = (
        [(folder / name).read_bytes() if (folder / name).is_file() else b"" for name in DECIDING]
        for folder in (one, other)
    )
    if contents == theirs:
        return ""
    ids, others = (open_tokenizer(folder, alone=True).get_vocab() for folder in (one, other))
    for token in sorted(ids | others):
        found, there = ids.get(token, "missing"), others.get(token, "missing")
        if found != there:
            return f"{token!r} is {found} in {one} and {there} in {other}"
    rules, others = (load(dict[str, Any], folder / "tokenizer.json") for folder in (one, other))
    parts = [part for part in ("normalizer", "pre_tokenizer", "model") if rules.get(part) != others.get(part)]
    return f"{', '.join(parts)} of tokenizer.json differ" if parts else ""


@dataclass(eq=False)
class Corpus:
    """Tokenized documents on disk, numbered from 0; thread-safe. Made by `Corpus.open` or `Corpus.joined`."""

    path: Path
    shards: Sequence[Shard]
    fingerprint: str  # 16 hexadecimal digits for token ids, label mask and order
    tokenizer: TokenizerFacts | None = None  # None if unknown, which is enough to plan but not to train
    preparation: Preparation | None = None  # None unless `wlb-titan prepare` made the corpus
    parts: "Sequence[Corpus]" = ()  # of a joined corpus, in order
    validation: "Corpus | None" = None  # that of [wlb.validation], once it is open

    def __post_init__(self) -> None:
        self.name = self.path.name  # in reports on a mixture
        self.lengths = Lengths(self.shards)  # tokens of each document

    def __str__(self) -> str:
        if self.parts:
            return f"a mixture of {', '.join(part.name for part in self.parts)}"
        return str(self.path)

    @classmethod
    def open(
        cls, path: str | Path, *, column: str = "input_ids", tokenizer: str = "", mask: str = "auto"
    ) -> "Corpus":
        """Opens a corpus without reading tokens; for `column` and `mask` see `open_shards`. A prepared one
        brings its own tokenizer."""
        path = Path(path).expanduser().absolute()
        with refusing(lambda reason: CorpusError(f"{path} cannot be read: {reason}.")):
            opened, preparation = open_shards(path, column, mask), Preparation.load(path)
            if opened is None:
                raise CorpusError(_no_corpus(path))
            facts = TokenizerFacts.of(Path(tokenizer)) if tokenizer else None
            if preparation is not None:
                facts = _own_tokenizer(path, preparation, facts)
            fingerprint = fingerprint_of(opened.files, opened.read_as)
            corpus = cls(path, opened.shards, fingerprint, facts, preparation)
            if preparation is not None:
                preparation.check(corpus, fingerprint_of(opened.files) != opened.noted)
            if not corpus.lengths.sum():
                raise CorpusError(f"{path} contains no tokens; write it again.")
            return corpus

    @classmethod
    def joined(cls, parts: "Sequence[Corpus]") -> "Corpus":
        """Several corpora as one, their documents one after the other."""
        tokenizers = [(part, part.tokenizer) for part in parts if part.tokenizer is not None]
        for part, other in tokenizers[1:]:
            if differ := differing_ids(other.path, tokenizers[0][1].path):
                raise CorpusError(
                    f"{part} and {tokenizers[0][0]} were made with different tokenizers: {differ}. Prepare "
                    "one of them again with the tokenizer of the other."
                )
        fingerprint = hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()[:16]
        shards = [shard for part in parts for shard in part.shards]
        return cls(parts[0].path, shards, fingerprint, tokenizers[0][1] if tokenizers else None, parts=parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, row: int, start: int = 0, length: int | None = None) -> Tokens:
        """A read-only view of document `row` from token `start` on: `length` tokens, or all."""
        shard, place = self._place(row)
        return shard.read(place, start, length)

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
        for shard, picked, places in self.lengths.by_shard(rows):
            if shard.mask:
                counts[picked] = shard.mask.count(places, starts[picked], stops[picked])
        return counts

    def source(self, row: int) -> str:
        """Where document `row` came from, e.g. `stdlib/json/decoder.py`."""
        shard, place = self._place(row)
        return shard.source(place)

    def check_ids(self, row: int, tokens: Tokens, vocabulary: int) -> None:
        """Refuses ids outside the vocabulary: on a GPU a model fails on them later, without a message."""
        extremes = [int(tokens.min()), int(tokens.max())] if len(tokens) else []
        for wrong in (id_ for id_ in extremes if not 0 <= id_ < vocabulary):
            raise CorpusError(
                f"Document {row} ({self.source(row)}) of {self} has the token id {wrong}, but the vocabulary "
                f"has {vocabulary:,} entries. The corpus is damaged, or was made with another tokenizer."
            )

    def check_sample(self, vocabulary: int) -> None:
        """Checks ids and masks of at most 16 M tokens, in 256 runs of documents spread over the corpus."""
        spots = np.linspace(0, len(self), SPOTS, endpoint=False).astype(np.int64)
        most = SAMPLE_TOKENS // SPOTS if self.lengths.sum() > SAMPLE_TOKENS else SAMPLE_TOKENS
        for start, stop in zip(spots, [*spots[1:], len(self)], strict=True):
            lengths = self.lengths[start : min(stop, start + most)]
            run = start + np.flatnonzero(np.cumsum(lengths) - lengths < most)
            for shard, picked, places in self.lengths.by_shard(run):
                tokens = shard.gathered(places, most)
                fits = not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocabulary
                if fits and (shard.mask is None or shard.mask.fits(places, most)):
                    continue
                for row in run[picked].tolist():
                    tokens = self.tokens(row)[:most]
                    self.check_ids(row, tokens, vocabulary)
                    self.learned(row, 0, len(tokens))  # complains about a mask with other values
        for shard in self.shards:
            shard.check_columns()

    def check_learned(self, lengths: Any) -> None:
        """Refuses documents, by the lengths of all rows, of which no token is learned."""
        if not self.masked:
            return
        for start in range(0, len(self), SPOTS):
            rows = range(start, min(start + SPOTS, len(self)))
            stops = np.asarray(lengths[np.array(rows)]).tolist()
            if any(self.learned(row, 0, stop)[1:].any() for row, stop in zip(rows, stops, strict=True)):
                return
        raise CorpusError(
            f"The label mask of {self} leaves no token of these documents to be learned. Correct the mask, "
            'or learn every token with mask = "none".'
        )

    @property
    def known_tokenizer(self) -> TokenizerFacts:
        """`tokenizer`; a CorpusError if unknown."""
        if self.tokenizer is None:
            raise CorpusError(
                f"The corpus {self.path} does not include its tokenizer. Set wlb.corpus.tokenizer to the "
                "folder of the tokenizer that made it.",
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


def _own_tokenizer(path: Path, preparation: Preparation, named: TokenizerFacts | None) -> TokenizerFacts:
    if not (path / TOKENIZER_FOLDER / "tokenizer.json").is_file():
        raise _damaged(path, f"there is no {TOKENIZER_FOLDER}/tokenizer.json")
    brought = TokenizerFacts.of(path / TOKENIZER_FOLDER, preparation.vocab_size)
    if brought.sha256 != preparation.tokenizer_sha256:
        raise _damaged(path, f"{brought.path / 'tokenizer.json'} is not the tokenizer that made it")
    if named is not None and (differ := differing_ids(named.path, brought.path)):
        raise CorpusError(
            f"The corpus {path} was not made with the tokenizer in {named.path}: {differ}. It includes its "
            "own, so leave wlb.corpus.tokenizer out.",
            setting="corpus.tokenizer",
        )
    return brought


def partial_folder(path: Path) -> Path:
    """Where the corpus `path` is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


def _no_corpus(path: Path) -> str:
    if path.name and partial_folder(path).exists():
        return (
            f"There is no corpus at {path} yet: its preparation was interrupted, or is still running. Start "
            f"it again with {shell_line('prepare', path)} and the same options."
        )
    if path.is_dir() and any(path.iterdir()):
        return (
            f"{path} is not a complete corpus: it has no files of Hugging Face's save_to_disk (state.json), "
            "Megatron (.idx and .bin) or datatrove (.ds). Name another folder."
        )
    if path.is_file() or Path(f"{path}.bin").is_file():
        return (
            f"{path} is not a corpus by itself; a corpus is NAME.bin beside NAME.idx (Megatron), NAME.ds "
            "beside NAME.ds.index (datatrove), or a folder with state.json (Hugging Face's save_to_disk)."
        )
    return f"There is no corpus at {path}. Make one with {shell_line('prepare', path)}."


def _damaged(path: Path, what: str) -> CorpusError:
    words = []
    with suppress(Exception):  # it may be the damaged file
        settings = load(dict[str, Any], path / PREPARATION_FILE)["settings"]
        for name, value in settings.items():
            if value not in (None, False):
                words += [f"--{name.replace('_', '-')}", *([str(value)] if value is not True else [])]
    again = shell_line("prepare", path, *words) + ("" if words else " and the options that it had")
    return CorpusError(
        f"The corpus {path} is damaged: {what}. Copy it again, or delete it and make it again with {again}."
    )
