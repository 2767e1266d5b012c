"""The implementation of the job's attention: refused before anything is built, compiled and checked before
the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from wlb_titan.errors import UserError
from wlb_titan.job import Job
from wlb_titan.kernels.implementations import PASSES, REFERENCE, TABLE, TORCH, Device, chosen, device_of
from wlb_titan.kernels.segments import Options, Shape
from wlb_titan.kernels.self_check import KernelError, Noise, check_kernels, errors_of, warm_up
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.configured import model_shape

TUNED = {"Hopper": "gluon", "Blackwell": "fa4"}


def check_implementation(
    config: TrainerConfig, device: Device | None = None, window: int | None = None
) -> tuple[str, str]:
    """What computes forward and backward passes; refuses what cannot run the model's attention. The device is
    None where it is not known, as on the machine that submits the job."""
    wish = config.wlb.attention.implementation
    shape, dtype = model_shape(config.model_spec.model), _dtype(config)
    dims = shape.head_dim, shape.v_head_dim or shape.head_dim
    if device is None:
        anywhere = wish in ("auto", TORCH, REFERENCE)
        device = Device("cpu" if anywhere or config.wlb.device == "cpu" else "cuda")
    try:
        rule = wish, dims, dtype, device, window is not None, _sinks(config)
        return tuple(chosen(which, *rule) for which in PASSES)
    except ValueError as error:
        half = dtype in (torch.float16, torch.bfloat16)
        if wish in ("auto", *TABLE) and device.type == "cuda" and not half:
            raise UserError(
                f"training.mixed_precision_param: the attention kernels take bfloat16, got {dtype}; set it "
                f'to "bfloat16", or wlb.attention.implementation to "{REFERENCE}", which is slow.'
            ) from error
        raise UserError(f"wlb.attention.implementation: {error}.") from error


def on_devices(config: TrainerConfig) -> str:
    """What computes forward passes, where the device is not known yet."""
    if config.wlb.attention.implementation not in ("auto", TORCH) or config.wlb.device == "cpu":
        return check_implementation(config)[0]
    try:
        names = [check_implementation(config, Device("cuda", (sm, 0)))[0] for sm in (9, 10, 8)]
    except UserError:  # heads or a type that only a CPU can have
        return check_implementation(config)[0]
    kinds = dict(zip(("Hopper", "Blackwell"), names, strict=False))
    own = [f"{name} on {kind}" for kind, name in kinds.items() if name != names[-1]]
    return f"{', '.join(own)} and {names[-1]} on other GPUs" if own else names[-1]


def _dtype(config: TrainerConfig) -> torch.dtype:
    return TORCH_DTYPE_MAP[config.training.mixed_precision_param]


def _sinks(config: TrainerConfig) -> bool:
    """Whether the model gives the log-sum-exp a gradient."""
    return "sinks" in (config.model_spec.model.first_attention.param_init or {})


def slow_path(config: TrainerConfig, device: Device, which: str) -> str | None:
    """Why forward passes by `which` take longer on this device than they could; None where no kernel is known
    to be faster."""
    if device.type == "cuda" and which == REFERENCE:
        return f"{REFERENCE} is set, which is for tests"
    tuned = TUNED.get(device.kind, which)
    if which == tuned:
        return None
    model = model_shape(config.model_spec.model)
    dims = model.head_dim, model.v_head_dim or model.head_dim
    reason = TABLE[tuned].refuses("forward", dims, _dtype(config), device)
    if reason is not None:
        return f"{tuned}, the kernels for {device.kind}, {reason}"
    return (
        f"{which} runs where {tuned}, the kernels for {device.kind}, can; compare the step's time with "
        f'wlb.attention.implementation = "{tuned}"'
    )


def kernel_errors(config: TrainerConfig, job: Job, device: torch.device) -> Iterator[dict[str, str]]:
    """Of each implementation that can run the job's attention on a device the errors against the reference,
    norm over norm: of the output, the log-sum-exp and gradients."""
    shape, dtype = attention_shape(job, 0), _dtype(config)
    for window in windows(job):
        noise = Noise.rich(shape, dtype, device)
        noise = noise if _sinks(config) else noise._replace(dlse=None)
        rule = (shape.dim, shape.v_dim), dtype, device_of(device), window is not None, _sinks(config)
        for name in TABLE:
            refused = any(TABLE[name].refuses(which, *rule) for which in PASSES)
            if name != REFERENCE and not refused:
                found = errors_of(noise, Options(shape.dim**-0.5, window, name))
                seen = {} if window is None else {"window": f"{window:,}"}
                yield {"by": name, **seen, **{result: f"{error:.1e}" for result, error in found.items()}}


def compile_attention(config: TrainerConfig, job: Job, device: torch.device) -> None:
    """Compiles the kernels, if any, that the job's attention can meet, and checks them on each GPU.

    Every rank takes part. The first rank of each machine goes first, and the others find its kernels in
    Triton's cache. A launch that hangs is found before any collective could wait for it.
    """
    by_window = {window: check_implementation(config, device_of(device), window) for window in windows(job)}
    for window, (forward, backward) in by_window.items():
        both = forward if forward == backward else f"{forward} forward, {backward} backward"
        logger.info(f"Attention: {both}{'' if window is None else f' with a window of {window}'}")
        if why := slow_path(config, device_of(device), forward):
            logger.warning(f"Attention takes a slow path: {why}.")
        if forward == "fa4" and config.wlb.attention.implementation == "auto":
            logger.warning('Its times are predicted as torch\'s: as its own with implementation = "fa4".')
    if device.type != "cuda" or config.wlb.attention.implementation == REFERENCE:
        return  # an interpreter compiles nothing
    shape = attention_shape(job, job.degrees.grid.place(dist.get_rank())["cp"])
    first = int(os.environ["LOCAL_RANK"]) == 0
    for turn in (True, False):
        if turn is first:
            for window, (_, backward) in by_window.items():
                _prepare(config, shape, window, backward, device, sinks=_sinks(config))
        dist.barrier()


def _prepare(
    config: TrainerConfig, shape: Shape, window: int | None, which: str, device: torch.device, sinks: bool
) -> None:
    options = Options(shape.dim**-0.5, window, config.wlb.attention.implementation)
    dtype = _dtype(config)
    what = "Attention kernels" if window is None else f"Attention kernels with a window of {window}"
    begin = time.perf_counter()
    count = warm_up(shape, options, dtype, device, sinks)
    logger.info(f"{what}: {count} compiled in {time.perf_counter() - begin:.1f} s")
    noise = Noise.rich(shape, dtype, device)
    try:
        error = check_kernels(noise if sinks else noise._replace(dlse=None), options)
    except KernelError as wrong:
        gpu = torch.cuda.get_device_name(device)
        raise UserError(
            f"wlb.attention.implementation: {what.lower()} ({which}) do not work on this {gpu}: {wrong}. "
            f'Set it to "{TABLE[which].judge}", and report it, please.'
        ) from wrong
    logger.info(f"{what}: right on this GPU, within {error:.2%}")


def attention_shape(job: Job, context_rank: int) -> Shape:
    """Heads and head dims with which a rank calls the kernels."""
    model, tensor = job.model, job.degrees.tensor
    heads = model.heads // tensor, model.kv_heads // tensor
    if job.strategy is not None:
        heads = job.strategy.heads(*heads, context_rank)
    return Shape(*heads, model.head_dim, model.v_head_dim or model.head_dim)


def windows(job: Job) -> list[int | None]:
    """The different windows of the model's layers; None for layers without one."""
    return sorted(set(job.model.windows), key=lambda window: window or 0) or [None]
