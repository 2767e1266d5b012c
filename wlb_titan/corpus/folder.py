"""Writing a folder so that it appears at its place whole or not at all.

The work is done in a sibling, `.NAME.partial`, which is renamed at the end. A process that writes holds a
lock on a file in there; the kernel drops the lock when the process dies, however it dies, so what a killed
process left behind is told from what a living one is writing, and is thrown away.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wlb_titan.corpus.replace import LOCK_FILE, check_replaceable, remove_corpus
from wlb_titan.errors import CorpusError


def partial_folder(path: Path) -> Path:
    """Where the folder `path` is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def written_whole(path: Path, *, replace: bool) -> Iterator[Path]:
    """Give an empty folder to write into, and move it to `path` when the block ends without an exception.

    Args:
        path: where the folder shall be; its parents are made.
        replace: delete the corpus that lies at `path` by then.

    Raises:
        CorpusError: another process is writing the same folder, or wrote it meanwhile and `replace` is false;
            or what lies there by then is not only a corpus.
    """
    partial = partial_folder(path)
    partial.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(partial, path)
    try:
        _clear(partial)
        yield partial
        _move(partial, path, replace)
        (path / LOCK_FILE).unlink()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(partial: Path, path: Path) -> int:
    _check_way(partial, path)
    while True:
        partial.mkdir(exist_ok=True)
        try:
            lock = os.open(partial / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except FileNotFoundError:  # the folder's writer moved it away just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, partial / LOCK_FILE):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise CorpusError(
                f"Another process is preparing {path} at this moment; wait for it, or name another folder."
            ) from None
        os.close(lock)


def _check_way(partial: Path, path: Path) -> None:
    """Raises CorpusError where something that is not ours stands where the folder will be written."""
    ours = (partial / LOCK_FILE).is_file() or (partial.is_dir() and not any(partial.iterdir()))
    if partial.is_symlink() or (partial.exists() and not (partial.is_dir() and ours)):
        raise CorpusError(
            f"{partial}, where {path} would be written first, is not what a preparation leaves behind. Move "
            "it away, or name another folder."
        )
    replaced = _replaced(path)
    if replaced.exists() or replaced.is_symlink():
        raise CorpusError(
            f"{replaced} is in the way: a replacement of {path} was stopped when it had moved the former "
            f"corpus there. Move it back to {path.name} if there is none, or delete it."
        )


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file still lies at `path`, rather than in a folder that was moved away."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.name == LOCK_FILE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
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
