"""What `wlb-titan simulate` simulates: documents and a job, from a TOML file or from options alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from wlb_titan.cost.cluster import Cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_DEGREES, PAPER_MODELS
from wlb_titan.documents.lengths import read_lengths
from wlb_titan.errors import PlanError
from wlb_titan.memory.peak import MemorySettings
from wlb_titan.settings import PackingSettings
from wlb_titan.simulator.job import SimulatedJob, cluster_latency
from wlb_titan.simulator.scenario import Scenario


def scenario_from_lengths(path: Path, cluster: Cluster, given: Mapping[str, Any]) -> Scenario:
    """A row of the paper's Table 1 on documents of these lengths; options go over it.

    Args:
        path: text file with one document's length a line.
        cluster: the hardware.
        given: the options on the command line, by their names.

    Raises:
        PlanError: the file or an option is wrong.
    """
    size = given["model"]
    if size not in PAPER_DEGREES:
        raise PlanError(f"There is no model {size!r}; there are {', '.join(PAPER_DEGREES)}.")
    name, window = size.split("-")
    degrees = _degrees(PAPER_DEGREES[size], given)
    model = PAPER_MODELS[name]
    tokens = given.get("context_window", int(window.removesuffix("K")) * 1024)
    job = SimulatedJob(
        model=model,
        degrees=degrees,
        cluster=cluster,
        latency=cluster_latency(cluster, model, degrees.tensor),
        schedule=given.get("schedule", "1F1B"),
        chunks=given.get("chunks", 1),
        memory=_memory(MemorySettings(window=tokens), given),
        overlap=not given.get("no_overlap", False),
    )
    return Scenario(
        source=path.name,
        lengths=read_lengths(path),
        window=tokens,
        micro_batches=given.get("micro_batches", degrees.pipeline * degrees.data),
        seed=given.get("seed"),
        job=job,
        packing=_packing(PackingSettings(), given),
    )


def scenario_from_toml(path: Path, cluster: Cluster, given: Mapping[str, Any]) -> Scenario:
    """A training configuration on its prepared corpus; options go over the file.

    Raises:
        UserError: the file, its corpus or an option is wrong.
    """
    from wlb_titan.commands.plan_job import job_from_toml
    from wlb_titan.runtime.load import load_config

    asked = ("context_window", "micro_batches", "seed")
    planned = job_from_toml(path, {name: given[name] for name in asked if name in given})
    config = load_config(path).config
    # torchtitan takes seconds to import, so that is left until the file has been found good.
    from wlb_titan.runtime.memory import memory_settings
    from wlb_titan.runtime.pipeline_schedules import canonical_name
    from wlb_titan.runtime.shape import model_shape

    parallelism = config.parallelism
    model = model_shape(config.model_spec.model)
    configured = Degrees(
        tensor=parallelism.tensor_parallel_degree,
        context=parallelism.context_parallel_degree,
        pipeline=parallelism.pipeline_parallel_degree,
        shard=max(parallelism.data_parallel_shard_degree, 1),
        replicate=parallelism.data_parallel_replicate_degree,
    )
    degrees = _degrees(configured, given)
    schedule, chunks = "1F1B", 1
    if configured.pipeline > 1:
        schedule = canonical_name(parallelism.pipeline_parallel_schedule)
        chunks = planned.pipeline.shape.chunks if planned.pipeline else 1
    run = planned.pipeline.micro_batches if planned.pipeline and degrees == configured else None
    job = SimulatedJob(
        model=model,
        degrees=degrees,
        cluster=cluster,
        latency=cluster_latency(cluster, model, degrees.tensor, config.training.mixed_precision_param),
        schedule=given.get("schedule", schedule),
        chunks=given.get("chunks", chunks),
        run=run,
        memory=_memory(replace(memory_settings(config), window=planned.window), given),
        overlap=not given.get("no_overlap", False),
        gather_groups=config.wlb.sharding.gather_groups,
    )
    own_work = planned.packing.cost_model == "analytic"
    return Scenario(
        source=planned.source,
        lengths=planned.lengths,
        window=planned.window,
        micro_batches=planned.micro_batches,
        divisor=planned.divisor if degrees == configured else 1,
        seed=planned.seed,
        job=job,
        packing=_packing(planned.packing, given),
        cost_model=None if own_work else planned.cost_model,
        sources=planned.sources,
    )


def _degrees(configured: Degrees, given: Mapping[str, Any]) -> Degrees:
    """The configured degrees with the options over them; `data_parallel` shards."""
    names = {"tensor_parallel": "tensor", "context_parallel": "context", "pipeline_parallel": "pipeline"}
    changed = {field: given[name] for name, field in names.items() if name in given}
    if "data_parallel" in given:
        changed |= {"shard": given["data_parallel"], "replicate": 1}
    degrees = replace(configured, **changed)
    if "gpus" in given and not given.get("search"):
        degrees.check_ranks(given["gpus"])
    return degrees


def _memory(configured: MemorySettings, given: Mapping[str, Any]) -> MemorySettings:
    if "checkpointing" not in given:
        return configured
    return replace(configured, checkpointing=given["checkpointing"])


def _packing(configured: PackingSettings, given: Mapping[str, Any]) -> PackingSettings:
    names = {field.name for field in fields(configured)}
    return replace(configured, **{name: value for name, value in given.items() if name in names})
