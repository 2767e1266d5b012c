"""The job: everything besides the documents that its plans and predictions follow from.

It is put together once, from a configuration (`runtime/job.py`) or from options (`commands`), and is the only
way to a planner. So `plan`, `simulate`, `dryrun` and training make the same plans from the same TOML file, if
it names the cluster or they see the same GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from wlb_titan.context import ALL_KEYS, STRATEGIES, ContextStrategy, Exchange, ExchangeCost, KeyShares
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS, ModelShape
from wlb_titan.cost.profile import AttentionShape, configured_latency, measured_cluster
from wlb_titan.cost.workload import CostModel, TokenSeconds, cost_model
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.memory.fits import Fitting, usable_share
from wlb_titan.memory.layer import MemorySettings, TokenBytes
from wlb_titan.packing import POLICIES, PackingPolicy
from wlb_titan.packing.policy import AskRank0, ask_locally
from wlb_titan.packing.slim.dp_merge import group_sizes
from wlb_titan.pipeline.order import ORDERS, MicroBatchOrder
from wlb_titan.pipeline.schedule import PipelineShape, layers_of_stages
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.planner import Planner


class Policy(NamedTuple):
    """The names of a job's policies: how micro-batches are packed, sharded over context-parallel ranks and
    ordered in the pipeline."""

    packing: str
    sharding: str = "per_sequence"
    order: str = "as_packed"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`packing[:sharding[:order]]`, such as `wlb:adaptive` or `wlb_lazy:hybrid:best`."""
        return cls(*policy_parts(text))

    def __str__(self) -> str:
        return ":".join(self if self.order != "as_packed" else self[:2])


