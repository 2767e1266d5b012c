"""What to prepare: the source of the text, the tokenizer, the size."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_titan.errors import CorpusError

SOURCES = (
    "python-source, text:DIR, jsonl:FILE_OR_DIR#field, parquet:FILE_OR_DIR#field, "
    "hf:NAME[,CONFIG][@SPLIT][#field]"
)
GRANULARITIES = ("file", "package")
EXECUTORS = ("local", "slurm", "ray")
DEFAULT_VOCAB_SIZE = 4096
MOST_VOCAB_SIZE = 1 << 22
MIN_VOCAB_SIZE = 257
"""256 bytes and the end-of-text token."""


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
        if self.vocab_size is not None and self.vocab_size > MOST_VOCAB_SIZE:
            raise CorpusError(
                f"A vocabulary has at most {MOST_VOCAB_SIZE:,} entries, not {self.vocab_size:,}."
            )
        if not 0 <= self.seed < 2**63:
            raise CorpusError(f"The seed is {self.seed}, but must be from 0 to 2^63 - 1.")
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
