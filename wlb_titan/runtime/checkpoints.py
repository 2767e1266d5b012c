"""The checkpoint that a run goes on from: the newest that is whole.

A checkpoint is a folder step-N of torch's distributed checkpoint format. Its .metadata is written last and
lists each piece's file, first byte and length. A checkpoint is broken if a file is shorter than that, because
a disk was full or a copy was cut off. The bytes themselves carry no checksum.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import BaseCheckpointManager

from wlb_titan.errors import UserError
from wlb_titan.runtime.config import TrainerConfig

METADATA = ".metadata"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Beginning:
    step: int  # of the newest whole checkpoint; -1: none
    broken: tuple[tuple[int, str], ...] = ()  # newer ones: step and damage


def beginning(config: TrainerConfig) -> Beginning:
    """The newest whole checkpoint of a run, or the one that it names."""
    checkpoint = config.checkpoint
    folder = Path(config.dump_folder) / checkpoint.folder
    if not checkpoint.enable or checkpoint.create_seed_checkpoint:
        return Beginning(-1)
    if checkpoint.load_step >= 0:
        named = folder / f"step-{checkpoint.load_step}"
        if wrong := damage(named):
            raise UserError(f"checkpoint.load_step: {named} cannot be loaded: {wrong}.")
        return Beginning(checkpoint.load_step)
    found = newest_whole(folder)
    if found.step < 0 and found.broken:
        raise UserError(
            f"checkpoint.folder: no checkpoint in {folder} is whole: "
            + "; ".join(f"step {step}: {wrong}" for step, wrong in found.broken)
            + ". Copy one again from where it came, or name another dump_folder to start anew."
        )
    initial = checkpoint.initial_load_path
    if found.step < 0 and initial and not checkpoint.initial_load_in_hf and (wrong := damage(Path(initial))):
        raise UserError(f"checkpoint.initial_load_path: {initial} cannot be loaded: {wrong}.")
    return found


def newest_whole(folder: Path) -> Beginning:
    broken = []
    for step in sorted(_steps(folder), reverse=True):
        wrong = damage(folder / f"step-{step}")
        if not wrong:
            return Beginning(step, tuple(broken))
        broken.append((step, wrong))
    return Beginning(-1, tuple(broken))


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint; empty if it is whole."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    if not (checkpoint / METADATA).is_file():
        return "" if (checkpoint / HUGGING_FACE_INDEX).is_file() else f"it has no {METADATA}"
    try:
        pieces = FileSystemReader(checkpoint).read_metadata().storage_data
        ends: dict[str, int] = {}
        for piece in pieces.values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as error:  # it is unpickled, which can raise anything
        return f"its {METADATA} is damaged ({type(error).__name__}: {error})"
    for name, end in ends.items():
        file = checkpoint / name
        size = file.stat().st_size if file.is_file() else 0
        if size < end:
            return f"its file {name} has {size:,} bytes instead of {end:,}"
    return ""


def save_stopped(checkpointer: BaseCheckpointManager, step: int, *, new: bool) -> str:
    """Saves a run that stops before its last step; `new`: whether this process trained the step. Returns a
    sentence for the log."""
    if not checkpointer.enable or checkpointer.load_only:
        return "nothing is saved, as checkpoint.enable = false or load_only = true"
    saved = step % checkpointer.interval == 0 or (step == 1 and checkpointer.enable_first_step_checkpoint)
    if new and not saved:
        checkpointer.interval = 1
        checkpointer.save(step)
    checkpointer.maybe_wait_for_saving()
    return "all is saved; start the job again to go on"


def move_broken_aside(folder: Path, steps: Sequence[int]) -> None:
    """Renames broken checkpoints to broken-N, which frees their names for new ones."""
    for step in steps:
        number, aside = 1, folder / f"broken-{step}"
        while aside.exists():
            number, aside = number + 1, folder / f"broken-{step}.{number}"
        (folder / f"step-{step}").rename(aside)


def explained(error: BaseException, folder: Path, *, saving: bool) -> BaseException:
    """The user's error behind one of torch's checkpointing, or else the error itself; `saving`: whether the
    run had started, as before that a checkpoint is loaded."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return cause
    if saving and any(map(_says_that_the_disk_is_full, causes)):
        older = newest_whole(folder).step
        follows = f"the checkpoint of step {older} is whole, and the run goes on from it"
        return UserError(
            f"A checkpoint cannot be saved in {folder}: its disk is full. Make room and start again: "
            + (f"{follows}." if older >= 0 else "there is no older checkpoint, so the run begins anew.")
        )
    if saving or not any(isinstance(cause, CheckpointException) for cause in causes):
        return error
    first = next((cause for cause in causes[1:] if not isinstance(cause, CheckpointException)), error)
    said = " ".join(str(first).split())[:500]
    return UserError(
        f"A checkpoint of {folder} cannot be loaded: {said}. If the model or the optimizer was changed, "
        "change it back, or name another dump_folder to start anew. If the checkpoint is damaged, move its "
        "folder step-N away; the run then goes on from the one before."
    )


def _steps(folder: Path) -> list[int]:
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*")]
    done = (METADATA, HUGGING_FACE_INDEX)
    return [
        int(name[1]) for name in names if name and any((folder / name[0] / one).is_file() for one in done)
    ]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what failed on other ranks."""
    yield error
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _causes(failure)
    behind = error.__cause__ or error.__context__
    if behind is not None:
        yield from _causes(behind)


def _says_that_the_disk_is_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in FULL) or "unexpected pos" in str(error)
