"""What `wlb-titan plan` plans: a stream of documents, and the job that trains on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.config.ranges import check_ranges
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.attention_profile import AttentionShape, attention_latency
from wlb_titan.cost.cost_model import cost_model
from wlb_titan.cost.models import PAPER_DEGREES, PAPER_MODELS, ModelShape
from wlb_titan.cost.workload import CostModel
from wlb_titan.documents.lengths import read_lengths
from wlb_titan.documents.mixture import Lengths, Mixture, Source, count_longer
from wlb_titan.errors import PlanError
from wlb_titan.pipeline.order import PipelineShape
from wlb_titan.pipeline.runs import PipelineRuns, check_order
from wlb_titan.planner import Planner
from wlb_titan.settings import PackingSettings, ShardingSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The arguments of a `Planner`, without the packing policy.

    Attributes:
        source: where the lengths come from, for reports.
        sources: of a mixture, as of `Planner`.
        others: as of `Planner`.
    """

    source: str
    lengths: Lengths
    window: int
    micro_batches: int
    data_parallel: int
    context_parallel: int
    pipeline: PipelineRuns | None
    divisor: int
    seed: int | None
    packing: PackingSettings
    sharding: ShardingSettings
    cost_model: CostModel
    latency: AttentionLatency
    sources: tuple[Source, ...] = ()

    def planner(self, policy: str) -> Planner:
        """A planner at the beginning of the stream."""
        return Planner(
            self.lengths,
            window=self.window,
            micro_batches=self.micro_batches,
            data_parallel=self.data_parallel,
            context_parallel=self.context_parallel,
            pipeline=self.pipeline,
            divisor=self.divisor,
            seed=self.seed,
            packing=replace(self.packing, policy=policy),
            sharding=self.sharding,
            cost_model=self.cost_model,
            latency=self.latency,
            sources=self.sources,
        )

    def describe(self) -> str:
        """One sentence on corpus and job."""
        long = count_longer(self.lengths, self.window)
        cut = f", {long:,} of them longer than the window and cut" if long else ""
        mixture = Mixture(self.lengths, self.sources, seed=self.seed)
        job = (
            f"{self.source}: {mixture.documents:,} documents, {mixture.tokens:,} tokens{cut}. "
            f"{self.micro_batches} micro-batches a step, context window {self.window:,} tokens, "
            f"work by {self.packing.cost_model}."
        )
        return "\n".join([job, *mixture.describe(self.micro_batches * self.window)])

    def sample(self) -> NDArray[np.int64]:
        """int64 (n,), lengths of documents as they come in the stream; of all if they are few."""
        return Mixture(self.lengths, self.sources, seed=self.seed).sample()


