"""Turns a torchtitan configuration into the job that is planned and predicted."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import BaseAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.linear import Linear
from torchtitan.tools import utils

from wlb_titan.cost.cluster import cluster_of_gpu, load_cluster
from wlb_titan.cost.models import ModelShape
from wlb_titan.dimensions.degrees import Degrees, own_dimensions
from wlb_titan.dimensions.dimension import TORCHTITAN
from wlb_titan.job import Job
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.pipeline.schedule import canonical_name
from wlb_titan.runtime import accounts
from wlb_titan.runtime.compat import owner_of
from wlb_titan.runtime.config import TrainerConfig
from wlb_titan.runtime.meshes import Dims
from wlb_titan.runtime.models import float8
from wlb_titan.runtime.models.checkpointing import AsNeededAC
from wlb_titan.runtime.pipeline.build import stage_names


def job_of(config: TrainerConfig, dims: ParallelDims) -> Job:
    wlb, training = config.wlb, config.training
    model, shape = config.model_spec.model, model_shape(config.model_spec.model)
    memory = memory_settings(config)
    schedule, chunks, run, stage_layers = "1F1B", 1, None, ()
    if dims.pp_enabled:
        names = stage_names(config.parallelism, model)
        schedule = canonical_name(config.parallelism.pipeline_parallel_schedule)
        chunks, run = len(names) // dims.pp, training.local_batch_size
        stage_layers = tuple(sum(name.startswith("layers.") for name in stage) for stage in names)
    degrees = {name: getattr(dims, cls.axis) for name, cls in TORCHTITAN.items()}
    if not shape.experts:
        degrees["expert"] = 1  # a dense model has nothing to spread
    job_degrees = Degrees(**degrees, own=tuple(wlb.dimensions))
    gpu = None if wlb.cluster else gpu_at_hand(wlb.device)
    cluster = cluster_of_gpu(*gpu) if gpu else load_cluster(wlb.cluster or "cpu")
    of_products = float8.multiple_of_tokens(model, memory.loss_chunks, dims.tp)
    total = training.global_batch_size if training.global_batch_size > 0 else None
    job = Job(
        model=shape,
        degrees=job_degrees,
        cluster=cluster,
        dtype=training.mixed_precision_param,
        window=training.seq_len,
        micro_batches=total or training.local_batch_size * job_degrees.data,
        # Experts in parallel divide tokens over tensor-parallel ranks whatever the rest does.
        multiple=math.lcm(dims.tp if memory.sequence_parallel or dims.ep > 1 else 1, of_products),
        packing=wlb.packing,
        context=wlb.context,
        order=wlb.pipeline,
        schedule=schedule,
        chunks=chunks,
        per_run=run,
        stage_layers=stage_layers,
        memory=memory,
        memory_unknown=_unknown(model, shape),
        float8=float8.shares(model),
        # Without streams FSDP waits for each collective.
        overlap=wlb.device != "cpu" and cluster.kind != "cpu",
        implementation=wlb.attention.implementation,
        sm_margin=wlb.attention.sm_margin,
        tensor_overlap=1.0 if config.compile.enable_async_tensor_parallel else 0.0,
    )
    return replace(job, accounts=accounts.known(config, accounts.shapes_of(job, [job.policy])))


def configured_degrees(config: TrainerConfig) -> dict[str, int]:
    """The degrees whose product is the job's processes, by key; -1 stands for all that are left."""
    keys = [cls.key for cls in TORCHTITAN.values() if not cls.borrows]
    degrees = {f"parallelism.{key}": getattr(config.parallelism, key) for key in keys}
    numbered = enumerate(config.wlb.dimensions)
    return degrees | {f"wlb.dimensions.{place}.degree": dim.degree for place, dim in numbered}


def degrees_product(config: TrainerConfig) -> int:
    """Processes that the configured degrees need; a degree of -1 counts as 1."""
    return math.prod(max(degree, 1) for degree in configured_degrees(config).values())


def parallel_dims(config: TrainerConfig, world_size: int | None = None) -> Dims:
    """The degrees of a job of so many processes; by default as many as its degrees need."""
    return Dims(
        **{cls.axis: getattr(config.parallelism, cls.key) for cls in TORCHTITAN.values()},
        world_size=world_size or degrees_product(config),
        spmd_backend=config.parallelism.spmd_backend,
        own=own_dimensions(config.wlb.dimensions),
    )


