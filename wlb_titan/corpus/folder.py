"""Writing a corpus' folder so that it appears at its place whole or not at all, and replacing one without
losing anything else: only what its manifest lists is ever deleted.

The work is done in a sibling, `.NAME.partial`, which is renamed at the end. A process that writes holds a
lock on a file in there; the kernel drops the lock when the process dies, however it dies, so what a killed
process left behind is told from what a living one is writing, and is thrown away.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from wlb_titan.corpus.manifest import MANIFEST_FILE, Manifest
from wlb_titan.errors import CorpusError

LOCK_FILE = ".lock"


def partial_folder(path: Path) -> Path:
    """Where the folder `path` is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


def output_folder(path: str | Path) -> Path:
    """Where a corpus is made: an absolute path without links, so that a link to a folder stays one."""
    try:
        folder = Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise CorpusError(f"{path} cannot be a corpus' folder: {error}.") from error
    if not folder.name:
        raise CorpusError(f"{folder} cannot be a corpus' folder; name a folder in it.")
    return folder


@contextlib.contextmanager
def written_whole(path: Path, *, replace: bool) -> Iterator[Path]:
    """Give an empty folder to write into, and move it to `path` when the block ends without an exception.

    Args:
        path: where the folder shall be; its parents are made.
        replace: delete the corpus that lies at `path` by then.
    """
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
        _clear(partial)
        yield partial
        _move(partial, path, replace)
        # A lock of this file that another process gets now counts for nothing: it has no name any more.
        (path / LOCK_FILE).unlink()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        lock.release()


def _check_way(partial: Path, path: Path) -> None:
    """Raises CorpusError where something that is not ours stands where the folder will be written."""
    ours = (partial / LOCK_FILE).is_file() or (partial.is_dir() and not any(partial.iterdir()))
    if partial.is_symlink() or (partial.exists() and not ours):
        raise CorpusError(
            f"{partial}, where {path} would be written first, is not what a preparation leaves behind. Move "
            "it away, or name another folder."
        )
    if os.path.lexists(replaced := _replaced(path)):
        raise CorpusError(
            f"{replaced} is in the way: a replacement of {path} was stopped when it had moved the former "
            f"corpus there. Move it back to {path.name} if there is none, or delete it."
        )


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK_FILE:
            entry.unlink()


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
        remove_corpus(replaced)


def check_replaceable(folder: Path) -> None:
    """Raises CorpusError if `folder` is a file, or has a link or anything that no manifest lists."""
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
    if strangers := sorted(_strangers(folder, listed)):
        raise CorpusError(
            f"{folder} holds what no manifest of a corpus lists (such as {strangers[0]}), so nothing in it "
            "will be touched. Name another folder, or move this one away."
        )


def _strangers(folder: Path, listed: set[str]) -> Iterator[str]:
    """Files, links and empty folders anywhere below a folder that are not listed; links are not followed."""
    for entry in folder.rglob("*"):
        name = entry.relative_to(folder).as_posix()
        if entry.is_symlink():
            yield f"{name} (a link)"
        elif entry.is_dir():
            if not any(entry.iterdir()):
                yield f"{name}/"
        elif name not in listed:
            yield name


def remove_corpus(folder: Path) -> None:
    """Deletes the files that the manifest lists, and folders that are empty then; all else stays."""
    names = [*Manifest.load(folder).files, LOCK_FILE, MANIFEST_FILE]  # the manifest last
    for name in names:
        (folder / name).unlink(missing_ok=True)
    parents = {parent for name in names for parent in (folder / name).parents if folder in parent.parents}
    for parent in (*sorted(parents, reverse=True), folder):
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()
