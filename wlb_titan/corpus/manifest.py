"""The manifest of a corpus: what is in it, how it was made, and which files it must have.

It is written last, so a folder that has one was once complete.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_titan.errors import CorpusError

FORMAT_VERSION = 1
"""Of a corpus with all documents in `documents.arrow`."""

PARTS_FORMAT_VERSION = 2
"""Of one whose documents are in `documents-00000.arrow`, `documents-00001.arrow`, ..."""

DOCUMENTS_FILE = "documents.arrow"
PART_FILE = "documents-{:05d}.arrow"
TOKENIZER_FOLDER = "tokenizer"
UNREADABLE_FILE = "unreadable.txt"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    format_version: int = FORMAT_VERSION
    """Version of the folder's layout and of this file. A reader takes versions that it knows only."""

    fingerprint: str
    """16 hexadecimal digits that identify the content: tokenizer, token ids and order of the documents."""

    documents: int
    """Number of documents, which is the number of rows."""

    tokens: int
    """Number of tokens in all documents, end-of-text tokens included."""

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

    @property
    def document_files(self) -> list[str]:
        """The files with the documents, in the order of these."""
        return sorted(name for name in self.files if name.endswith(".arrow"))

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read the manifest of `folder`, which must exist.

        Raises:
            CorpusError: it cannot be understood, or is of another format version.
        """
        path = folder / MANIFEST_FILE
        again = "make the corpus again with `wlb-titan prepare --overwrite`"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values["format_version"]
        except (ValueError, TypeError, KeyError) as error:
            raise CorpusError(f"{path} is damaged ({error!r}); {again}.") from error
        if version not in (FORMAT_VERSION, PARTS_FORMAT_VERSION):
            raise CorpusError(
                f"{folder} has corpus format version {version}, but this wlb_titan reads the versions "
                f"{FORMAT_VERSION} and {PARTS_FORMAT_VERSION}; {again}, or use the wlb_titan that made it."
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise CorpusError(f"{path} is damaged ({error}); {again}.") from error
