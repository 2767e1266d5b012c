"""Settings of preparation: the source of the text, the tokenizer, the size."""

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
TOO_LONG = ("cut", "skip", "error")
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
    def parse(cls, text: str, field: str = "text") -> "SourceSpec":
        """Take a source's description apart; nothing is looked up. `field` is that of one that names none.

        Raises:
            CorpusError: it is of none of the known forms.
        """
        if text == "python-source":
            return cls(text)
        kind, _, rest = text.partition(":")
        if kind == "text" and rest:
            return cls(kind, rest)
        location, field = rest.rsplit("#", 1) if "#" in rest else (rest, field)
        if kind in ("jsonl", "parquet") and location and field:
            return cls(kind, location, field)
        name = re.fullmatch(r"([^,@]+)(?:,([^,@]+))?(?:@([^@]+))?", location)
        if kind == "hf" and name and field:
            return cls(kind, name[1], field, name[2], name[3] or "train")
        ending = Path(text.partition("#")[0]).suffix.removeprefix(".")
        advice = f" For this file write {ending}:{text}." if ending in ("jsonl", "parquet") else ""
        raise CorpusError(f"{text!r} is not a source of documents; the sources are {SOURCES}.{advice}")

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

    chat: bool = False
    """The source's records are conversations; they are written by the tokenizer's chat template."""

    chat_template: str | None = None
    """Chat only: a file with the template, in place of the tokenizer's own."""

    template_options: tuple[tuple[str, Any], ...] = ()
    """Chat only: names and values that the template reads besides."""

    max_length: int | None = None
    """Chat only: longest conversation in tokens; without a value, any."""

    too_long: str = "error"
    """Chat only: what is done with longer ones, one of `TOO_LONG`."""

    def __post_init__(self) -> None:
        kind = self.spec.kind
        self._check_chat(kind)
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

    @property
    def spec(self) -> SourceSpec:
        """`source`, taken apart."""
        return SourceSpec.parse(self.source, "messages" if self.chat else "text")

    @property
    def template_file(self) -> Path | None:
        """`chat_template`."""
        return Path(self.chat_template) if self.chat_template else None

    def _check_chat(self, kind: str) -> None:
        given = (self.chat_template, *self.template_options, self.max_length)
        if not self.chat and any(value is not None for value in given):
            raise CorpusError("A chat template, its options and a maximal length are for --chat only.")
        if self.chat and kind not in ("jsonl", "parquet", "hf"):
            raise CorpusError(
                "Conversations are records of a file or dataset: jsonl:FILE#messages, "
                f"parquet:FILE#messages or hf:NAME#messages, not {self.source!r}."
            )
        if self.chat and self.tokenizer is None:
            raise CorpusError(
                "Conversations are written by the chat template of the model's own tokenizer; name its "
                "folder with --tokenizer DIR."
            )
        if self.too_long not in TOO_LONG:
            raise CorpusError(f"too_long is {self.too_long!r}, but must be one of {', '.join(TOO_LONG)}.")
        if self.too_long != "error" and self.max_length is None:
            raise CorpusError("--too-long is about conversations beyond --max-length; set that, or neither.")
        if self.max_length is not None and self.max_length < 2:
            raise CorpusError(f"max_length is {self.max_length}, but must be at least 2.")

    def resolved(self) -> dict[str, Any]:
        """All settings as they take effect, with absolute paths; equal if they make the same corpus."""
        values = dataclasses.asdict(self)
        values["source"] = self.spec.absolute()
        if not self.chat:
            for name in ("chat", "chat_template", "template_options", "max_length", "too_long"):
                del values[name]
        else:
            values["template_options"] = dict(self.template_options)
            if self.chat_template is not None:
                values["chat_template"] = str(Path(self.chat_template).absolute())
        if self.tokenizer is None:
            values["vocab_size"] = self.vocab_size or DEFAULT_VOCAB_SIZE
        else:
            values["tokenizer"] = str(Path(self.tokenizer).absolute())
        return values
