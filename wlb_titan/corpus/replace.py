"""Replacing a corpus without losing anything else: only what its manifest lists is ever deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from wlb_titan.corpus.manifest import MANIFEST_FILE, Manifest
from wlb_titan.errors import CorpusError

LOCK_FILE = ".lock"


def output_folder(path: str | Path) -> Path:
    """Where a corpus is made: an absolute path without links, so that a link to a folder stays one.

    Raises:
        CorpusError: links lead in a circle, or it is the root of the file system.
    """
    try:
        folder = Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise CorpusError(f"{path} cannot be a corpus' folder: {error}.") from error
    if not folder.name:
        raise CorpusError(f"{folder} cannot be a corpus' folder; name a folder in it.")
    return folder


def check_replaceable(folder: Path) -> None:
    """Make sure that nothing but a corpus would be lost with `folder`.

    Raises:
        CorpusError: it is a file, or a folder with anything that no manifest lists, or a link.
    """
    try:
        if not folder.exists():
            return
    except OSError as error:
        raise CorpusError(f"{folder} cannot be a corpus' folder: {error.strerror}.") from error
    if not folder.is_dir():
        raise CorpusError(f"{folder} is a file; name a folder for the corpus.")
    listed = {LOCK_FILE}
    if (folder / MANIFEST_FILE).is_file():
        listed |= {MANIFEST_FILE, *Manifest.load(folder).files}
    strangers = sorted(name for name in _below(folder, folder) if name not in listed)
    if strangers:
        raise CorpusError(
            f"{folder} holds what no manifest of a corpus lists (such as {strangers[0]}), so nothing in it "
            "will be touched. Name another folder, or move this one away."
        )


def remove_corpus(folder: Path) -> None:
    """Deletes the files that the manifest lists, and folders that are empty then; all else stays."""
    names = [*Manifest.load(folder).files, LOCK_FILE, MANIFEST_FILE]  # the manifest last
    for name in names:
        (folder / name).unlink(missing_ok=True)
    parents = {parent for name in names for parent in (folder / name).parents if folder in parent.parents}
    for parent in (*sorted(parents, reverse=True), folder):
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()


def _below(folder: Path, root: Path) -> Iterator[str]:
    """Everything below a folder that is no folder itself, or an empty one; links are not followed."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            inside = list(_below(entry, root))
            yield from inside or [entry.relative_to(root).as_posix() + "/"]
        else:
            name = entry.relative_to(root).as_posix()
            yield f"{name} (a link)" if entry.is_symlink() else name
