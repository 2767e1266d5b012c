"""Whether a run fits its devices: predicted before anything is built, and measured while it trains."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import CosSinRoPE

from wlb_titan.cost.degrees import Degrees
from wlb_titan.errors import PlanError, UserError
from wlb_titan.memory.peak import (
    GIB,
    LONGEST,
    MemorySettings,
    RankMemory,
    longest_that_fits,
    pipeline_memory,
)
from wlb_titan.packing import VARIABLE_LENGTH
from wlb_titan.runtime.lengths import length_divisor
from wlb_titan.runtime.pipeline_schedules import pipeline_shape, stage_names
from wlb_titan.runtime.shape import has_experts, model_shape

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def predicted_memory(
    config: Trainer.Config, dims: ParallelDims, lengths: Sequence[int]
) -> tuple[RankMemory, ...] | None:
    """The peak of each pipeline rank with micro-batches of these lengths; None where it is not known.

    Not known are models with experts, and schedules whose order of passes the planner does not know.
    """
    assert config.model_spec is not None
    model = config.model_spec.model
    if has_experts(model):
        return None
    schedule, chunks, layers = "1F1B", 1, [len(model.layers)]
    if dims.pp_enabled:
        shape = pipeline_shape(config.parallelism, model)
        schedule, chunks = shape.schedule, shape.chunks
        names = stage_names(config.parallelism, model)
        layers = [sum(name.startswith("layers.") for name in stage) for stage in names]
    try:
        return pipeline_memory(
            model_shape(model),
            Degrees(
                tensor=dims.tp,
                context=dims.cp,
                pipeline=dims.pp,
                shard=dims.dp_shard,
                replicate=dims.dp_replicate,
            ),
            lengths,
            schedule=schedule,
            chunks=chunks,
            run=config.training.local_batch_size if dims.pp_enabled else None,
            settings=memory_settings(config),
            layers=layers,
        )
    except PlanError:
        return None


def parallel_dims(config: Trainer.Config, world_size: int) -> ParallelDims:
    """The degrees of a job of so many processes."""
    return ParallelDims.from_config(config.parallelism, world_size)


def check_memory(config: Trainer.Config, dims: ParallelDims, device_bytes: int) -> None:
    """Refuses what cannot fit: a step of micro-batches that are no longer than the context window.

    Raises:
        UserError: with the arithmetic of the pipeline rank that needs most.
    """
    ranks = predicted_memory(config, dims, [config.training.seq_len] * micro_batches(config, dims))
    if ranks is None:
        return
    most = max(ranks, key=lambda rank: rank.total)
    if most.total > device_bytes:
        raise UserError(
            f"parallelism: this cannot fit: a device has {device_bytes / GIB:.2f} GiB; with micro-batches of "
            f"{config.training.seq_len} tokens the prediction is {_one_line(most)}. Raise a degree of "
            "parallelism, save more with activation_checkpoint, or lower training.seq_len or "
            "training.local_batch_size."
        )


def describe_memory(config: Trainer.Config, dims: ParallelDims) -> list[str]:
    """A line on each pipeline rank's predicted peak, with micro-batches as long as they may become."""
    length = longest_micro_batch(config)
    ranks = predicted_memory(config, dims, [length] * micro_batches(config, dims))
    if ranks is None:
        assert config.model_spec is not None
        experts = has_experts(config.model_spec.model)
        what = "a model with experts" if experts else config.parallelism.pipeline_parallel_schedule
        return [f"Memory of {what} is not predicted; `wlb-titan dryrun` traces it"]
    return [f"Predicted peak memory, micro-batches of {length} tokens: {_one_line(rank)}" for rank in ranks]


def bound_length(config: Trainer.Config, dims: ParallelDims, device_bytes: float) -> None:
    """Sets the default of `wlb.packing.max_length`: the longest that is predicted to fit, up to two windows.

    Every rank has to come to the same bound, so of `device_bytes` whole GiB count: devices of one kind differ
    by less. Nothing changes where the policy needs no bound, or the user has set one.
    """
    packing, window = config.wlb.packing, config.training.seq_len
    if packing.policy not in VARIABLE_LENGTH or packing.max_length is not None:
        return
    n = micro_batches(config, dims)

    def memory(length: int) -> tuple[RankMemory, ...]:
        return predicted_memory(config, dims, [length] * n) or ()

    whole = device_bytes // GIB * GIB
    # Where not even windows are predicted to fit, `check_memory` has refused the job or nothing is known.
    packing.max_length = longest_that_fits(memory, window, length_divisor(config), whole) or window


def longest_micro_batch(config: Trainer.Config) -> int:
    """Tokens that a micro-batch may have under the packing policy."""
    if config.wlb.packing.policy not in VARIABLE_LENGTH:
        return config.training.seq_len
    return config.wlb.packing.max_length or LONGEST * config.training.seq_len


def micro_batches(config: Trainer.Config, dims: ParallelDims) -> int:
    """Of one data-parallel rank in a step."""
    total, data_parallel = config.training.global_batch_size, dims.dp_replicate * dims.dp_shard
    return total // data_parallel if total > 0 else config.training.local_batch_size


def measured_memory(dims: ParallelDims, device: torch.device) -> dict[str, float]:
    """GiB by pipeline rank, the most of its ranks. Call it on every rank.

    Of an accelerator what was allocated at most since the last report; of the CPU what the process has had
    resident at most since it started, the libraries included.
    """
    if device.type == "cpu":
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        used = torch.accelerator.max_memory_allocated()
    peaks = torch.zeros(dims.pp, dtype=torch.float64, device=device)
    peaks[dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0] = used / GIB
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return {f"peak_memory_gib/pp{rank}": peak for rank, peak in enumerate(peaks.tolist())}


def memory_settings(config: Trainer.Config) -> MemorySettings:
    """What of a configuration decides about memory."""
    checkpointing = config.activation_checkpoint
    kind = "selective" if checkpointing is not None else "none"
    return MemorySettings(
        checkpointing="full" if isinstance(checkpointing, FullAC.Config) else kind,
        compute_bytes=TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize,
        loss_chunks=config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1,
        window=config.training.seq_len,
        rotary_bytes=rotary_bytes(config),
        sequence_parallel=config.parallelism.enable_sequence_parallel,
        reshard={"always": True, "never": False}.get(config.parallelism.fsdp_reshard_after_forward),
    )


def rotary_bytes(config: Trainer.Config) -> int:
    """Of a layer's table of rotary factors for each position and element of the head dim: float32 each.

    torchtitan's ComplexRoPE has a complex number for two elements, its CosSinRoPE cosine and sine for each.
    """
    assert config.model_spec is not None
    cos_sin = any(True for _ in config.model_spec.model.traverse(CosSinRoPE.Config))
    return 8 if cos_sin else 4


def _one_line(rank: RankMemory) -> str:
    head, *terms = rank.explain().splitlines()
    return f"{head}: {' + '.join(' '.join(term.split()) for term in terms)}"
