"""The dump folder of a run: one run at a time, and nothing of an earlier one is lost.

submitted-*.toml   what a job was submitted with, by which it trains whenever it leaves the queue
.lock              held by rank 0 of the run, whose name is in it; the kernel frees it when that process ends
config.toml        every setting of the run, resolved
metrics.jsonl      and validation.jsonl: a line a step
traces/            step-N.json: timelines of traced steps
former-1/          the files of an earlier run, where a new one started from step 0
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from wlb_titan import __version__, kernels
from wlb_titan.errors import UserError
from wlb_titan.files import digest, save
from wlb_titan.runs import CONFIG_FILE, METRICS_FILE, TRACES, VALIDATION_FILE

LOCK_FILE = ".lock"
VERSION = "# wlb_titan "  # before it, in the first line of what was submitted


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the lock of a dump folder and touches nothing else in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"dump_folder: {folder} cannot be written: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(lock, 4096, 0).decode(errors="replace") or "another run"
            raise UserError(
                f"dump_folder: {folder} is in use by {other}. End that run, or name another dump_folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        holder = f"process {os.getpid()} on host {socket.gethostname()}, since {time.strftime('%F %T')}"
        os.ftruncate(lock, 0)
        with contextlib.suppress(OSError):  # on a full disk it holds all the same
            os.pwrite(lock, holder.encode(), 0)
        yield
        os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def check_place(folder: str, checkpoints: str, read: Mapping[str, str]) -> None:
    """Checks that a dump folder can be made and written, without making it, and is a place of its own: not
    in the paths that are `read`, by their keys, and with the checkpoints inside; none is a URI."""
    for key, path in {"dump_folder": folder, "checkpoint.folder": checkpoints, **read}.items():
        home = key == "dump_folder" and path.startswith("~")
        if home or "://" in path:
            raise UserError(
                f"{key}: name a folder of this machine, without {'~' if home else 'a scheme'}. A run reads "
                "and writes files: mount a bucket as a folder, or copy what it has."
            )
    place, here = Path(folder).resolve(), Path.cwd()
    if place in (here, *here.parents):
        raise UserError(
            f"dump_folder: the command runs in {here}; name a folder for the run alone, such as outputs/run."
        )
    for key, other in read.items():
        if other and Path(other).resolve() in (place, *place.parents):
            raise UserError(
                f"dump_folder: the run reads {other} ({key}); name a dump_folder outside it, or change {key}."
            )
    if place not in (place / checkpoints).resolve().parents:
        raise UserError(
            f"checkpoint.folder: {place / checkpoints} is not inside {place}, where one run at a time "
            "writes. Name a folder inside it."
        )
    while not os.path.exists(place):  # also where a folder may not be read
        place = place.parent
    if not place.is_dir():
        raise UserError(f"dump_folder: {place} is a file; name a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"dump_folder: {place} cannot be written by this user; name another folder.")


def submitted(folder: Path, config: str) -> Path:
    """Writes the configuration of a job that waits in a queue, with the version of the code."""
    text = f"{_version()}\n{config}"
    path = folder / f"submitted-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    with _writing(folder):
        save(path, text)
    return path


def changed_since(path: str | Path) -> str | None:
    """What to say of the code if it is not that with which the job of a `submitted` file was submitted."""
    with open(path, encoding="utf-8") as file:
        first = file.readline().strip()
    if not first.startswith(VERSION) or first == _version():
        return None
    return f"The code has changed since this job was submitted: {first[2:]} then, {_version()[2:]} now."


def _version() -> str:
    folders = Path(__file__).parents[1], Path(next(iter(kernels.__path__)))
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return f"{VERSION}{__version__}, code {digest(sources)}"


def note_beginning(folder: Path, config: str, step: int) -> None:
    """Writes a run's settings into its dump folder; at step 0 moves an earlier run's files aside first."""
    with _writing(folder):
        if step == 0:
            _move_former_aside(folder)
        save(folder / CONFIG_FILE, config)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"dump_folder: {folder} cannot be written: {error.strerror}.") from error


def _move_former_aside(folder: Path) -> None:
    if not any((folder / name).exists() for name in (METRICS_FILE, VALIDATION_FILE)):
        return
    aside = next(path for n in itertools.count(1) if not (path := folder / f"former-{n}").exists())
    aside.mkdir()
    for name in (METRICS_FILE, VALIDATION_FILE, CONFIG_FILE, TRACES):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