def job_from_lengths(path: Path, given: Mapping[str, Any]) -> Job:
    """A job described by options alone.

    Args:
        path: text file with one document's length a line.
        given: the options on the command line, by their names.

    Raises:
        PlanError: the file or an option is wrong.
    """
    for name in ("context_window", "micro_batches"):
        if name not in given:
            raise PlanError(f"With --lengths, --{name.replace('_', '-')} must be given.")
    size = given["model"]
    if size not in PAPER_DEGREES:
        raise PlanError(f"There is no model {size!r}; there are {', '.join(PAPER_DEGREES)}.")
    degrees = PAPER_DEGREES[size]
    packing = _overridden(PackingSettings(), given)
    sharding = ShardingSettings(policy=given.get("sharding", "per_sequence"))
    shape = PAPER_MODELS[size.split("-")[0]]
    degree = given.get("context_parallel", 1)
    if degree < 1 or given.get("data_parallel", 1) < 1:
        raise PlanError("Degrees of parallelism must be at least 1.")
    return Job(
        source=path.name,
        lengths=read_lengths(path),
        window=given["context_window"],
        micro_batches=given["micro_batches"],
        data_parallel=given.get("data_parallel", 1),
        context_parallel=degree,
        pipeline=_pipeline(None, given, given["micro_batches"] // given.get("data_parallel", 1)),
        divisor=2 * degree if degree > 1 else 1,
        seed=given.get("seed"),
        packing=packing,
        sharding=sharding,
        cost_model=cost_model(
            packing.cost_model,
            shape,
            tensor_parallel=degrees.tensor,
            context_parallel=degrees.context,
        ),
        latency=_latency(sharding, shape, degrees.tensor),
    )


def job_from_toml(path: Path, given: Mapping[str, Any]) -> Job:
    """The job of a training configuration, on its prepared corpus; options go over the file.

    Raises:
        UserError: the file, its corpus or an option is wrong.
    """
    from wlb_titan.runtime.load import load_config

    config = load_config(path).config
    # torchtitan takes seconds to import, so that is left until the file has been found good.
    from wlb_titan.runtime.corpus import mixture_sources, open_corpus
    from wlb_titan.runtime.shape import model_shape
    from wlb_titan.runtime.trainer import dataloader_config

    loader = dataloader_config(config)
    corpus = open_corpus(loader.corpus)
    parallelism = config.parallelism
    data_parallel = given.get("data_parallel")
    if data_parallel is None:
        shards = max(parallelism.data_parallel_shard_degree, 1)  # -1: as many as the job turns out to have
        data_parallel = parallelism.data_parallel_replicate_degree * shards
    context_parallel = given.get("context_parallel", loader.context_parallel)
    micro_batches = loader.job_micro_batches
    if micro_batches < 1:
        micro_batches = loader.rank_micro_batches * data_parallel
    micro_batches = given.get("micro_batches", micro_batches)
    run = loader.rank_micro_batches
    if (micro_batches // data_parallel) % run:  # an option changed them
        run = micro_batches // data_parallel
    packing = _overridden(loader.packing, given)
    sharding = replace(loader.sharding, policy=given.get("sharding", loader.sharding.policy))
    shape = model_shape(config.model_spec.model)
    return Job(
        source=str(corpus),
        lengths=corpus.lengths,
        sources=tuple(mixture_sources(loader.corpus, corpus)),
        window=given.get("context_window", config.training.seq_len),
        micro_batches=micro_batches,
        data_parallel=data_parallel,
        context_parallel=context_parallel,
        pipeline=_pipeline(loader.pipeline, given, run),
        divisor=int(np.lcm(loader.divisor, 2 * context_parallel if context_parallel > 1 else 1)),
        seed=given.get("seed", loader.seed),
        packing=packing,
        sharding=sharding,
        cost_model=cost_model(
            packing.cost_model,
            shape,
            tensor_parallel=parallelism.tensor_parallel_degree,
            context_parallel=context_parallel,
        ),
        latency=_latency(
            sharding, shape, parallelism.tensor_parallel_degree, config.training.mixed_precision_param
        ),
    )


def _latency(
    sharding: ShardingSettings, shape: ModelShape, tensor_parallel: int, dtype: str = "bfloat16"
) -> AttentionLatency:
    """Predicts the attention of one layer on one tensor-parallel rank."""
    attention = AttentionShape.of(shape, tensor_parallel, dtype)
    return attention_latency(sharding.profile, attention)


def _pipeline(
    configured: PipelineRuns | None, given: Mapping[str, Any], micro_batches: int
) -> PipelineRuns | None:
    """The configured pipeline with the options over it; `micro_batches` of a rank go through it together."""
    runs = configured or PipelineRuns(PipelineShape("1F1B", 1), micro_batches)
    ranks = given.get("pipeline_parallel", runs.shape.ranks)
    if ranks < 1:
        raise PlanError("Degrees of parallelism must be at least 1.")
    shape = replace(runs.shape, ranks=ranks)
    if "schedule" in given:
        schedule = given["schedule"]
        shape = PipelineShape(schedule, ranks, 1 if schedule in ("GPipe", "1F1B") else 2)
    order = given.get("order", runs.order)
    check_order(order, shape.schedule)
    return PipelineRuns(shape, micro_batches, order) if ranks > 1 else None


def _overridden(packing: PackingSettings, given: Mapping[str, Any]) -> PackingSettings:
    names = {field.name for field in fields(packing)}
    changed = replace(packing, **{name: value for name, value in given.items() if name in names})
    check_ranges(changed, {})
    return changed
