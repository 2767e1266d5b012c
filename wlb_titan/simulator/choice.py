"""The choice of `policy = "auto"`: what is predicted fastest among what fits memory (docs/packing.md).

Every candidate plans the job's first documents; its steps are simulated, after some in which queues fill, and
compared by the model's FLOPs a second. Packing and context parallelism are chosen together where both are
`auto`, as packing to equal work changes what context-parallel ranks have to balance. In a large job the
data-parallel ranks of `MOST_MICRO_BATCHES` are planned, and stand for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isnan, nan

import numpy as np

from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError, UserError, quiet
from wlb_titan.job import Job, Policy
from wlb_titan.memory.rank import GIB
from wlb_titan.packing.plain import MOST_MICRO_BATCHES
from wlb_titan.plan import Plan
from wlb_titan.plugins import PluginConfig
from wlb_titan.progress import Progress, counted, silent
from wlb_titan.simulator.step import Prediction, simulate

WARM_UP = 8  # steps in which queues fill
STEPS = 16  # steps by which candidates are compared


@dataclass(frozen=True)
class Scenario:
    """Documents and a job to simulate under any policy. The job's own policies lend their settings to others
    that have them too."""

    job: Job
    documents: Documents
    report: Progress = field(default=silent, repr=False, compare=False)
    _chosen: dict[Policy, tuple[Job, Choice | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def under(self, policy: Policy) -> Job:
        """The job under a policy, with `auto` resolved; kept, as much that it knows takes long to find."""
        return self._decided(policy)[0]

    def choice(self, policy: Policy) -> Choice | None:
        """What `auto` stands for in a policy; None without it."""
        return self._decided(policy)[1]

    def _decided(self, policy: Policy) -> tuple[Job, Choice | None]:
        if policy not in self._chosen:
            job = self.job.under(policy)
            choice = choose(job, self.documents, report=self.report) if job.undecided else None
            self._chosen[policy] = (choice.job if choice else job, choice)
        return self._chosen[policy]

    def plans(self, policy: Policy, steps: int, *, warm_up: int = WARM_UP) -> list[Plan]:
        return self.under(policy).plans(self.documents, steps, after=warm_up, report=self.report)

    def simulate(self, policy: Policy, plans: list[Plan]) -> Prediction:
        return simulate(self.under(policy), plans)

    def predict(self, policy: Policy, steps: int) -> Prediction:
        return self.simulate(policy, self.plans(policy, steps))

    def on(self, job: Job) -> Scenario:
        return replace(self, job=job)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that `auto` may stand for, and its predicted steps; nan where it cannot run."""

    policy: Policy
    seconds: float = nan  # of a step, mean
    tokens_per_second: float = nan  # of documents
    flops_per_second: float = nan  # of the model
    memory: float = nan  # bytes of the fullest GPU
    problem: str = ""  # why it cannot be chosen


@dataclass(frozen=True, slots=True)
class Choice:
    undecided: Job
    candidates: tuple[Candidate, ...]  # the fastest first, those that cannot be chosen last

    @property
    def job(self) -> Job:
        return self.undecided.under(self.candidates[0].policy)

    def rows(self) -> list[dict[str, str]]:
        """Headings and cells of candidates with a prediction; `!` where memory does not suffice."""
        peak = self.undecided.cluster.peak_flops * self.undecided.degrees.ranks
        best = self.candidates[0].flops_per_second
        return [
            {
                "policy": str(candidate.policy),
                "step, s": f"{candidate.seconds:.3f}",
                "tokens/s": f"{candidate.tokens_per_second:,.0f}",
                "MFU": f"{candidate.flops_per_second / peak:.1%}",
                "peak GiB": f"{candidate.memory / GIB:.1f}" + (" !" if candidate.problem else ""),
                "of best": f"{candidate.flops_per_second / best:.1%}",
            }
            for candidate in self.candidates
            if not isnan(candidate.seconds)
        ]

    def remarks(self) -> list[str]:
        named = [f"{c.policy} {c.problem}" for c in self.candidates if c.problem]
        source = f"Times of attention: {self.job.latency.source}."
        return [f"auto is {self.candidates[0].policy}, by predicted MFU. {source}", *named]


def choose(job: Job, documents: Documents, *, report: Progress = silent) -> Choice:
    """Predicts the policies that a job may have instead of `auto`, on one rank for all."""
    policies = candidates_of(job)
    if not policies:
        raise PlanError(
            f"wlb.policy: auto plans many steps to compare strategies, and {job.packing.name} takes up to "
            f"{job.packing.planning_seconds:g} s for each. Name a strategy, or another packing policy."
        )

    def ask() -> list[Candidate]:
        compared = counted(policies, report, "Comparing policies")
        return [predicted(job, policy, documents) for policy in compared]

    candidates: list[Candidate] = job.on_one_rank(ask)
    candidates.sort(key=lambda c: (bool(c.problem), -np.nan_to_num(c.flops_per_second)))
    if candidates[0].problem:
        reasons = "; ".join(f"{candidate.policy}: {candidate.problem}" for candidate in candidates)
        raise PlanError(f"auto finds no policy to choose: {reasons}")
    return Choice(job, tuple(candidates))


def candidates_of(job: Job) -> list[Policy]:
    """The policies that `auto` may stand for; a job's own without it."""
    # Without context parallelism all strategies are alike.
    strategies = _names(job.context)[: None if job.degrees.context > 1 else 1]
    return [
        Policy(packing, context, job.order.name)
        for packing in _names(job.packing)
        if not (job.undecided and job.packing.named(packing).planning_seconds)
        for context in strategies
    ]


def predicted(
    job: Job, policy: Policy, documents: Documents, steps: int = STEPS, after: int = WARM_UP
) -> Candidate:
    """A policy's figures over `steps` steps, after the first `after`."""
    before = quiet.set(True)  # it says so again once it is chosen
    try:
        job = job.under(policy)
        sample = job.sample(MOST_MICRO_BATCHES)
        prediction = simulate(sample, sample.plans(documents, steps, after=after))
    except UserError as error:
        return Candidate(policy, problem=f"cannot run: {error}")
    finally:
        quiet.reset(before)
    replicas, memory = job.degrees.data / sample.replicas, prediction.peak_memory.total
    fits = not job.memory_known or memory <= job.fitting.usable
    return Candidate(
        policy,
        seconds=float(prediction.seconds.mean()),
        tokens_per_second=prediction.tokens_per_second * replicas,
        flops_per_second=prediction.flops_per_second * replicas,
        memory=memory,
        problem="" if fits else f"does not fit {job.fitting.room}",
    )


def _names(config: PluginConfig) -> list[str]:
    """The section's own name, or for `auto` those of its family."""
    return config.family.candidates if config.owner.automatic else [config.name]
