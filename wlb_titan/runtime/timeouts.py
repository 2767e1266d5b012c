"""How long a rank waits in a collective before it takes another for dead.

torchtitan allows 300 seconds until the first step is done and 100 after it. A job of balanced micro-batches
needs a bound of its own: a rank may wait for another that compiles, in any of the first steps, or that works
on a longer micro-batch, through the whole depth of a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torchtitan.config import CommConfig

from wlb_titan.cost.cost_model import cost_model
from wlb_titan.cost.workload import workload
from wlb_titan.runtime.memory import longest_micro_batch
from wlb_titan.runtime.shape import model_shape

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer

GRAPHS = 6  # that a compiled model needs in all, each forward and backward
COMPILE_SECONDS = 90  # of one of them, at the most seen
STEPS = 10  # predicted steps that a rank may fall behind


def train_timeout(config: Trainer.Config) -> tuple[int, str]:
    """Seconds after which a collective is given up in training, and the reason.

    What the user set (`comm.train_timeout_seconds`) holds. Otherwise torchtitan's default, or ten times the
    predicted step if that is longer, and with torch.compile besides the time of all its graphs; under the
    solver what it may take for a window.
    """
    default = CommConfig().train_timeout_seconds
    if config.comm.train_timeout_seconds != default:
        return config.comm.train_timeout_seconds, "as comm.train_timeout_seconds says"
    step = STEPS * predicted_step(config)
    seconds, reasons = (step, [f"{STEPS} predicted steps"]) if step > default else (default, ["the default"])
    if config.compile.enable:
        seconds += GRAPHS * COMPILE_SECONDS
        reasons.append(f"{GRAPHS * COMPILE_SECONDS} for compiling")
    if config.wlb.packing.policy == "fixed_solver":
        seconds += config.wlb.packing.time_limit
        reasons.append(f"{config.wlb.packing.time_limit:.0f} for the solver")
    return round(seconds), " and ".join(reasons)


def predicted_step(config: Trainer.Config) -> float:
    """Seconds of a rank's micro-batches on an H100, if all are as long as they may be, of whole windows."""
    assert config.model_spec is not None
    model = cost_model(
        "analytic",
        model_shape(config.model_spec.model),
        tensor_parallel=config.parallelism.tensor_parallel_degree,
        context_parallel=config.parallelism.context_parallel_degree,
        dtype=config.training.mixed_precision_param,
    )
    window = config.training.seq_len
    windows = config.training.local_batch_size * longest_micro_batch(config) / window
    return windows * float(workload(model, np.array([window]))[0])
