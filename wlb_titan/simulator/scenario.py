"""A stream of documents and the job that trains on it: what policies are compared on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wlb_titan.documents import Documents
from wlb_titan.job import Job, Policy
from wlb_titan.plan import Plan
from wlb_titan.simulator.step import Prediction, simulate

WARM_UP = 8  # steps in which queues fill


@dataclass(frozen=True)
class Scenario:
    """What a policy's steps follow from, besides the policy.

    Attributes:
        job: its own policies lend their settings to others that have them too.
        documents: what it trains on.
    """

    job: Job
    documents: Documents
    _jobs: dict[Policy, Job] = field(default_factory=dict, init=False, repr=False, compare=False)

    def under(self, policy: Policy) -> Job:
        """The job under a policy; made once, as much that it knows takes long to find."""
        if policy not in self._jobs:
            self._jobs[policy] = self.job.under(policy)
        return self._jobs[policy]

    def plans(self, policy: Policy, steps: int, *, warm_up: int = WARM_UP) -> list[Plan]:
        """Plans of so many steps, after some in which queues fill."""
        planner = self.under(policy).planner(self.documents)
        for _ in range(warm_up):
            planner.next()
        return [planner.next() for _ in range(steps)]

    def simulate(self, policy: Policy, plans: list[Plan]) -> Prediction:
        """What these plans take under the policy that made them."""
        return simulate(self.under(policy), plans)

    def predict(self, policy: Policy, steps: int) -> Prediction:
        return self.simulate(policy, self.plans(policy, steps))

    def on(self, job: Job) -> Scenario:
        """The same documents in another job."""
        return replace(self, job=job)


def network_sensitivity(
    scenario: Scenario, plans: dict[Policy, list[Plan]], factor: float
) -> dict[Policy, float]:
    """Tokens/s of each policy's same plans when the network between nodes is `factor` times slower."""
    slower = scenario.on(scenario.job.on(scenario.job.cluster.slower_network(factor)))
    return {policy: slower.simulate(policy, planned).tokens_per_second for policy, planned in plans.items()}
