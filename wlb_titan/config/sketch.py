"""A job without a TOML file: the keys that a `Job` follows from, over a model known by its sizes alone.

They are called as torchtitan calls them, mean what they mean there and are read by the same loader, without
importing torchtitan. What needs more keys needs a TOML file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from wlb_titan.config.load import Resolved, resolve
from wlb_titan.config.ranges import check_ranges
from wlb_titan.config.settings import WlbSettings
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.hugging_face import read_config
from wlb_titan.cost.models import PAPER_DEGREES, PAPER_MODELS
from wlb_titan.errors import PlanError, UserError
from wlb_titan.job import Job
from wlb_titan.memory.settings import MemorySettings
from wlb_titan.packing.policy import MOST_TOKENS
from wlb_titan.pipeline.schedule import ONE_STAGE, SCHEDULES, layers_of_stages

DEFAULT_CLUSTER = "h100_roce"

JSON = ".json"
"""How the name of a model ends that is a file of Hugging Face's."""

Degree = Annotated[int, Ge(1)]
Count = Annotated[int, Interval(ge=1, le=1 << 20)]


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """[training]"""

    seq_len: Annotated[int, Interval(ge=2, le=MOST_TOKENS)]
    local_batch_size: Count
    global_batch_size: Annotated[int, Interval(ge=-1, le=1 << 20)] = -1


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """[parallelism]"""

    tensor_parallel_degree: Degree = 1
    context_parallel_degree: Degree = 1
    pipeline_parallel_degree: Degree = 1
    data_parallel_shard_degree: Annotated[int, Ge(-1)] = -1
    data_parallel_replicate_degree: Degree = 1
    expert_parallel_degree: Degree = 1
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_first_stage_less_layers: Annotated[int, Ge(0)] = 1
    pipeline_parallel_last_stage_less_layers: Annotated[int, Ge(0)] = 1


@dataclass(kw_only=True, slots=True)
class FullAC:
    """Everything within a layer is computed again."""


@dataclass(kw_only=True, slots=True)
class SelectiveDocumentAC:
    """Matrix products in part, attention not."""


CHECKPOINTING: dict[type, Literal["selective", "full", "none"]] = {
    SelectiveDocumentAC: "selective",
    FullAC: "full",
    type(None): "none",
}


@dataclass(kw_only=True, slots=True)
class Sketch:
    """The root of such a configuration."""

    training: TrainingConfig
    parallelism: ParallelismConfig
    activation_checkpoint: SelectiveDocumentAC | FullAC | None = field(default_factory=SelectiveDocumentAC)
    wlb: WlbSettings = field(default_factory=WlbSettings)


def sketch_of(row: str) -> Sketch:
    """A row of the paper's Table 1, or the model of a config.json, which may be changed by overrides.

    Raises:
        UserError: there is no such row or file.
    """
    if row.endswith(JSON):
        training = TrainingConfig(seq_len=read_config(Path(row))[1], local_batch_size=4)
        return Sketch(training=training, parallelism=ParallelismConfig())
    if row not in PAPER_DEGREES:
        raise UserError(f"there is no model {row!r}; there are {', '.join(PAPER_DEGREES)}.")
    degrees = PAPER_DEGREES[row]
    size, _, window = row.partition("-")
    parallelism = ParallelismConfig(
        tensor_parallel_degree=degrees.tensor,
        context_parallel_degree=degrees.context,
        pipeline_parallel_degree=degrees.pipeline,
        data_parallel_shard_degree=degrees.shard,
    )
    if PAPER_MODELS[size].layers % degrees.pipeline == 0:  # embedding and head count for nothing
        parallelism.pipeline_parallel_first_stage_less_layers = 0
        parallelism.pipeline_parallel_last_stage_less_layers = 0
    tokens = int(window.removesuffix("K")) * 1024
    return Sketch(
        training=TrainingConfig(seq_len=tokens, local_batch_size=degrees.pipeline), parallelism=parallelism
    )


def resolve_sketch(name: str, overrides: Sequence[str]) -> Resolved:
    """The configuration of a model without a TOML file."""
    resolved = resolve(None, ["--base", name, *overrides], sketch_of)
    resolved.check(lambda config: check_ranges(config, {}))
    return resolved


def sketched_job(name: str, config: Sketch, gpus: int | None) -> Job:
    """The job of a sketch.

    Args:
        name: its model, as of `sketch_of`.
        gpus: which a data-parallel degree of -1 fills; None: the least that the degrees need.

    Raises:
        PlanError: the settings do not fit each other.
    """
    model = read_config(Path(name))[0] if name.endswith(JSON) else PAPER_MODELS[name.partition("-")[0]]
    training, keys, total = config.training, config.parallelism, config.training.global_batch_size
    tensor, context = keys.tensor_parallel_degree, keys.context_parallel_degree
    pipeline, replicate = keys.pipeline_parallel_degree, keys.data_parallel_replicate_degree
    shard, left = keys.data_parallel_shard_degree, (gpus or 1) // (tensor * context * pipeline * replicate)
    degrees = Degrees(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        shard=max(left, 1) if shard == -1 else shard,
        replicate=replicate,
        expert=keys.expert_parallel_degree,
    )
    schedule = keys.pipeline_parallel_schedule
    if schedule not in SCHEDULES:
        raise PlanError(
            f"no schedule is known by this name; there are {', '.join(SCHEDULES)}.",
            setting="parallelism.pipeline_parallel_schedule",
        )
    chunks = 1 if schedule in ONE_STAGE or degrees.pipeline == 1 else 2
    checkpointing = CHECKPOINTING[type(config.activation_checkpoint)]
    memory = MemorySettings(checkpointing=checkpointing, window=training.seq_len)
    return Job(
        model=model,
        degrees=degrees,
        cluster=load_cluster(config.wlb.cluster or DEFAULT_CLUSTER),
        window=training.seq_len,
        micro_batches=total if total > 0 else training.local_batch_size * degrees.data,
        multiple=lcm(degrees.tensor, memory.loss_chunks),
        packing=config.wlb.packing,
        sharding=config.wlb.sharding,
        order=config.wlb.pipeline,
        schedule=schedule,
        chunks=chunks,
        run=training.local_batch_size if degrees.pipeline > 1 else None,
        stage_layers=layers_of_stages(
            model.layers,
            degrees.pipeline * chunks,
            first_less=keys.pipeline_parallel_first_stage_less_layers,
            last_less=keys.pipeline_parallel_last_stage_less_layers,
        ),
        memory=memory,
        memory_unknown="a model with experts" if model.experts else "",
    )
