"""The folder of a prepared corpus: its manifest, how it appears whole or not at all, and how it is replaced.

A corpus is written into a sibling, `.NAME.partial`, manifest last, which is renamed at the end. The writer
holds a lock on a file in there; the kernel drops the lock when the process dies, so leftovers of a killed
process can be told from a folder in use, and are deleted. Of a corpus, only files that its manifest lists are
ever deleted.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wlb_titan.errors import CorpusError

FORMAT_VERSION = 5

DOCUMENTS_FILE = "documents.arrow"
TOKENIZER_FOLDER = "tokenizer"
UNREADABLE_FILE = "unreadable.txt"
MANIFEST_FILE = "manifest.json"
LOCK_FILE = ".lock"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    format_version: int = FORMAT_VERSION  # readers accept only their own
    fingerprint: str  # 16 hexadecimal digits that identify tokenizer, token ids and order of the documents
    documents: int
    tokens: int  # end-of-text tokens included
    masked: bool = False  # whether the documents have a label mask
    learned_tokens: int = 0  # under that mask
    cut_documents: int = 0  # conversations cut because they were too long
    skipped_documents: int = 0  # conversations left out because they were too long
    empty_documents: int  # left out because they hold only white space
    unreadable: int  # files or records that could not be read; UNREADABLE_FILE gives each with the reason
    vocab_size: int  # rows that an embedding table needs: the largest id, plus one
    end_of_text: str  # the token that ends every document
    end_of_text_id: int
    tokenizer_sha256: str  # of tokenizer.json
    settings: dict[str, Any]  # of the preparation, with absolute paths: `PrepareSettings.resolved`
    files: dict[str, int]  # every other file of the corpus: path inside the folder -> bytes
    digests: dict[str, str]  # their SHA-256

    def damage(
        self, folder: Path, *, whole: bool, read: Callable[[int], None] = lambda size: None
    ) -> Iterator[str]:
        """A few words on each file that was changed; without `whole`, only the documents' size is checked."""
        for name, size in self.files.items():
            file = folder / name
            if not file.is_file():
                yield f"the file {name} is missing"
            elif file.stat().st_size != size:
                yield f"the file {name} has {file.stat().st_size:,} bytes instead of {size:,}"
            elif (whole or name != DOCUMENTS_FILE) and digest(file, read) != self.digests.get(name):
                yield f"{name} was changed"

    def save(self, folder: Path) -> None:
        """Write the manifest, with a hash of itself."""
        values = dataclasses.asdict(self)
        values["manifest_sha256"] = _hash(values)
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
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
        return cls(**values)


def digest(file: Path, read: Callable[[int], None] = lambda size: None) -> str:
    """SHA-256 of a file in hexadecimal; `read` is told the bytes of each part that was read."""
    result = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(1 << 22):
            result.update(part)
            read(len(part))
    return result.hexdigest()


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def output_folder(path: str | Path) -> Path:
    """The absolute path without links, so that replacing a corpus keeps a link to its folder."""
    try:
        folder = Path(path).resolve()
        file = folder.exists() and not folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise CorpusError(f"{path} cannot be a corpus' folder: {error}.") from error
    if file:
        raise CorpusError(f"{folder} is a file; name a folder for the corpus.")
    if not folder.name:
        raise CorpusError(f"{folder} cannot be a corpus' folder; name a folder in it.")
    return folder


def partial_folder(path: Path) -> Path:
    """Where the folder `path` is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def written_whole(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yields an empty folder, which becomes `path` if the block ends without an exception; with `replace`, it
    takes the place of a corpus."""
    partial = partial_folder(path)
    _check_way(partial, path)
    partial.mkdir(parents=True, exist_ok=True)
    lock = FileLock(partial / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CorpusError(
            f"Another process is preparing {path} at this moment; wait for it, or name another folder."
        ) from None
    try:
        for entry in partial.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK_FILE:
                entry.unlink()
        yield partial
        _move(partial, path, replace)
        # Another process may have opened it and lock it now; without a name, the file protects nothing.
        (path / LOCK_FILE).unlink()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        lock.release()


def _check_way(partial: Path, path: Path) -> None:
    """A CorpusError if something foreign is in the way."""
    ours = (partial / LOCK_FILE).is_file() or (partial.is_dir() and not any(partial.iterdir()))
    if partial.is_symlink() or (partial.exists() and not ours):
        raise CorpusError(
            f"{partial}, where {path} would be written first, is not what a preparation leaves behind. Move "
            "it away, or name another folder."
        )
    if os.path.lexists(replaced := _replaced(path)):
        raise CorpusError(
            f"{replaced} is in the way: a stopped replacement of {path} had moved the former corpus there. "
            f"Move it back to {path.name} if there is none, or delete it."
        )


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _move(partial: Path, path: Path, replace: bool) -> None:
    replaced = _replaced(path)
    try:
        if replace and path.exists():
            check_replaceable(path)  # once more: preparing takes hours
            path.rename(replaced)
        partial.rename(path)
    except BaseException as error:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        if isinstance(error, OSError) and path.exists():  # only an empty folder can be renamed to
            raise CorpusError(f"{path} appeared while it was being prepared; it is left as it is.") from error
        raise
    if replaced.exists():
        _remove_corpus(replaced)


def check_replaceable(folder: Path) -> None:
    """A CorpusError if `folder` has a link or anything that no manifest lists."""
    if strangers := sorted(_strangers(folder)):
        raise CorpusError(
            f"{folder} holds what no manifest of a corpus lists (such as {strangers[0]}), so nothing in it "
            "will be touched. Name another folder, or move this one away."
        )


def _listed(folder: Path) -> set[str]:
    there = (folder / MANIFEST_FILE).is_file()
    return {LOCK_FILE, MANIFEST_FILE, *Manifest.load(folder).files} if there else {LOCK_FILE}


def _strangers(folder: Path) -> Iterator[str]:
    """Unlisted files, links and empty folders at any depth; links are not followed."""
    listed = _listed(folder)
    for entry in folder.rglob("*"):
        name = entry.relative_to(folder).as_posix()
        if entry.is_symlink():
            yield f"{name} (a link)"
        elif entry.is_dir():
            if not any(entry.iterdir()):
                yield f"{name}/"
        elif name not in listed:
            yield name


def _remove_corpus(folder: Path) -> None:
    """Deletes the files that the manifest lists, and then empty folders."""
    listed = _listed(folder)
    for entry in (*sorted(folder.rglob("*"), reverse=True), folder):  # contents before their folder
        if entry.is_dir():
            with contextlib.suppress(OSError):  # not empty
                entry.rmdir()
        elif entry.relative_to(folder).as_posix() in listed:
            entry.unlink()
