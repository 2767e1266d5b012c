"""What a user can set about corpora: which one to train on, [wlb.corpus], and what to prepare."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wlb_titan.corpus.errors import CorpusError

SOURCES = "python-source, text:DIR, jsonl:FILE#field, parquet:FILE#field, hf:NAME[,CONFIG][@SPLIT][#field]"
GRANULARITIES = ("file", "package")
DEFAULT_VOCAB_SIZE = 4096
MIN_VOCAB_SIZE = 257
"""256 bytes and the end-of-text token."""


@dataclass(kw_only=True, slots=True)
class SourceSettings:
    """[[wlb.corpus.sources]]: a corpus of a mixture."""

    path: str
    """Where the corpus lies, in any of the forms that wlb.corpus.path may have."""

    name: str = ""
    """What reports and metrics call it; empty takes the last part of the path."""

    weight: float = 1.0
    """Its share of the tokens, over the sum of all weights. A source that is through begins anew."""

    column: str = "input_ids"
    """Of a dataset of Hugging Face's: the column with the token ids."""

    long_length: int | None = None
    """Documents of at least so many tokens are long; "none" makes no difference between documents."""

    long_share: float | None = None
    """Share of this source's tokens that come from its long documents, between 0 and 1, as recipes for long
    context set it; they are repeated sooner than the others where that takes more than there are."""


@dataclass(kw_only=True, slots=True)
class CorpusSettings:
    """[wlb.corpus]: the documents to train on."""

    path: str = "outputs/corpus"
    """A corpus that `wlb-titan prepare` made, or others as they are: Megatron's .bin and .idx (without the
    ending, or a folder of them), datatrove's .ds files (a folder, or one), a folder of `save_to_disk`."""

    tokenizer: str = ""
    """Folder of the tokenizer that made the token ids; a prepared corpus brings its own."""

    column: str = "input_ids"
    """Of a dataset of Hugging Face's: the column with the token ids."""

    seed: int = 0
    """Seed of the order in which an epoch visits the documents; each epoch has an order of its own."""

    sources: list[SourceSettings] = field(default_factory=list)
    """Several corpora, mixed; `path` and `column` are then not used."""


@dataclass(frozen=True)
class SourceSpec:
    """A source taken apart: `jsonl:a.jsonl#body` is kind `jsonl`, location `a.jsonl`, field `body`."""

    kind: str
    location: str = ""
    """A file, a folder, or a name on the Hugging Face hub."""
    field: str = "text"
    """The column that holds the text."""
    config: str | None = None
    """Hugging Face only: which configuration of the dataset."""
    split: str = "train"
    """Hugging Face only: which split, such as `train` or `train[:1%]`."""

    @classmethod
    def parse(cls, text: str) -> "SourceSpec":
        """Take a source's description apart; nothing is looked up.

        Raises:
            CorpusError: it is of none of the known forms.
        """
        if text == "python-source":
            return cls(text)
        kind, _, rest = text.partition(":")
        if kind == "text" and rest:
            return cls(kind, rest)
        location, field = rest.rsplit("#", 1) if "#" in rest else (rest, "text")
        if kind in ("jsonl", "parquet") and location and field:
            return cls(kind, location, field)
        name = re.fullmatch(r"([^,@]+)(?:,([^,@]+))?(?:@([^@]+))?", location)
        if kind == "hf" and name and field:
            return cls(kind, name[1], field, name[2], name[3] or "train")
        raise CorpusError(f"{text!r} is not a source of documents; the sources are {SOURCES}.")

    def absolute(self) -> str:
        """The description with an absolute path, so that it means the same from every folder."""
        if self.kind == "python-source":
            return self.kind
        if self.kind == "text":
            return f"text:{Path(self.location).absolute()}"
        if self.kind == "hf":
            config = f",{self.config}" if self.config else ""
            return f"hf:{self.location}{config}@{self.split}#{self.field}"
        return f"{self.kind}:{Path(self.location).absolute()}#{self.field}"


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What `prepare_corpus` makes.

    Raises:
        CorpusError: a value is out of range, or two of them contradict each other.
    """

    source: str = "python-source"
    """Where the documents come from, in one of the forms of `SOURCES`."""

    granularity: str = "file"
    """`python-source` only: one document a `file`, or one a top-level `package`."""

    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer; without one, a byte-level BPE is trained on the corpus."""

    vocab_size: int | None = None
    """Most entries that the trained tokenizer may have; `DEFAULT_VOCAB_SIZE` without a value."""

    seed: int = 0
    """Seed of the order of the documents."""

    max_tokens: int | None = None
    """Stop with the document that reaches this many tokens; without a value, take all documents."""

    def __post_init__(self) -> None:
        kind = SourceSpec.parse(self.source).kind
        if self.granularity not in GRANULARITIES:
            raise CorpusError(f"granularity is {self.granularity!r}, but must be one of {GRANULARITIES}.")
        if self.granularity != "file" and kind != "python-source":
            raise CorpusError(
                f"granularity {self.granularity!r} is for the source python-source, not for {kind}."
            )
        if self.tokenizer is not None and self.vocab_size is not None:
            raise CorpusError(
                "A vocabulary size is for the tokenizer that is trained here; the tokenizer "
                f"{self.tokenizer} has its own. Leave one of the two out."
            )
        if self.vocab_size is not None and self.vocab_size < MIN_VOCAB_SIZE:
            raise CorpusError(
                f"A vocabulary of {self.vocab_size} entries is too small: {MIN_VOCAB_SIZE} are needed for "
                "the 256 bytes and the end-of-text token."
            )
        if self.seed < 0:
            raise CorpusError(f"The seed is {self.seed}, but must not be negative.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise CorpusError(f"max_tokens is {self.max_tokens}, but must be at least 1.")

    def resolved(self) -> dict[str, Any]:
        """All settings as they take effect, with absolute paths; equal if they make the same corpus."""
        values = dataclasses.asdict(self)
        values["source"] = SourceSpec.parse(self.source).absolute()
        if self.tokenizer is None:
            values["vocab_size"] = self.vocab_size or DEFAULT_VOCAB_SIZE
        else:
            values["tokenizer"] = str(Path(self.tokenizer).absolute())
        return values
