"""The manifest of a corpus: what is in it, how it was made, and which files it must have.

It is written last, so a folder that has one was once complete.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_titan.errors import CorpusError

FORMAT_VERSION = 5
READ_AT_ONCE = 1 << 22  # bytes

DOCUMENTS_FILE = "documents.arrow"
TOKENIZER_FOLDER = "tokenizer"
UNREADABLE_FILE = "unreadable.txt"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    format_version: int = FORMAT_VERSION
    """Version of the folder's layout and of this file. A reader takes its own only."""

    fingerprint: str
    """16 hexadecimal digits that identify the content: tokenizer, token ids and order of the documents."""

    documents: int
    """Number of documents, which is the number of rows."""

    tokens: int
    """Number of tokens in all documents, end-of-text tokens included."""

    masked: bool = False
    """Whether the documents have a label mask."""

    learned_tokens: int = 0
    """Tokens that are learned, of a corpus with a label mask."""

    cut_documents: int = 0
    """Conversations that were too long and cut."""

    skipped_documents: int = 0
    """Conversations that were too long and left out."""

    empty_documents: int
    """Documents that were left out because they hold white space only."""

    unreadable: int
    """Files or records that could not be read; `unreadable.txt` names each with the reason."""

    vocab_size: int
    """Rows that an embedding table needs: the tokenizer's largest id, plus one."""

    end_of_text: str
    """The token that ends every document, as text."""

    end_of_text_id: int
    """The id of that token."""

    tokenizer_sha256: str
    """Hash of `tokenizer/tokenizer.json`."""

    settings: dict[str, Any]
    """The settings of the preparation, with absolute paths; see `PrepareSettings.resolved`."""

    files: dict[str, int]
    """Every other file of the corpus: path inside the folder -> size in bytes."""

    digests: dict[str, str]
    """SHA-256 of each of them, in hexadecimal."""

    def damage(
        self, folder: Path, *, whole: bool, read: Callable[[int], None] = lambda size: None
    ) -> Iterator[str]:
        """How the files in `folder` differ from what was written: a few words for each that does.

        Args:
            whole: also compare the documents' digest, which takes long; else only their size.
            read: told of the bytes of each part of a file that was read.
        """
        for name, size in self.files.items():
            file = folder / name
            if not file.is_file():
                yield f"the file {name} is missing"
            elif file.stat().st_size != size:
                yield f"the file {name} has {file.stat().st_size:,} bytes instead of {size:,}"
            elif (whole or name != DOCUMENTS_FILE) and digest(file, read) != self.digests.get(name):
                yield f"{name} was changed"

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`, with a hash of itself."""
        values = dataclasses.asdict(self)
        values["manifest_sha256"] = _hash(values)
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read the manifest of `folder`, which must exist.

        Raises:
            CorpusError: it cannot be understood, or is of another format version.
        """
        path = folder / MANIFEST_FILE
        again = f"copy {folder} again, or move it away and make it again with `wlb-titan prepare`"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values["format_version"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorpusError(f"{path} is damaged ({error!r}); {again}.") from error
        if version != FORMAT_VERSION:
            raise CorpusError(
                f"{folder} has corpus format version {version}, but this wlb_titan reads version "
                f"{FORMAT_VERSION}; {again}, or use the wlb_titan that made it."
            )
        if values.pop("manifest_sha256", None) != _hash(values):
            raise CorpusError(f"{path} is damaged: it is not what was written; {again}.")
        hints = typing.get_type_hints(cls)
        for name, value in values.items():
            if name in hints and not isinstance(value, typing.get_origin(hints[name]) or hints[name]):
                raise CorpusError(f"{path} is damaged: {name} is {value!r}; {again}.")
        try:
            manifest = cls(**values)
        except TypeError as error:
            raise CorpusError(f"{path} is damaged ({error}); {again}.") from error
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CorpusError(f"{path} is damaged: it lists {name!r}, outside the folder; {again}.")
        return manifest


def digest(file: Path, read: Callable[[int], None] = lambda size: None) -> str:
    """SHA-256 of a file in hexadecimal; `read` is told of the bytes of each part that was read."""
    result = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(READ_AT_ONCE):
            result.update(part)
            read(len(part))
    return result.hexdigest()


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
