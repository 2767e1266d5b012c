"""The job and the documents of a torchtitan configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.decoder import Decoder

from wlb_titan.cost.cluster import cluster_of_gpu, load_cluster
from wlb_titan.cost.degrees import TORCHTITAN, Degrees, own_dimensions
from wlb_titan.job import Job
from wlb_titan.memory.layer import MemorySettings
from wlb_titan.runtime.compat import batch_of, device_bytes
from wlb_titan.runtime.meshes import Dims
from wlb_titan.runtime.pipeline.schedules import canonical_name, stage_names
from wlb_titan.runtime.shape import has_experts, has_latent_attention, model_shape

if TYPE_CHECKING:
    from wlb_titan.runtime.trainer import Trainer


def job_of(config: Trainer.Config, dims: ParallelDims) -> Job:
    """The job that a configuration trains at the degrees of a number of processes."""
    return configured_job(config, dims).trained


def configured_job(config: Trainer.Config, dims: ParallelDims) -> Job:
    """The job of a configuration, also where it is only planned (`wlb.packing.shadow`)."""
    batch, wlb = batch_of(config), config.wlb
    assert config.model_spec is not None
    model = config.model_spec.model
    memory = memory_settings(config)
    schedule, chunks, run, stage_layers = "1F1B", 1, None, ()
    if dims.pp_enabled:
        names = stage_names(config.parallelism, model)
        schedule = canonical_name(config.parallelism.pipeline_parallel_schedule)
        chunks, run = len(names) // dims.pp, batch.run
        stage_layers = tuple(sum(name.startswith("layers.") for name in stage) for stage in names)
    degrees = {name: getattr(dims, one.axis) for name, one in TORCHTITAN.items()}
    if not has_experts(model):
        degrees["expert"] = 1  # a dense model has nothing to spread
    job_degrees = Degrees(**degrees, own=tuple(wlb.dimensions))
    gpu = None if wlb.cluster else gpu_at_hand(wlb.device)
    cluster = cluster_of_gpu(*gpu) if gpu else load_cluster(wlb.cluster or "cpu")
    return Job(
        model=model_shape(model),
        degrees=job_degrees,
        cluster=cluster,
        dtype=config.training.mixed_precision_param,
        window=batch.window,
        micro_batches=batch.total or batch.run * job_degrees.data,
        multiple=math.lcm(dims.tp if memory.sequence_parallel else 1, memory.loss_chunks),
        packing=wlb.packing,
        sharding=wlb.sharding,
        order=wlb.pipeline,
        schedule=schedule,
        chunks=chunks,
        run=run,
        stage_layers=stage_layers,
        memory=memory,
        memory_unknown=_memory_unknown(model),
        # Without streams FSDP waits for each collective.
        overlap=wlb.device != "cpu" and cluster != load_cluster("cpu"),
        sm_margin=wlb.attention.sm_margin,
        tensor_overlap=1.0 if config.compile.enable_async_tensor_parallel else 0.0,
    )


def configured_degrees(config: Trainer.Config) -> dict[str, int]:
    """The degrees whose product is the job's processes, by key; -1 is torchtitan's for all that are left."""
    known = [one.key for one in TORCHTITAN.values() if not one.borrows]
    found = {f"parallelism.{key}": getattr(config.parallelism, key) for key in known}
    own = enumerate(config.wlb.dimensions)
    return found | {f"wlb.dimensions.{place}.degree": one.degree for place, one in own}


def degrees_product(config: Trainer.Config) -> int:
    """Processes that the configured degrees need, with a data-parallel degree of 1 where it is -1."""
    return math.prod(max(degree, 1) for degree in configured_degrees(config).values())


def parallel_dims(config: Trainer.Config, world_size: int | None = None) -> Dims:
    """The degrees of a job of so many processes; None: as many as the configured degrees need."""
    own = own_dimensions(config.wlb.dimensions)
    return Dims.of(config.parallelism, world_size or degrees_product(config), own)


def gpu_at_hand(device: str = "auto") -> tuple[str, int] | None:
    """Name and bytes of this process's GPU; None on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(0), device_bytes()


def memory_settings(config: Trainer.Config) -> MemorySettings:
    """What of a configuration decides about memory."""
    checkpointing = config.activation_checkpoint
    kind = "selective" if checkpointing is not None else "none"
    return MemorySettings(
        checkpointing="full" if isinstance(checkpointing, FullAC.Config) else kind,
        compute_bytes=TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize,
        loss_chunks=config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1,
        window=batch_of(config).window,
        rotary_bytes=_rotary_bytes(config),
        sequence_parallel=config.parallelism.enable_sequence_parallel,
        reshard={"always": True, "never": False}.get(config.parallelism.fsdp_reshard_after_forward),
    )


def _memory_unknown(model: Decoder.Config) -> str:
    if has_experts(model):
        return "a model with experts"
    return "multi-head latent attention" if has_latent_attention(model) else ""


def _rotary_bytes(config: Trainer.Config) -> int:
    """Of a layer's table of rotary factors for each position and element of the head dim: float32 each.

    torchtitan's ComplexRoPE has a complex number for two elements, its CosSinRoPE cosine and sine for each.
    """
    assert config.model_spec is not None
    cos_sin = any(True for _ in config.model_spec.model.traverse(CosSinRoPE.Config))
    return 8 if cos_sin else 4
