"""The job: everything besides the documents that plans and predictions depend on.

It is made once, from a configuration (`runtime/configured.py`) or from options (`commands`), and is the only
way to a planner: `plan`, `simulate`, `dryrun` and training make the same plans from the same TOML file, if it
names the cluster or they see the same GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from wlb_titan.context.strategy import (
    ALL_KEYS,
    STRATEGIES,
    ContextStrategy,
    Exchange,
    ExchangeCost,
    KeyShares,
)
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.cluster import Cluster, load_cluster
from wlb_titan.cost.models import PAPER_MODELS, ModelShape
from wlb_titan.cost.passes import LayerSeconds
from wlb_titan.cost.profile import AttentionShape, configured_latency, measured_cluster
from wlb_titan.cost.told import ModelAccount, Shape
from wlb_titan.cost.workload import CostModel, TokenSeconds, cost_model
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.memory.fits import Fitting, usable_share
from wlb_titan.memory.layer import MemorySettings, TokenBytes
from wlb_titan.memory.rank import PipelineRank
from wlb_titan.memory.recompute import KINDS, Recompute
from wlb_titan.packing import POLICIES, PackingPolicy
from wlb_titan.packing.policy import AskRank0, ask_locally
from wlb_titan.packing.slim.dp_merge import group_sizes
from wlb_titan.pipeline.order import ORDERS, MicroBatchOrder
from wlb_titan.pipeline.schedule import KNOWN, SCHEDULES, PipelineShape, layers_of_stages
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.planner import Planner
from wlb_titan.progress import Report, counted, silent


class Policy(NamedTuple):
    """The names of a job's policies: what fills micro-batches, how context-parallel ranks share one, and in
    which order a pipeline runs them; "PACKING/CONTEXT/ORDER", of which the last may be left out."""

    packing: str = "plain"
    context: str = "per_sequence"
    order: str = "as_packed"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`PACKING/CONTEXT/ORDER` as in [wlb] policy, such as `wlb_lazy/hybrid/best`, `slim` or `wlb//best`:
        short names, or classes in full as `own.packing:Reversed`. What is left out is the default."""
        parts = [part.strip() for part in text.split("/")]
        families = (POLICIES, STRATEGIES, ORDERS)
        if len(parts) > len(families) or not any(parts):
            what = "has too many parts" if any(parts) else "names no policy"
            raise PlanError(f"{text!r} {what}; a policy is PACKING/CONTEXT/ORDER")
        for part, family in zip(parts, families, strict=False):
            if part:
                family.find(part)
        named = zip(cls._fields, parts, strict=False)
        return cls(**{key: part for key, part in named if part})

    def __str__(self) -> str:
        return "/".join(self if self.order != Policy().order else self[:2])


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, parallelism, policies and hardware of a training run."""

    window: int  # context window in tokens
    micro_batches: int
    """N, of the whole job in a step: pipeline micro-batches x gradient accumulation x data-parallel
    degree."""

    model: ModelShape = PAPER_MODELS["7B"]
    degrees: Degrees = field(default_factory=Degrees)
    cluster: Cluster = field(default_factory=lambda: load_cluster("h100_roce"))
    packing: PackingPolicy.Config = field(default_factory=lambda: POLICIES.configure("plain"))
    context: ContextStrategy.Config = field(default_factory=lambda: STRATEGIES.configure("per_sequence"))
    order: MicroBatchOrder.Config = field(default_factory=lambda: ORDERS.configure("as_packed"))
    dtype: str = "bfloat16"  # of activations, as torch names it
    multiple: int = 1
    """A context-parallel rank's tokens are a multiple of it: for sequence parallelism and the chunked
    loss."""

    schedule: str = "1F1B"  # one of `pipeline.schedule.SCHEDULES` where predictions are wanted
    chunks: int = 1  # stages of each pipeline rank
    run: int | None = None
    """Micro-batches of one run through the pipeline; with more in a step there are several runs, as in
    gradient accumulation. None: all in one run."""

    stage_layers: tuple[int, ...] = ()  # layers of each stage; empty divides them as torchtitan does
    memory: MemorySettings = field(default_factory=MemorySettings)
    accounts: Mapping[Shape, ModelAccount] = field(default_factory=dict, repr=False)
    """Of the layers, by the shapes of jobs; for models that no formula knows."""
    memory_unknown: str = ""  # what of a layer no formula knows, such as "experts"; then it takes an account
    overlap: bool = True  # whether weights are gathered and gradients reduced while ranks compute
    tensor_overlap: float = 0.0
    """How much of tensor parallelism's collectives runs beside the layer's matrix products: 0 exposes all of
    them, 1 hides what lasts no longer than these products."""

    attention: AttentionLatency | None = None  # None: from [wlb.context] profile, or the cluster
    implementation: str = "auto"  # of attention, as in [wlb.attention]
    sm_margin: int = 0  # multiprocessors that attention leaves to other kernels
    planned: int | None = None
    """Data-parallel ranks that are planned where some stand for all, and to which `micro_batches` then
    refers; None: all."""

    on_one_rank: AskRank0 = field(default=ask_locally, compare=False, repr=False)
    """For results that may differ between ranks, such as those of a solver with a time limit."""

    def __post_init__(self) -> None:
        for dimension in self.degrees.dimensions:
            dimension.check(self)
        if not 0 <= self.tensor_overlap <= 1:
            raise PlanError(
                f"The overlap of tensor parallelism is {self.tensor_overlap}; it must be between 0 and 1."
            )
        self.packing.check(self)

    @property
    def replicas(self) -> int:
        """How many data-parallel ranks are planned."""
        return self.planned or self.degrees.data

    @property
    def replica_micro_batches(self) -> int:
        return self.micro_batches // self.replicas

    def sample(self, most: int) -> Job:
        """This job with fewer data-parallel ranks planned, if possible so few that they have at most `most`
        micro-batches in a step. Memory and communication remain those of all ranks."""
        # Ranks of the user's own dimensions meet in their own way, so all of them are planned.
        planned = self.replicas
        always = 2 * self.packing.always_shared
        while planned % always == 0 and planned * self.replica_micro_batches > most and not self.degrees.own:
            planned //= 2
        return replace(self, planned=planned, micro_batches=planned * self.replica_micro_batches)

    @property
    def policy(self) -> Policy:
        return Policy(self.packing.name, self.context.name, self.order.name)

    @property
    def undecided(self) -> bool:
        """Whether a policy is `auto`; `Scenario.choice` decides on one."""
        return any(config.owner.automatic for config in (self.packing, self.context))

    @cached_property
    def shape(self) -> PipelineShape:
        splits = self.memory.recompute.splits_backward
        return PipelineShape(self.schedule, self.degrees.pipeline, self.chunks, splits)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.stage_layers or layers_of_stages(self.model.layers, self.shape.stages)

    @cached_property
    def divisor(self) -> int:
        """A micro-batch's tokens are a multiple of it."""
        context = self.strategy.divisor if self.strategy is not None else 1
        return math.lcm(context, self.degrees.context * self.multiple)

    def padded(self, tokens: int, sharers: int = 1) -> int:
        """Tokens, with padding, of a micro-batch that this many data-parallel ranks share."""
        divisor = self.divisor if sharers == 1 else self.by_sharers[sharers].divisor
        return -(-tokens // divisor) * divisor

    def sized(self, draft: MicroBatch, dp_rank: int | None = None, **fields: Any) -> MicroBatch:
        """The draft with length and padding, and with other fields of a place in the plan.

        If ranks share it, length and padding are those of `dp_rank`, or of the first rank.
        """
        tokens, sharers = int(draft.lengths.sum()), draft.sharers
        length = self.padded(tokens if self.packing.owner.variable_length else self.window * sharers, sharers)
        place = dp_rank - draft.merged.start if draft.merged and dp_rank is not None else 0
        padding = (length - tokens + place) // sharers  # shares differ by one token at most
        return replace(draft, length=length // sharers, padding=padding, dp_rank=dp_rank or 0, **fields)

    def sharded(self, sized: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches divided over the context-parallel ranks of all their sharers."""
        result = list(sized)
        for sharers in {m.sharers for m in sized}:
            strategy = self.by_sharers[sharers].strategy if sharers > 1 else self.strategy
            if strategy is not None:
                places = [place for place, m in enumerate(sized) if m.sharers == sharers]
                packs = [(m.lengths, m.shared_length, m.elsewhere) for m in map(sized.__getitem__, places)]
                for place, (name, ranks) in zip(places, strategy.shard_all(packs), strict=True):
                    result[place] = replace(sized[place], sharding=name, ranks=ranks)
        return result

    @cached_property
    def latency(self) -> AttentionLatency:
        """Predicts the attention of one layer on one tensor-parallel rank."""
        if self.attention is not None:
            return self.attention
        latency = configured_latency(
            self.cluster, self.attention_shape, self.implementation, self.context.profile
        )
        return replace(latency, units=max(latency.units - self.sm_margin, 1))

    @property
    def attention_shape(self) -> AttentionShape:
        return AttentionShape.of(self.model, self.degrees.tensor, self.dtype)

    @cached_property
    def strategy(self) -> ContextStrategy | None:
        """The context-parallel strategy; None at a degree of 1."""
        if self.degrees.context == 1:
            return None
        alone: ContextStrategy = self.context.make(self.degrees.context, self.latency)
        alone.check(self.model, self.degrees.tensor)
        seconds = self._exchange_cost(alone).of_moves()
        strategy: ContextStrategy = self.context.make(self.degrees.context, self.latency, seconds)
        return strategy

    @cached_property
    def by_sharers(self) -> dict[int, Job]:
        """For 1, 2, 4, ... ranks the job that describes micro-batches which they share (DP-Merge).

        It has as many times the context-parallel ranks; without context parallelism a policy that shares
        some documents divides them `per_document`. There is only the job itself, as 1, where none are shared.
        """
        jobs = {1: self}
        if not self.packing.merges or (self.strategy is not None and not self.strategy.merges):
            return jobs
        if self.degrees.own_data > 1:
            if self.packing.merges is True:
                raise PlanError(
                    f"Data-parallel ranks of {self.degrees} have different weights and cannot share a "
                    "micro-batch; choose a policy without shared micro-batches, or leave the dimension out.",
                    setting="wlb.packing",
                )
            return jobs
        context, always = self.context, self.packing.always_shared
        if self.strategy is None and always == 1:
            context = STRATEGIES.configure("per_document", profile=self.context.profile)
        for ranks in (always,) if always > 1 else group_sizes(self.replicas):
            degrees = replace(self.degrees, context=ranks * self.degrees.context)
            try:
                jobs[ranks] = replace(self, degrees=degrees, context=context)
            except PlanError:  # the strategy cannot have that many ranks
                if self.packing.merges is True:
                    raise
                break
        return jobs

    @cached_property
    def account(self) -> ModelAccount | None:
        """The account of the layers in this job's shape, if there is one; of GPUs only, as a trace is made
        for them."""
        account = self.accounts.get(self.layer_shape) if self.cluster.kind == "gpu" else None
        return None if account is None else account.at(self.measured_cluster.experts)

    @property
    def layer_shape(self) -> Shape:
        degrees = self.degrees
        attention = self.context.owner.attention if degrees.context > 1 else ""
        return Shape(degrees.tensor, degrees.context, degrees.expert, attention)

    def numbers_of_stage(self, stage: int) -> tuple[int, ...]:
        """The number of each of a stage's layers in the `account`."""
        first, count = sum(self.layers[:stage]), self.layers[stage]
        return self.account.numbers[first : first + count] if self.account else (0,) * count

    @property
    def token_bytes(self) -> TokenBytes:
        """Bytes that a rank holds for each token of a micro-batch of its own, with all keys."""
        return self.token_bytes_of(1, ALL_KEYS)

    def token_bytes_of(
        self, sharers: int, keys: KeyShares, kind: Recompute | None = None, number: int = 0
    ) -> TokenBytes:
        """The same of a micro-batch that so many data-parallel ranks share, with a rank's share of its keys,
        under a kind of recomputation if not the job's, in a layer of this number in the `account`."""
        job = self if sharers == 1 else self.by_sharers[sharers]
        settings = job.model, job.degrees, job.memory, job.exchange
        return TokenBytes.of(*settings, keys, kind, job.account, number)

    @cached_property
    def pipeline_ranks(self) -> tuple[PipelineRank, ...]:
        return tuple(PipelineRank(self, number) for number in range(self.shape.ranks))

    @cached_property
    def exchange(self) -> Exchange | None:
        return None if self.strategy is None else self.strategy.exchange(self.model, self.degrees.tensor)

    @cached_property
    def exchanging(self) -> ExchangeCost:
        return self._exchange_cost(self.strategy)

    def _exchange_cost(self, strategy: ContextStrategy | None) -> ExchangeCost:
        moves = () if strategy is None else strategy.exchange(self.model, self.degrees.tensor).moves
        element, repeats = self.memory.compute_bytes, self.repeating.repeats_moves
        return ExchangeCost(moves, self.cluster, self.degrees.strides["cp"], element, repeats)

    @cached_property
    def measured_cluster(self) -> Cluster:
        """The cluster at the rates of the profile, if there is one."""
        return measured_cluster(self.cluster, self.context.profile)

    @cached_property
    def token(self) -> TokenSeconds:
        return TokenSeconds.of(self, self.measured_cluster)

    @cached_property
    def layer_seconds(self) -> LayerSeconds:
        return LayerSeconds.of(self)

    @cached_property
    def cost_model(self) -> CostModel:
        """The work of documents that packing balances."""
        return cost_model(self.packing.cost_model, self)

    @cached_property
    def fitting(self) -> Fitting:
        """Predicts peaks of memory, and what fits a device."""
        usable = self.cluster.memory * usable_share(self.packing.owner.slices)
        return Fitting(self, usable, self.memory_known and self.cluster.kind != "cpu")

    @property
    def memory_known(self) -> bool:
        """Whether a prediction of memory may refuse the job or a policy. No account tells what waits for the
        gradients of weights."""
        waits = self.shape.splits and SCHEDULES[self.schedule].splits
        return not self.memory_unknown or (self.account is not None and not waits)

    @cached_property
    def mixes(self) -> bool:
        """Whether the planner chooses what layers recompute: as needed, where memory is known."""
        ordered = self.degrees.pipeline == 1 or self.schedule in KNOWN
        return self.memory.as_needed and self.fitting.known and ordered

    @property
    def repeating(self) -> Recompute:
        """The kind of recomputation by which passes are timed: where the planner chooses, most layers repeat
        little, and those of micro-batches without a choice yet nothing."""
        return KINDS[0] if self.mixes else self.memory.recompute

    @property
    def checkpointing(self) -> str:
        """What layers recompute, in words."""
        if self.mixes:
            return "as_needed checkpointing"
        said = f"{self.memory.checkpointing} checkpointing"
        if not self.memory.as_needed:
            return said
        why = "" if self.memory_known else f" with {self.memory_unknown}"
        return f"{said} (as_needed has no prediction of memory to go by{why})"

    @property
    def most_in_flight(self) -> int | None:
        """Most tokens of documents in slices that a pipeline rank may have in flight, as set or as fit; None
        where memory is not predicted."""
        if self.packing.most_in_flight is not None or not self.memory_known:
            return self.packing.most_in_flight
        return self.fitting.most_in_flight

    @property
    def longest_micro_batch(self) -> int:
        return self.packing.longest(self)

    def planner(self, documents: Documents) -> Planner:
        assert not self.undecided, "no policy has been chosen for `auto`"
        return Planner(documents, self)

    def plans(self, documents: Documents, steps: int, after: int = 0, report: Report = silent) -> list[Plan]:
        """The plans of `steps` steps, after the first `after`."""
        planner = self.planner(documents)
        numbers = counted(range(after + steps), report, f"Planning {self.policy}")
        for _ in islice(numbers, after):
            planner.next(sharded=())
        return [planner.next() for _ in numbers]

    def under(self, policy: Policy) -> Job:
        """This job under other policies, with the settings that both have."""
        return replace(
            self,
            packing=self.packing.named(policy.packing),
            context=self.context.named(policy.context),
            order=self.order.named(policy.order),
        )

    def on(self, cluster: Cluster) -> Job:
        return replace(self, cluster=cluster)
