"""The log of a run: all of it on the rank that knows the loss, warnings and errors on the others."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.metrics import metrics_rank

DROPPED = (
    # Misleading: said of every configuration with the default, of ranks that do show the loss, of a CPU whose
    # peak is not known, of a tokenizer folder that never holds weights, of a variable that torchtitan sets.
    "initial_load_model_only=True has no effect",
    "Pipeline Parallel loss is not visible",
    "Peak flops undefined for",
    "Error running lspci",
    "Peak FLOPS used for computing MFU",
    "CPU memory usage for model",
    "model.safetensors.index.json not found",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "[GC]",
    # Of no use.
    "CPU capacity",
    "Structured logging",
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
"""Words of torchtitan's messages that are not shown, unless they are errors."""


def drop_misleading_warnings() -> None:
    """Drops from torchtitan's log what does not apply to wlb_titan's runs, or helps nobody."""
    logging.getLogger().addFilter(_applies)  # torchtitan logs on the root logger
    warnings.filterwarnings("ignore", message="To get the last learning rate")  # of every resumed run
    warnings.filterwarnings("ignore", message="DTensor .* may not have complete support on cpu device mesh")


def start_log(rank: int, parallel_dims: Any, schedule: str) -> None:
    """Logs to standard output: everything on the rank that reports the loss, warnings on the others."""
    drop_misleading_warnings()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_applies)  # for other loggers
    root = logging.getLogger()
    root.handlers = [handler]
    reports = rank == metrics_rank(parallel_dims, schedule)
    root.setLevel(logging.INFO if reports else logging.WARNING)


def _applies(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or not any(text in record.getMessage() for text in DROPPED)


def tell_end(config: TrainerConfig, step: int, began: float | None) -> None:
    """Logs the end of a run; `began`: the time of its first step, None if it had no step to train."""
    if began is not None:
        seconds = time.monotonic() - began
        logger.info(f"Done: step {step} was the last, after {seconds:,.0f} s. All is in {config.dump_folder}")
    elif dist.get_rank() == 0:
        logger.warning(
            f"Nothing was left to do: the checkpoint in {config.dump_folder} is of step {step}, and "
            f"training.steps is {config.training.steps}. Raise it to go on, or name another dump_folder to "
            "start anew."
        )
