"""A stream of documents and the job that trains on it: what policies are compared on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wlb_titan.cost.workload import CostModel
from wlb_titan.documents.mixture import Lengths, Source
from wlb_titan.errors import PlanError
from wlb_titan.packing import VARIABLE_LENGTH
from wlb_titan.pipeline.order import ORDERS
from wlb_titan.pipeline.runs import PipelineRuns
from wlb_titan.plan import Plan
from wlb_titan.planner import Planner
from wlb_titan.settings import PackingSettings, ShardingSettings
from wlb_titan.simulator.job import SimulatedJob
from wlb_titan.simulator.passes import JobCost
from wlb_titan.simulator.step import Prediction, simulate

PACKINGS = ("plain", "fixed_greedy", "fixed_solver", "wlb", "wlb_lazy")
SHARDINGS = ("per_sequence", "per_document", "adaptive", "hybrid")
WARM_UP = 8  # steps in which queues fill


class Policy(NamedTuple):
    """How micro-batches are packed, sharded over context-parallel ranks and ordered in the pipeline."""

    packing: str
    sharding: str = "per_sequence"
    order: str = "as_packed"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`packing[:sharding[:order]]`, such as `wlb:adaptive` or `wlb_lazy:hybrid:best`.

        Raises:
            PlanError: a part is not known.
        """
        parts = [part.strip() for part in text.split(":")]
        for part, (kind, known) in zip(
            parts, (("packing", PACKINGS), ("sharding", SHARDINGS), ("order", ORDERS)), strict=False
        ):
            if part not in known:
                raise PlanError(f"{text!r}: no {kind} is called {part!r}; there are {', '.join(known)}.")
        if len(parts) > 3:
            raise PlanError(f"{text!r} has too many parts; a policy is packing[:sharding[:order]].")
        return cls(*parts)

    def __str__(self) -> str:
        return ":".join(self if self.order != "as_packed" else self[:2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What a policy's steps follow from, besides the policy.

    Attributes:
        source: where the lengths come from, for reports.
        lengths: tokens of every document.
        window: context window in tokens.
        micro_batches: N, those of the whole job in one step.
        divisor: tokens that a micro-batch must be a multiple of.
        seed: of the epochs' order; None keeps that of `lengths`.
        job: the job.
        packing: settings of the packing policies.
        cost_model: what packing balances by; None takes the simulated job's own times.
    """

    source: str
    lengths: Lengths
    window: int
    micro_batches: int
    divisor: int = 1
    seed: int | None = None
    job: SimulatedJob
    packing: PackingSettings
    cost_model: CostModel | None = None
    sources: tuple[Source, ...] = ()

    @property
    def longest(self) -> int | None:
        """Tokens of the longest micro-batches that fit memory; None if not even those of a window do."""
        each = self.micro_batches // self.job.degrees.data
        return self.job.longest_micro_batch(self.window, each, self._divisor)

    @property
    def _divisor(self) -> int:
        return int(np.lcm(self.divisor, 2 * self.job.degrees.context * self.job.degrees.tensor))

    def planner(self, policy: Policy) -> Planner:
        """A planner at the beginning of the stream; the default of `max_length` is `longest`."""
        degrees = self.job.degrees
        packing = replace(self.packing, policy=policy.packing)  # type: ignore[arg-type]
        if packing.max_length is None and policy.packing in VARIABLE_LENGTH:
            packing = replace(packing, max_length=self.longest)
        run = self.job.run or self.micro_batches // degrees.data
        return Planner(
            self.lengths,
            window=self.window,
            micro_batches=self.micro_batches,
            data_parallel=degrees.data,
            context_parallel=degrees.context,
            pipeline=PipelineRuns(self.job.shape, run, policy.order) if degrees.pipeline > 1 else None,
            divisor=self._divisor,
            seed=self.seed,
            packing=packing,
            sharding=ShardingSettings(policy=policy.sharding),  # type: ignore[arg-type]
            cost_model=self.cost_model or JobCost(self.job),
            latency=self.job.latency,
            sources=self.sources,
        )

    def plans(self, policy: Policy, steps: int, *, warm_up: int = WARM_UP) -> list[Plan]:
        """Plans of so many steps, after some in which queues fill."""
        planner = self.planner(policy)
        for _ in range(warm_up):
            planner.next()
        return [planner.next() for _ in range(steps)]

    def predict(self, policy: Policy, steps: int) -> Prediction:
        return simulate(self.job, self.plans(policy, steps))

    def on(self, job: SimulatedJob) -> Scenario:
        """The same documents in another job."""
        return replace(self, job=job)


def network_sensitivity(
    scenario: Scenario, plans: dict[Policy, list[Plan]], factor: float
) -> dict[Policy, float]:
    """Tokens/s of each policy's same plans when the network between nodes is `factor` times slower."""
    slower = scenario.job.on(scenario.job.cluster.slower_network(factor))
    return {policy: simulate(slower, planned).tokens_per_second for policy, planned in plans.items()}
