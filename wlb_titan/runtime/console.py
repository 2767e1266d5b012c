"""What a run says: torchtitan's log of the rank that knows the loss, warnings and errors of all, and what is
told before the first step and behind the last."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from wlb_titan.runtime.data.corpus import training_documents
from wlb_titan.runtime.hugging_face import complete_export
from wlb_titan.runtime.memory import advise_checkpointing, describe_memory
from wlb_titan.runtime.metrics import metrics_rank, spoken
from wlb_titan.runtime.timeouts import first_timeout

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


MISLEADING = (
    # Said of every configuration that keeps the default.
    "initial_load_model_only=True has no effect",
    # Said unless LOG_RANK is set; here the right rank always shows the loss.
    "Pipeline Parallel loss is not visible",
    # The peak of a CPU is not known, and figures that would need it are left out.
    "Peak flops undefined for",
    "Error running lspci",
    "Peak FLOPS used for computing MFU",
    "CPU memory usage for model",
    # A corpus' tokenizer folder never holds weights.
    "model.safetensors.index.json not found",
    # torchtitan sets this variable itself.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "[GC]",
)

OF_NO_USE = (
    "CPU capacity",
    "Structured logging",
    "Building device mesh",
    "Successfully created meshes",
    "Building ",
    "Applied ",
    "Optimizer ",
    "Loading tokenizer",
    "Checkpointing active",
    "Trainer is initialized",
    "No checkpoint was provided",
    "Synchronizing and adjusting timeout",
    "Sleeping 2 seconds",
    "Training completed",
    "Destroying the purge thread",
)


def drop_misleading_warnings() -> None:
    """Leaves out of torchtitan's log what does not apply to wlb_titan's runs, or helps nobody."""
    root = logging.getLogger()  # torchtitan logs on the root logger
    if _applies not in root.filters:
        root.addFilter(_applies)
    warnings.filterwarnings("ignore", message="To get the last learning rate")  # of every resumed run
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu device mesh")


def start_log(rank: int, parallel_dims: Any, schedule: str) -> None:
    """Logs to standard output: everything on the rank that reports the loss, warnings on the others."""
    drop_misleading_warnings()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_applies)  # for those who log on loggers of their own
    root = logging.getLogger()
    root.handlers = [handler]
    logging.raiseExceptions = False  # a log on a full disk: what training cannot do without is told
    reports = rank == metrics_rank(parallel_dims, schedule)
    root.setLevel(logging.INFO if reports else logging.WARNING)


def _applies(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if record.levelno <= logging.INFO and message.startswith(OF_NO_USE):
        return False
    return not any(text in message for text in MISLEADING)


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
