"""A stream of documents and the job that trains on it: what policies are compared on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wlb_titan.documents import Documents
from wlb_titan.job import Job
from wlb_titan.plan import Plan
from wlb_titan.policies import Policy
from wlb_titan.simulator.choice import WARM_UP, Choice, choose
from wlb_titan.simulator.step import Prediction, simulate


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
    _choices: dict[Policy, Choice | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def under(self, policy: Policy) -> Job:
        """The job under a policy, made once, as much that it knows takes long to find; `auto` is chosen."""
        if policy not in self._jobs:
            choice = self.choice(policy)
            self._jobs[policy] = self.job.under(policy) if choice is None else choice.job
        return self._jobs[policy]

    def choice(self, policy: Policy) -> Choice | None:
        """What `auto` stands for in a policy; None in one without it."""
        if policy not in self._choices:
            job = self.job.under(policy)
            self._choices[policy] = choose(job, self.documents) if job.undecided else None
        return self._choices[policy]

    def plans(self, policy: Policy, steps: int, *, warm_up: int = WARM_UP) -> list[Plan]:
        """Plans of so many steps, after some in which queues fill."""
        return self.under(policy).plans(self.documents, steps, after=warm_up)

    def simulate(self, policy: Policy, plans: list[Plan]) -> Prediction:
        """What these plans take under the policy that made them."""
        return simulate(self.under(policy), plans)

    def predict(self, policy: Policy, steps: int) -> Prediction:
        return self.simulate(policy, self.plans(policy, steps))

    def on(self, job: Job) -> Scenario:
        """These documents in another job."""
        return replace(self, job=job)


def network_sensitivity(
    scenario: Scenario, plans: dict[Policy, list[Plan]], factor: float
) -> dict[Policy, float]:
    """FLOP/s of each policy's same plans when the network between nodes is `factor` times slower."""
    slower = scenario.on(scenario.job.on(scenario.job.cluster.slower_network(factor)))
    return {policy: slower.simulate(policy, planned).flops_per_second for policy, planned in plans.items()}
