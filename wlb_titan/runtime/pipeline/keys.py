"""The keys of [parallelism] that say how a pipeline runs: schedules and stages, and which are refused."""

from __future__ import annotations

import itertools
import math

from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder

from wlb_titan.pipeline.schedule import SCHEDULES
from wlb_titan.runtime.compat import modules_of_stages, pipeline_metadata


def check_schedule(parallelism: ParallelismConfig, compile_config: CompileConfig) -> None:
    """Raises ValueError for a schedule that no step can run."""
    name = canonical_name(parallelism.pipeline_parallel_schedule)
    if SCHEDULES[name].splits and compile_config.enable and "model" in compile_config.components:
        raise ValueError(
            f"{name} runs the backward passes of inputs and of weights one after the other, which torch "
            "cannot do with a compiled model; set compile.enable to false, or choose another schedule"
        )


def stage_names(parallelism: ParallelismConfig, model: Decoder.Config) -> list[list[str]]:
    """The modules of each stage, as torchtitan divides a model; ValueError where it cannot."""
    if parallelism.module_fqns_per_model_part:
        return parallelism.module_fqns_per_model_part
    degree = parallelism.pipeline_parallel_degree
    alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=degree, ep=1, world_size=degree)
    stages, layers, first, last = pipeline_metadata(alone, parallelism, model)
    return modules_of_stages(stages, layers, first, last)


def keys_of_stages(layers: int, stages: int) -> dict[str, object]:
    """The keys of [parallelism] with which torchtitan divides a model's layers over a number of stages.

    Embedding and head count as a layer each. If no number of layers per stage fits, modules are named.
    """
    sizes = [size for size in range(1, layers + 1) if math.ceil((layers + 2) / size) == stages]
    return {
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": sizes[0] if sizes else None,
        "module_fqns_per_model_part": None if sizes else modules_of_stages(stages, layers, 1, 1),
    }


def check_stages(parallelism: ParallelismConfig, model: Decoder.Config) -> None:
    """Raises ValueError unless the user's stages have the model's modules in its order, and ranks can share
    them: torchtitan leaves out what is in none, and computes the stages in the order that they are named."""
    stages = parallelism.module_fqns_per_model_part
    if stages is None:
        return
    modules = modules_of_stages(1, len(model.layers), 1, 1)[0]
    schedule, ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    single = SCHEDULES[canonical_name(schedule)].chunks == 1
    if [*itertools.chain(*stages)] != modules or len(stages) % ranks or single == (len(stages) > ranks):
        raise ValueError(
            f"{schedule} runs {'one stage' if single else 'two stages or more'} on each of {ranks} ranks, "
            "and each module must be in exactly one stage, in the model's order, as each stage goes on from "
            f"the one before it: {', '.join(modules)}"
        )


def canonical_name(name: str) -> str:
    """The schedule's name as SCHEDULES spells it; ValueError if there is none."""
    for known in SCHEDULES:
        if known.lower() == name.lower():
            return known
    raise ValueError(f"no pipeline schedule is called {name!r}; there are {', '.join(SCHEDULES)}")
