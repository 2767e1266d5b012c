"""What a configuration leaves open until the ranks have met: policies that are `auto`, steps of epochs.

All ranks decide the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan.tools.logging import logger

from wlb_titan.job import Job
from wlb_titan.packing.policy import here
from wlb_titan.runtime.data.corpus import training_documents
from wlb_titan.runtime.data.epochs import steps_of_epochs
from wlb_titan.runtime.data.shared_answer import SharedAnswer
from wlb_titan.simulator.choice import Choice, choose

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def decided(config: Trainer.Config, job: Job) -> tuple[Job, Choice | None]:
    """A configured job with its policies chosen, and how they were; `training.steps` is set to those of
    `wlb.epochs`."""
    choice, epochs = None, config.wlb.epochs
    if job.undecided or epochs:
        documents = training_documents(config.wlb)
    if job.undecided:
        choice = choose(job, documents, on_one_rank=SharedAnswer())
        job = choice.job
    if epochs:
        # A solver that is stopped by its time limit finds other packings on other ranks.
        shared = SharedAnswer() if job.trained.packing.planning_seconds else here
        config.training.steps = steps_of_epochs(job.trained, documents, epochs, shared)
        logger.info(f"wlb.epochs = {epochs} takes {config.training.steps:,} steps")
    return job, choice
