"""What a run tells before its first step, of what is predicted, and behind its last."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torchtitan.tools.logging import logger

from wlb_titan.runtime.data.corpus import training_documents
from wlb_titan.runtime.export import complete_export
from wlb_titan.runtime.life.timeouts import first_timeout
from wlb_titan.runtime.memory import advise_checkpointing, describe_memory
from wlb_titan.runtime.metrics import spoken

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def tell_beginning(trainer: Trainer) -> None:
    """The corpus, what was chosen, and what memory and time are predicted."""
    if not logger.isEnabledFor(logging.INFO):
        return  # nobody reads it on this rank, and whole steps are planned for it
    corpus, choice, job = trainer.planned.corpus, trainer.choice, trainer.job
    logger.info(f"Corpus {corpus}: {len(corpus):,} documents, {corpus.lengths.sum():,} tokens")
    if choice is not None:
        for row in choice.rows():
            logger.info(", ".join(f"{heading} {cell}" for heading, cell in row.items()))
        for line in choice.remarks():
            logger.info(line)
    for line in describe_memory(job, training_documents(trainer.config.wlb, corpus)):
        logger.info(line)
    for line in advise_checkpointing(job):
        logger.info(line)


def tell_timeouts(trainer: Trainer) -> None:
    """When a rank that does not answer is given up."""
    comm = trainer.config.comm
    logger.info(
        f"A rank that does not answer is given up after {first_timeout(comm)} s in the first step, "
        f"{comm.train_timeout_seconds} s from then on ({trainer.timeout_reason})"
    )


def end(trainer: Trainer, seconds: float) -> None:
    """Completes what was exported where all steps are done, and tells what came of the run."""
    config = trainer.config
    if trainer.step < config.training.steps:
        return
    checkpoint = config.checkpoint
    folder = Path(config.dump_folder) / checkpoint.folder / f"step-{trainer.step}"
    exports = checkpoint.last_save_in_hf and checkpoint.enable and not checkpoint.load_only
    if exports and dist.get_rank() == 0 and folder.is_dir():
        complete_export(folder, config, trainer.planned.corpus)
    if trainer.planned.plan is not None:
        logger.info(
            f"Done: step {trainer.step} was the last, after {spoken(seconds)}. All is in {config.dump_folder}"
        )
    elif dist.get_rank() == 0:
        logger.warning(
            f"Nothing was left to do: the checkpoint in {config.dump_folder} is of step "
            f"{trainer.step}, and training.steps is {config.training.steps}. Raise it to go on, or "
            "name another dump_folder to start anew."
        )