def policy_parts(text: str) -> list[str]:
    """One to three names: `wlb:adaptive`, or classes in full, `own.packing:Reversed:own.sharding:Two`."""
    # A class begins with a capital letter, and so the colon before it separates no parts.
    parts = [part.strip() for part in re.split(r":(?!\s*[A-Z])", text)]
    families = (POLICIES, STRATEGIES, ORDERS)
    if len(parts) > len(families):
        raise PlanError(f"{text!r} has too many parts; a policy is packing[:sharding[:order]].")
    for part, family in zip(parts, families, strict=False):
        family.find(part)
    return parts


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, parallelism, policies and hardware of a training run.

    Attributes:
        cluster: the hardware that predictions are for.
        window: context window in tokens.
        micro_batches: N, those of the whole job in one step (pipeline micro-batches x gradient accumulation x
            data-parallel degree).
        packing, sharding, order: the policies, with their settings.
        dtype: data type of activations, as torch names it.
        multiple: what the tokens of a context-parallel rank must be a multiple of, for sequence parallelism
            and the chunks of the loss.
        schedule: schedule of the pipeline, one of `pipeline.schedule.SCHEDULES` where predictions are wanted.
        chunks: stages of each pipeline rank.
        run: micro-batches of one run through the pipeline; a replica with more in a step makes several runs,
            as gradient accumulation does. None: all in one run.
        stage_layers: layers of each stage; empty divides them as torchtitan does.
        memory: data types and activation checkpointing, which also costs time.
        memory_unknown: what of the model keeps memory from being predicted, such as "a model with experts".
        overlap: whether weights are gathered and gradients reduced while ranks compute.
        tensor_overlap: share of tensor parallelism's collectives that runs while the layer's matrix products
            do: 0 exposes all of them, 1 hides what lasts no longer than these products.
        routing_imbalance: tokens that the busiest rank's experts get over those of the mean rank.
        attention: the attention of one layer on one tensor-parallel rank; None: as [wlb.sharding] profile
            says, or the cluster's.
        sm_margin: multiprocessors that attention leaves to other kernels.
        planned: data-parallel ranks that are planned, where some stand for all of them; None: all.
            `micro_batches` are theirs.
        on_one_rank: asks what may differ from rank to rank, such as a solver that a clock stops.
    """

    window: int
    micro_batches: int
    model: ModelShape = PAPER_MODELS["7B"]
    degrees: Degrees = field(default_factory=Degrees)
    cluster: Cluster = field(default_factory=lambda: load_cluster("h100_roce"))
    packing: PackingPolicy.Config = field(default_factory=lambda: POLICIES.configure("plain"))
    sharding: ContextStrategy.Config = field(default_factory=lambda: STRATEGIES.configure("per_sequence"))
    order: MicroBatchOrder.Config = field(default_factory=lambda: ORDERS.configure("as_packed"))
    dtype: str = "bfloat16"
    multiple: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    run: int | None = None
    stage_layers: tuple[int, ...] = ()
    memory: MemorySettings = field(default_factory=MemorySettings)
    memory_unknown: str = ""
    overlap: bool = True
    tensor_overlap: float = 0.0
    routing_imbalance: float = 1.0
    attention: AttentionLatency | None = None
    sm_margin: int = 0
    planned: int | None = None
    on_one_rank: AskRank0 = field(default=ask_locally, compare=False, repr=False)

    def __post_init__(self) -> None:
        for dimension in self.degrees.dimensions:
            dimension.check(self)
        if not 0 <= self.tensor_overlap <= 1:
            raise PlanError(
                f"The overlap of tensor parallelism is {self.tensor_overlap}; it is between 0 and 1."
            )
        if self.memory.offload and self.cluster.host_bandwidth is None:
            raise PlanError(
                f"Activations cannot be offloaded on {self.cluster.name}: its file has no [node] "
                "host_bandwidth. Add it in bytes/s a GPU, or keep them on the GPU."
            )
        self.packing.check(self)

    @property
    def replicas(self) -> int:
        """Data-parallel ranks that plans are for."""
        return self.planned or self.degrees.data

    @property
    def replica_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return self.micro_batches // self.replicas

    def sample(self, most: int) -> Job:
        """This job with only as many data-parallel ranks planned as have `most` micro-batches in a step.

        It is one at least. What ranks hold and communicate stays what it is among all of them. Those of
        dimensions of one's own meet in their own way, and so all are planned.
        """
        planned = self.replicas
        while planned % 2 == 0 and planned * self.replica_micro_batches > most and not self.degrees.own:
            planned //= 2
        return replace(self, planned=planned, micro_batches=planned * self.replica_micro_batches)

    @property
    def policy(self) -> Policy:
        """The names of its policies."""
        return Policy(self.packing.name, self.sharding.name, self.order.name)

    @property
    def undecided(self) -> bool:
        """Whether a policy is `auto`; `Scenario.choice` decides on one."""
        return any(config.owner.automatic for config in (self.packing, self.sharding))

    @cached_property
    def shape(self) -> PipelineShape:
        splits = self.memory.checkpointing == "none"
        return PipelineShape(self.schedule, self.degrees.pipeline, self.chunks, splits)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.stage_layers or layers_of_stages(self.model.layers, self.shape.stages)

    @cached_property
    def divisor(self) -> int:
        """What the tokens of a micro-batch are a multiple of."""
        context = self.strategy.divisor if self.strategy is not None else 1
        return math.lcm(self.packing.length_multiple, context, self.degrees.context * self.multiple)

    def padded(self, tokens: int, sharers: int = 1) -> int:
        """Tokens of a micro-batch that so many data-parallel ranks share, with its padding."""
        divisor = self.divisor if sharers == 1 else self.merged[sharers].divisor
        return -(-tokens // divisor) * divisor

    def sized(self, draft: MicroBatch, dp_rank: int | None = None) -> MicroBatch:
        """A micro-batch with length and padding.

        Args:
            dp_rank: which of the ranks that share it has this entry; None takes the first.
        """
        tokens, sharers = int(draft.lengths.sum()), draft.sharers
        length = self.padded(tokens if self.packing.owner.variable_length else self.window, sharers)
        place = dp_rank - draft.merged.start if draft.merged and dp_rank is not None else 0
        padding = (length - tokens + place) // sharers  # equal but for one token, and together all of it
        return replace(draft, length=length // sharers, padding=padding)

    def sharded(self, sized: MicroBatch) -> MicroBatch:
        """A micro-batch divided over the context-parallel ranks of all that share it."""
        strategy = self.merged[sized.sharers].strategy if sized.merged else self.strategy
        if strategy is None:
            return sized
        name = f"Micro-batch {sized.index} of data-parallel rank {sized.dp_rank}"
        sharding, ranks = strategy.shard(
            sized.lengths, sized.shared_length, slices=sized.elsewhere, micro_batch=name
        )
        return replace(sized, sharding=sharding, ranks=ranks)

    @cached_property
    def latency(self) -> AttentionLatency:
        """The attention of one layer on one tensor-parallel rank, with all of its heads."""
        if self.attention is not None:
            return self.attention
        found = configured_latency(self.cluster, self.attention_shape, self.sharding.profile)
        return replace(found, units=max(found.units - self.sm_margin, 1))

    @property
    def attention_shape(self) -> AttentionShape:
        """The attention of one layer on one tensor-parallel rank."""
        return AttentionShape.of(self.model, self.degrees.tensor, self.dtype)

    @cached_property
    def strategy(self) -> ContextStrategy | None:
        """The context-parallel strategy; None at a degree of 1."""
        if self.degrees.context == 1:
            return None
        alone: ContextStrategy = self.sharding.make(self.degrees.context, self.latency)
        alone.check(self.model, self.degrees.tensor)
        seconds = self._exchange_cost(alone).of_moves()
        strategy: ContextStrategy = self.sharding.make(self.degrees.context, self.latency, seconds)
        return strategy

    @cached_property
    def merged(self) -> dict[int, Job]:
        """This job as a micro-batch sees it that 1, 2, 4, ... data-parallel ranks share (DP-Merge).

        They are together what a data-parallel rank is otherwise, with so many times the context-parallel
        ranks; without context parallelism documents are divided `per_document`. There is only the job itself
        where micro-batches are not shared.
        """
        jobs = {1: self}
        if not self.packing.merges or (self.strategy is not None and not self.strategy.merges):
            return jobs
        if self.degrees.own_data > 1:
            if self.packing.merges is True:
                raise PlanError(
                    f"Data-parallel ranks of {self.degrees} have weights of their own and cannot share a "
                    "micro-batch; let none share one, or leave the dimension out.",
                    setting="wlb.packing",
                )
            return jobs
        sharding = self.sharding
        if self.strategy is None:
            sharding = STRATEGIES.configure("per_document", profile=self.sharding.profile)
        for ranks in group_sizes(self.replicas):
            degrees = replace(self.degrees, context=ranks * self.degrees.context)
            try:
                jobs[ranks] = replace(self, degrees=degrees, sharding=sharding)
            except PlanError:  # a strategy that cannot have so many ranks
                if self.packing.merges is True:
                    raise
                break
        return jobs

    @property
    def token_bytes(self) -> TokenBytes:
        """What a rank holds of each token of a micro-batch of which it has all keys."""
        return self.token_bytes_of(1, ALL_KEYS)

    @cached_property
    def token_bytes_of(self) -> Callable[[int, KeyShares], TokenBytes]:
        """What a rank holds of each token of a micro-batch, by how many data-parallel ranks share it and by
        what the rank has of its keys."""

        def worked_out(sharers: int, keys: KeyShares) -> TokenBytes:
            job = self if sharers == 1 else self.merged[sharers]
            return TokenBytes.of(job.model, job.degrees, job.memory, job.exchange, keys)

        return cache(worked_out)

    @cached_property
    def exchange(self) -> Exchange | None:
        """What context parallelism moves and holds in a layer."""
        return None if self.strategy is None else self.strategy.exchange(self.model, self.degrees.tensor)

    @cached_property
    def exchanging(self) -> ExchangeCost:
        """What context parallelism's collectives take."""
        return self._exchange_cost(self.strategy)

    def _exchange_cost(self, strategy: ContextStrategy | None) -> ExchangeCost:
        repeats = self.memory.checkpointing != "none"
        return ExchangeCost.of(strategy, self.model, self.cluster, self.degrees, repeats=repeats)

    @cached_property
    def token(self) -> TokenSeconds:
        """What one token of a micro-batch costs a rank."""
        return TokenSeconds.of(self, measured_cluster(self.cluster, self.sharding.profile))

    @cached_property
    def cost_model(self) -> CostModel:
        """What packing balances by."""
        return cost_model(self.packing.cost_model, self)

    @cached_property
    def fitting(self) -> Fitting:
        """Peaks of steps, and what of them fits a device."""
        usable = self.cluster.memory * usable_share(self.packing.owner.slices)
        known = not self.memory_unknown and self.cluster != load_cluster("cpu")
        return Fitting(self, usable, known)

    @property
    def most_in_flight(self) -> int | None:
        """Tokens of documents in slices that a pipeline rank may have in flight: as set, or what fits; None
        where memory is not predicted."""
        if self.packing.most_in_flight is not None or self.memory_unknown:
            return self.packing.most_in_flight
        return self.fitting.most_in_flight

    @property
    def longest_micro_batch(self) -> int:
        """Tokens that a micro-batch may have under the packing policy."""
        return self.packing.longest(self)

    def planner(self, documents: Documents) -> Planner:
        """A planner at the beginning of the stream."""
        assert not self.undecided, "no policy has been chosen for `auto`"
        return Planner(documents, self)

    def plans(self, documents: Documents, steps: int, *, after: int = 0) -> list[Plan]:
        """The plans of so many steps, after some others that are left out."""
        planner = self.planner(documents)
        for _ in range(after):
            planner.next(sharded=())
        return [planner.next() for _ in range(steps)]

    def under(self, policy: Policy) -> Job:
        """This job under other policies; settings that both policies have stay as they are."""
        return replace(
            self,
            packing=self.packing.named(policy.packing),
            sharding=self.sharding.named(policy.sharding),
            order=self.order.named(policy.order),
        )

    @property
    def trained(self) -> Job:
        """What trains: the same job under the baseline's policies where its own are a shadow, else itself."""
        return self.under(Policy("plain")) if self.packing.shadow else self

    def on(self, cluster: Cluster) -> Job:
        """This job on another cluster."""
        return replace(self, cluster=cluster)
