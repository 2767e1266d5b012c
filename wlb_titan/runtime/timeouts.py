"""The time that a rank waits in a collective before it takes another for dead.

torchtitan allows 300 seconds until the first step is done and 100 after it. A job of balanced micro-batches
needs a bound of its own: a rank may wait for another that compiles, in any of the first steps, or that works
on a longer micro-batch, through the whole depth of a pipeline.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torchtitan.config import CommConfig

from wlb_titan.cost.passes import JobCost
from wlb_titan.cost.workload import workload
from wlb_titan.job import Job
from wlb_titan.runtime.compat import process_groups
from wlb_titan.runtime.config import TrainerConfig

GRAPHS = 6  # that a compiled model needs in all, each forward and backward
COMPILE_SECONDS = 90  # of one of them, at the most seen
STEPS = 10  # predicted steps that a rank may fall behind


def set_timeouts(seconds: int, without: dist.ProcessGroup | None = None) -> None:
    """Has every process group of this rank, `without` one of them, give others up after so many seconds.

    torch gives the groups of a mesh, and those that FSDP makes, their backend's default, and torchtitan tells
    only some of them, after its first step.
    """
    for group in process_groups():
        if group is not without:
            dist.set_timeout(timedelta(seconds=seconds), group)


def first_timeout(comm: CommConfig) -> int:
    """Seconds after which a collective is given up until the first step is done: never fewer than later."""
    return max(comm.init_timeout_seconds, comm.train_timeout_seconds)


def train_timeout(config: TrainerConfig, job: Job) -> tuple[int, str]:
    """Seconds after which a collective is given up in training, and the reason.

    What the user set (`comm.train_timeout_seconds`) holds. Otherwise it is torchtitan's default, or ten times
    the predicted step if that is longer, with the time of all graphs of torch.compile and of planning a step.
    """
    default = CommConfig().train_timeout_seconds
    if config.comm.train_timeout_seconds != default:
        return config.comm.train_timeout_seconds, "as comm.train_timeout_seconds says"
    step = STEPS * predicted_step(job)
    seconds, reasons = (step, [f"{STEPS} predicted steps"]) if step > default else (default, ["the default"])
    if config.compile.enable:
        seconds += GRAPHS * COMPILE_SECONDS
        reasons.append(f"{GRAPHS * COMPILE_SECONDS} for compiling")
    if planning := job.packing.planning_seconds:
        seconds += planning
        reasons.append(f"{planning:.0f} for the solver")
    return round(seconds), " and ".join(reasons)


def predicted_step(job: Job) -> float:
    """Seconds of a rank's micro-batches, if all are as long as they may be, of whole windows."""
    windows = job.replica_micro_batches * job.longest_micro_batch / job.window
    return windows * float(workload(JobCost(job), np.array([job.window]))[0])
