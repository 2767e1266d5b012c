"""The checkpoint that a run goes on from: the newest that is whole.

A checkpoint is a folder step-N of torch's distributed checkpoint format. Its .metadata is written last and
lists each piece's file, first byte and length. A checkpoint is broken if a file is shorter than that, because
a disk was full or a copy was cut off. The bytes themselves carry no checksum. From weights alone, as a run
exports them after its last step, no run goes on.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.trainer import Trainer as TorchtitanTrainer

from wlb_titan.errors import UserError
from wlb_titan.runtime.config import TrainerConfig

NEVER = torch.iinfo(torch.int64).max
METADATA = ".metadata"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")  # beside the weights
WEIGHTS_ALONE = "has weights alone, from which no run can continue"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Beginning:
    step: int  # of the checkpoint; -1: none
    newer: tuple[tuple[int, str, str], ...] = ()  # others: step, what they are renamed to, and why


def beginning(config: TrainerConfig) -> Beginning:
    """The newest whole checkpoint of a run, or the one that it names."""
    checkpoint = config.checkpoint
    folder = Path(config.dump_folder) / checkpoint.folder
    if not checkpoint.enable:
        return Beginning(-1)
    if checkpoint.create_seed_checkpoint:
        if steps := _steps(folder):
            raise UserError(
                f"checkpoint.create_seed_checkpoint: {folder} has a checkpoint of step {max(steps)} already; "
                "name another dump_folder."
            )
        return Beginning(-1)
    needed = [state for state in STATES if state not in checkpoint.exclude_from_loading]
    if checkpoint.load_step >= 0:
        named = folder / f"step-{checkpoint.load_step}"
        if fault := damage(named, needed if checkpoint.load_step else []):
            raise UserError(f"checkpoint.load_step: {named} cannot be loaded: it {fault}.")
        later = [step for step in sorted(_steps(folder)) if step > checkpoint.load_step]
        newer = tuple((step, "former", "is of a later step") for step in later)
        return Beginning(checkpoint.load_step, newer)
    newest = newest_whole(folder, needed)
    done = [step for step, _, fault in newest.newer if fault == WEIGHTS_ALONE]
    if done and max(done) >= config.training.steps and not config.wlb.epochs:
        raise UserError(
            f"training.steps: the run in {config.dump_folder} has completed its {max(done)} steps; set more "
            "to continue it."
        )
    if newest.step < 0 and newest.newer:
        raise UserError(
            f"checkpoint.folder: the run cannot continue from any checkpoint in {folder}: "
            + "; ".join(f"step-{step} {fault}" for step, _, fault in newest.newer)
            + ". Copy an intact one there, or name another dump_folder to start anew; "
            "checkpoint.initial_load_path loads weights alone."
        )
    initial = "" if checkpoint.initial_load_in_hf else checkpoint.initial_load_path
    needed = [] if checkpoint.initial_load_model_only else needed
    if newest.step < 0 and initial and (fault := damage(Path(initial), needed)):
        raise UserError(f"checkpoint.initial_load_path: {initial} cannot be loaded: it {fault}.")
    return newest


def newest_whole(folder: Path, needed: Collection[str] = STATES) -> Beginning:
    newer: list[tuple[int, str, str]] = []
    for step in sorted(_steps(folder), reverse=True):
        fault = damage(folder / f"step-{step}", needed if step else [])  # a seed checkpoint has weights alone
        if not fault:
            return Beginning(step, tuple(newer))
        newer.append((step, "former" if fault == WEIGHTS_ALONE else "broken", fault))
    return Beginning(-1, tuple(newer))


def damage(checkpoint: Path, needed: Collection[str] = STATES) -> str:
    """Why a checkpoint cannot be loaded with the states that are needed; empty if it can."""
    try:
        there = {file.name for file in checkpoint.iterdir()}
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        return "does not exist" if gone else f"cannot be read: {error.strerror}"
    if METADATA not in there:
        exported = needed and HUGGING_FACE_INDEX in there
        return WEIGHTS_ALONE if exported else f"has no {METADATA}"
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
        pieces, names = metadata.storage_data, {name.split(".")[0] for name in metadata.state_dict_metadata}
        ends: dict[str, int] = {}
        for piece in pieces.values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as error:  # it is unpickled, which can raise anything
        return f"is broken: its {METADATA} is damaged ({type(error).__name__}: {error})"
    for name, end in ends.items():
        file = checkpoint / name
        size = file.stat().st_size if file.is_file() else 0
        if size < end:
            return f"is broken: its file {name} has {size:,} bytes instead of {end:,}"
    return "" if names.issuperset(needed) else WEIGHTS_ALONE


def saves(checkpointer: BaseCheckpointManager, step: int, last: bool = False) -> bool:
    """Whether torchtitan saves a step by itself."""
    if not checkpointer.enable or checkpointer.load_only:
        return False
    first = step == 1 and checkpointer.enable_first_step_checkpoint
    return last or first or step % checkpointer.interval == 0


def save_stopped(checkpointer: BaseCheckpointManager, step: int, *, new: bool) -> str:
    """Saves a run that stops before its last step; `new`: whether this process trained the step. Returns a
    sentence for the log."""
    if not checkpointer.enable or checkpointer.load_only:
        return "nothing is saved, as checkpoint.enable = false or load_only = true"
    if new and not saves(checkpointer, step):
        checkpointer.interval = 1
        checkpointer.save(step)
    checkpointer.maybe_wait_for_saving()
    return "all is saved; start the job again to continue"


def move_aside(folder: Path, begun: Beginning) -> None:
    """Renames checkpoints of steps that the run will reach again to broken-N or former-N: none is ever
    overwritten."""
    for step, kind, _ in begun.newer:
        number, aside = 1, folder / f"{kind}-{step}"
        while aside.exists():
            number, aside = number + 1, folder / f"{kind}-{step}.{number}"
        (folder / f"step-{step}").rename(aside)


class Finite:
    """Whether losses, gradients and weights are finite numbers: what is not is never saved.

    Once one of them is infinite or NaN, all later steps are. Each step is noted on the device, without
    waiting for it, and the notes are read where the run waits anyway: in a logged step and before a save.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), NEVER, dtype=torch.int64, device=device)  # step that is not finite

    def note(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Notes this rank's loss and norm of gradients, two scalars."""
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        self._first = torch.where(finite, self._first, self._first.clamp(max=step))

    def check(self, trainer: TorchtitanTrainer, *, saves: bool) -> None:
        """Ends the run if any rank's steps up to this one or, before it is saved, weights are not finite."""
        first, step, config = self._first.clone(), trainer.step, trainer.config
        for part in trainer.model_parts if saves else ():
            for weight in part.parameters():
                first = torch.where(all_finite(weight), first, first.clamp(max=step))
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if (begun := int(first)) == NEVER:
            return
        trainer.checkpointer.maybe_wait_for_saving()
        raise UserError(
            f"From step {begun} on (this is step {step}) the loss, gradients or weights are not finite "
            "numbers, and not saved. Lower optimizer.param_groups.N.optimizer_kwargs.lr, raise "
            f"lr_scheduler.warmup_steps, or look for bad documents, and start again: {_continues(config)}"
        )


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers of a tensor, or of this rank's part of it, are finite: bool scalar."""
    return torch.isfinite(tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor).all()


def _continues(config: TrainerConfig) -> str:
    """From which checkpoint a run continues when it is started again, as the end of a message."""
    newest = newest_whole(Path(config.dump_folder) / config.checkpoint.folder).step
    if not config.checkpoint.enable or newest < 0:
        return "there is no older checkpoint, so the run begins anew."
    return f"the checkpoint of step {newest} is intact, and the run continues from it."


def explained(error: BaseException, config: TrainerConfig, step: int, *, saving: bool) -> BaseException:
    """The user's error behind one of torch's checkpointing, or else the error itself; `saving`: whether the
    run had started, as before that the checkpoint of a step, or of -1 the initial one, is loaded."""
    folder = Path(config.dump_folder) / config.checkpoint.folder
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return cause
    full = [c for c in causes if getattr(c, "errno", 0) in FULL or "unexpected pos" in str(c)]
    if saving and full:
        return UserError(
            f"A checkpoint cannot be saved in {folder}: its disk is full. Make room and start again: "
            + _continues(config)
        )
    if saving or not any(isinstance(cause, CheckpointException) for cause in causes):
        return error
    first = next((cause for cause in causes[1:] if not isinstance(cause, CheckpointException)), error)
    said = " ".join(str(first).split())[:500]
    if step < 0:
        return UserError(
            f"checkpoint.initial_load_path: {config.checkpoint.initial_load_path} cannot be loaded: {said}. "
            "Name a checkpoint of this model."
        )
    return UserError(
        f"The checkpoint {folder / f'step-{step}'} cannot be loaded: {said}. If the model or the optimizer "
        "was changed, change it back, or name another dump_folder to start anew. If the checkpoint is "
        "damaged, move it away; the run then continues from the one before it."
    )


def _steps(folder: Path) -> list[int]:
    done = {
        file.parent.name for name in (METADATA, HUGGING_FACE_INDEX) for file in folder.glob(f"step-*/{name}")
    }
    return [int(name[1]) for name in map(re.compile(r"step-(\d+)").fullmatch, done) if name]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what failed on other ranks."""
    yield error
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _causes(failure)
    behind = error.__cause__ or error.__context__
    if behind is not None:
        yield from _causes(behind)
