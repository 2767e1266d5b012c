"""The implementation of the job's attention: refused before anything is built, compiled before the first
step."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from wlb_titan.errors import UserError
from wlb_titan.job import Job
from wlb_titan.kernels.implementations import Device, chosen, device_of
from wlb_titan.kernels.measure import Shape
from wlb_titan.kernels.options import Options
from wlb_titan.kernels.segments import Visibility
from wlb_titan.kernels.self_check import KernelError, check_kernels
from wlb_titan.kernels.warm_up import warm_up
from wlb_titan.runtime.shape import model_shape

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def check_implementation(config: Trainer.Config, device: Device | None = None) -> str:
    """What computes forward and backward passes.

    Args:
        device: on which it runs; None where that is not known, as on the machine that submits it.

    Raises:
        UserError: it cannot run the model's attention.
    """
    wish = config.wlb.attention.implementation
    assert config.model_spec is not None
    shape = model_shape(config.model_spec.model)
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    if device is None:
        anywhere = wish in ("auto", "reference")
        device = Device("cpu" if anywhere or config.wlb.device == "cpu" else "cuda")
    try:
        return chosen(wish, (shape.head_dim, shape.v_head_dim or shape.head_dim), dtype, device)
    except ValueError as error:
        if device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
            raise UserError(
                f"training.mixed_precision_param: the attention kernels take bfloat16, got {dtype}; set it "
                'to "bfloat16", or wlb.attention.implementation to "reference", which is slow.'
            ) from error
        raise UserError(f"wlb.attention.implementation: {error}.") from error


def compile_attention(config: Trainer.Config, job: Job, device: torch.device, context_rank: int) -> None:
    """Compiles the kernels that the job's attention can meet, where it has some, and checks them on each GPU.

    Every rank takes part. The first of each machine goes first, and the others find its kernels in Triton's
    cache. A launch that hangs is found before any collective could wait for it.

    Raises:
        UserError: the kernels are wrong on this rank's GPU, or hang there.
    """
    which = check_implementation(config, device_of(device))
    logger.info(f"Attention: {which}")
    if which == "reference" or device.type != "cuda":  # an interpreter compiles nothing
        return
    first = int(os.environ["LOCAL_RANK"]) == 0
    for turn in (True, False):
        if turn is first:
            for window in windows(job):
                _prepare(config, attention_shape(job, context_rank), window, which, device)
        dist.barrier()


def _prepare(
    config: Trainer.Config, shape: Shape, window: int | None, which: str, device: torch.device
) -> None:
    """Compiles and checks what layers with a window run."""
    visibility, implementation = Visibility(window=window), config.wlb.attention.implementation
    options = Options(shape.dim**-0.5, visibility, implementation=implementation)
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    what = "Attention kernels" if window is None else f"Attention kernels with a window of {window}"
    begin = time.perf_counter()
    for done, of in warm_up(shape, options, dtype, device):
        logger.info(f"{what}: {done} of {of} compiled, {time.perf_counter() - begin:.1f} s")
    try:
        error = check_kernels(shape, options, dtype, device)
    except KernelError as wrong:
        gpu, other = torch.cuda.get_device_name(device), "triton" if which == "gluon" else "reference"
        raise UserError(
            f"wlb.attention.implementation: {what.lower()} ({which}) do not work on this {gpu}: {wrong}. "
            f'Set it to "{other}", and report it, please.'
        ) from wrong
    logger.info(f"{what}: right on this GPU, at most {error:.2%} from the reference")


def attention_shape(job: Job, context_rank: int) -> Shape:
    """Heads and head dims with which a rank calls the kernels."""
    model, tensor = job.model, job.degrees.tensor
    heads = model.heads // tensor, model.kv_heads // tensor
    if job.strategy is not None:
        heads = job.strategy.heads(*heads, context_rank)
    return Shape(*heads, model.head_dim, model.v_head_dim or model.head_dim)


def windows(job: Job) -> list[int | None]:
    """The different windows of the model's layers; None is a layer without one."""
    found = dict(job.model.windows)
    return [*([None] if sum(found.values()) < job.model.layers else []), *found]
