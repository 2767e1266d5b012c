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
TOO_LONG = ("cut", "skip", "error")
DEFAULT_VOCAB_SIZE = 4096
MIN_VOCAB_SIZE = 257
"""256 bytes and the end-of-text token."""


@dataclass(frozen=True)
class SourceSpec:
    """A source taken apart: `jsonl:a.jsonl#body` is kind `jsonl`, location `a.jsonl`, field `body`.

    Attributes:
        location: a file, a folder, or a name on the Hugging Face hub.
        field: the column that holds the text.
        config: Hugging Face only: which configuration of the dataset.
        split: Hugging Face only, such as `train` or `train[:1%]`.
    """

    kind: str
    location: str = ""
    field: str = "text"
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, text: str, field: str = "text") -> "SourceSpec":
        """Take a source's description apart; nothing is looked up. `field` is that of one that names none."""
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

    Attributes:
        source: where the documents come from, in one of the forms of `SOURCES`.
        tokenizer: folder of a Hugging Face tokenizer; None trains a byte-level BPE on the corpus.
        vocab_size: most entries that the trained tokenizer may have; None is `DEFAULT_VOCAB_SIZE`.
        seed: of the order of the documents.
        max_tokens: stop with the document that reaches this many; None takes all documents.
        chat: the source's records are conversations; they are written by the tokenizer's chat template.
        chat_template: chat only: a file with the template, in place of the tokenizer's own.
        template_options: chat only: names and values that the template reads besides.
        max_length: chat only: longest conversation in tokens.
        too_long: chat only: what is done with longer ones, one of `TOO_LONG`.
    """

    source: str = "python-source"
    tokenizer: str | None = None
    vocab_size: int | None = None
    seed: int = 0
    max_tokens: int | None = None
    chat: bool = False
    chat_template: str | None = None
    template_options: tuple[tuple[str, Any], ...] = ()
    max_length: int | None = None
    too_long: str = "error"

    def __post_init__(self) -> None:
        kind = self.spec.kind
        if self.tokenizer is not None and self.vocab_size is not None:
            raise CorpusError(
                "A vocabulary size is for the tokenizer that is trained here; the tokenizer "
                f"{self.tokenizer} has its own. Leave one of the two out."
            )
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
        if self.too_long != "error" and self.max_length is None:
            raise CorpusError("--too-long is about conversations beyond --max-length; set that, or neither.")

    @property
    def spec(self) -> SourceSpec:
        """`source`, taken apart."""
        return SourceSpec.parse(self.source, "messages" if self.chat else "text")

    @property
    def template_file(self) -> Path | None:
        return Path(self.chat_template) if self.chat_template else None

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
