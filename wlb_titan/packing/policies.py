"""The policies of a job: what fills micro-batches, how ranks share one, and in which order they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

from wlb_titan.context.strategy import STRATEGIES, ContextStrategy
from wlb_titan.cost.cluster import Cluster
from wlb_titan.cost.workload import CostModel, cost_model
from wlb_titan.errors import PlanError
from wlb_titan.layers.rates import Rates
from wlb_titan.memory.fits import Fitting
from wlb_titan.packing.policy import POLICIES, Ask, AskRank0, PackingPolicy, ask_locally, sharings
from wlb_titan.pipeline.order import ORDERS, MicroBatchOrder


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
class Policies(Rates):
    """Rates with the policies that pack and order micro-batches: all that a step's plan depends on besides
    the documents."""

    packing: PackingPolicy.Config = field(default_factory=lambda: POLICIES.configure("plain"))
    order: MicroBatchOrder.Config = field(default_factory=lambda: ORDERS.configure("as_packed"))
    on_one_rank: AskRank0 = field(default=ask_locally, compare=False, repr=False)
    """For results that may differ between ranks, such as those of a solver with a time limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.packing.check(self)

    def sample(self, most: int) -> Self:
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
    def cost_model(self) -> CostModel:
        """The work of documents that packing balances."""
        return cost_model(self.packing.cost_model, self)

    @cached_property
    def fitting(self) -> Fitting:
        """Predicts peaks of memory, and what fits a device."""
        packing = self.packing
        return Fitting(self, packing.owner.slices, packing.always_shared, packing.regroups)

    @property
    def longest_micro_batch(self) -> int:
        return self.packing.longest(self.fitting)

    @property
    def ask(self) -> Ask:
        return Ask(
            micro_batches=self.micro_batches,
            replicas=self.replicas,
            context=self.degrees.context,
            divisor=self.divisor,
            cost_model=self.cost_model,
            longest=self.longest_micro_batch,
            on_one_rank=self.on_one_rank,
            fitting=self.fitting,
        )

    @property
    def shared_context(self) -> ContextStrategy.Config:
        return super().shared_context if self.packing.always_shared == 1 else self.context

    @cached_property
    def by_sharers(self) -> Mapping[int, Rates]:
        """`Rates.shared` for 1, 2, 4, ... data-parallel ranks, as the packing policy lets them share."""
        return sharings(self, self.packing)

    def under(self, policy: Policy) -> Self:
        """This job under other policies, with the settings that both have."""
        return replace(
            self,
            packing=self.packing.named(policy.packing),
            context=self.context.named(policy.context),
            order=self.order.named(policy.order),
        )

    def on(self, cluster: Cluster) -> Self:
        return replace(self, cluster=cluster)
