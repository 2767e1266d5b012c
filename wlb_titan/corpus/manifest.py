"""The manifest of a corpus: what is in it, how it was made, and which files it must have.

It is written last, so a folder that has one was once complete.
"""

import dataclasses
import hashlib
import json
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
    """The content of `manifest.json`.

    Attributes:
        format_version: of the folder's layout and of this file. A reader takes its own only.
        fingerprint: 16 hexadecimal digits that identify tokenizer, token ids and order of the documents.
        documents: the number of rows.
        tokens: in all documents, end-of-text tokens included.
        masked: whether the documents have a label mask.
        learned_tokens: of a corpus with a label mask.
        cut_documents: conversations that were too long and cut.
        skipped_documents: conversations that were too long and left out.
        empty_documents: left out because they hold white space only.
        unreadable: files or records that could not be read; `unreadable.txt` names each with the reason.
        vocab_size: rows that an embedding table needs: the tokenizer's largest id, plus one.
        end_of_text: the token that ends every document, as text.
        end_of_text_id: its id.
        tokenizer_sha256: of `tokenizer/tokenizer.json`.
        settings: those of the preparation, with absolute paths; see `PrepareSettings.resolved`.
        files: every other file of the corpus: path inside the folder -> size in bytes.
        digests: SHA-256 of each of them, in hexadecimal.
    """

    format_version: int = FORMAT_VERSION
    fingerprint: str
    documents: int
    tokens: int
    masked: bool = False
    learned_tokens: int = 0
    cut_documents: int = 0
    skipped_documents: int = 0
    empty_documents: int
    unreadable: int
    vocab_size: int
    end_of_text: str
    end_of_text_id: int
    tokenizer_sha256: str
    settings: dict[str, Any]
    files: dict[str, int]
    digests: dict[str, str]

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
        """Read the manifest of `folder`, which must exist."""
        path = folder / MANIFEST_FILE
        again = f"copy {folder} again, or move it away and make it again with `wlb-titan prepare`"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version, written = values["format_version"], values.pop("manifest_sha256", None)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorpusError(f"{path} is damaged ({error!r}); {again}.") from error
        if version != FORMAT_VERSION:
            raise CorpusError(
                f"{folder} has corpus format version {version}, but this wlb_titan reads version "
                f"{FORMAT_VERSION}; {again}, or use the wlb_titan that made it."
            )
        if written != _hash(values):
            raise CorpusError(f"{path} is damaged: it is not what was written; {again}.")
        manifest = cls(**values)
        # Whoever writes a manifest can write its hash, and what it lists is deleted when it is replaced.
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