def gpu_at_hand(device: str = "auto") -> tuple[str, int] | None:
    """Name and bytes of this process's GPU; None on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(0), device_bytes()


def device_bytes() -> int:
    return utils.device_module.get_device_properties(0).total_memory


def memory_settings(config: TrainerConfig) -> MemorySettings:
    checkpointing = config.activation_checkpoint
    kind = "none" if checkpointing is None else getattr(owner_of(checkpointing), "kind", "selective")
    # float32 by position: ComplexRoPE has a complex number for two elements, CosSinRoPE cos and sin for each.
    cos_sin = any(True for _ in config.model_spec.model.traverse(CosSinRoPE.Config))
    return MemorySettings(
        checkpointing="full" if isinstance(checkpointing, FullAC.Config) else kind,
        as_needed=isinstance(checkpointing, AsNeededAC.Config),
        compiled=config.compile.enable and "model" in config.compile.components,
        compute_bytes=TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize,
        loss_chunks=config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1,
        window=config.training.seq_len,
        rotary_bytes=8 if cos_sin else 4,
        sequence_parallel=config.parallelism.enable_sequence_parallel,
        reshard={"always": True, "never": False}.get(config.parallelism.fsdp_reshard_after_forward),
    )


def model_shape(model: Decoder.Config) -> ModelShape:
    """A model's sizes: those of its mean layer, and of the experts that a token visits."""
    attention = model.first_attention
    if hasattr(attention, "kv_lora_rank"):  # multi-head latent attention
        kv_heads = attention.n_heads
        head_dim, v_head_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    else:
        kv_heads = attention.n_kv_heads or attention.n_heads
        head_dim, v_head_dim = attention.head_dim or model.dim // attention.n_heads, None
    windows = tuple(layer.attention.inner_attention.window for layer in model.layers)
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    dense = sum(layer.feed_forward.w1.out_features for layer in model.layers if layer.moe is None)
    shared = sum(moe.shared_experts.w1.out_features for moe in moes if moe.shared_experts is not None)
    widths = [moe.routed_experts.inner_experts.hidden_dim for moe in moes]
    visits = [moe.router.top_k for moe in moes]
    routed = sum(number * width for number, width in zip(visits, widths, strict=True))
    every = sum(moe.num_experts * width for moe, width in zip(moes, widths, strict=True))
    return ModelShape(
        layers=len(model.layers),
        hidden=model.dim,
        heads=attention.n_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=(dense + shared + routed) // len(model.layers),
        vocabulary=model.vocab_size,
        unvisited_weights=3 * model.dim * (every - routed) // len(model.layers),
        experts=max((moe.num_experts for moe in moes), default=0),
        routed_width=routed // len(model.layers),
        visits=sum(visits) / len(model.layers),
        v_head_dim=v_head_dim,
        projections=_projections(attention),
        windows=windows if any(windows) else (),
        tied=model.enable_weight_tying,
        qk_norm=getattr(attention, "qk_norm", None) is not None,
        # LoRA's adapters stand beside weights that torchtitan freezes as it builds the model.
        frozen=any(hasattr(linear, "alpha") for _, linear, _, _ in model.traverse(Linear.Config)),
    )


def _unknown(model: Decoder.Config, shape: ModelShape) -> str:
    """What of a model the formulas of `memory/` do not know."""
    if shape.experts:
        return "experts"
    if shape.v_head_dim is not None:
        return "latent attention"
    if shape.frozen:
        return "adapters"
    if float8.recipes(model):
        return "float8"
    parts = {field.name for layer in model.layers for field in fields(layer)}
    others = sorted(parts - {field.name for field in fields(TransformerBlock.Config)})
    return ", ".join(others)


def _projections(attention: BaseAttention.Config) -> int:
    linears = [linear for _, linear, _, _ in attention.traverse(Linear.Config)]
    if isinstance(qkv := getattr(attention, "qkv_linear", None), QKVLinear.Config):
        linears.append(qkv.wkv)  # which stands for keys and for values
    return sum(linear.in_features * linear.out_features for linear in linears)
