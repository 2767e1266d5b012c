"""`auto`: what is predicted fastest among what fits memory, of all policies that there are."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.cluster import Link
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.memory.fits import USABLE
from wlb_titan.packing import POLICIES
from wlb_titan.simulator.choice import Scenario, choose, predicted

LENGTHS = np.random.default_rng(0).lognormal(6.5, 1.6, 4000).clip(16, 16384).astype(np.int64)
DOCUMENTS = Documents(lengths=LENGTHS, seed=0)
AUTO = Policy("auto", "auto")


@pytest.fixture(scope="module")
def job():
    job = Job(window=16384, micro_batches=4, degrees=Degrees(context=4, shard=4))
    return job.under(AUTO)


@pytest.fixture(scope="module")
def choice(job):
    return choose(job, DOCUMENTS)


def test_all_policies_of_both_families_are_compared(job, choice):
    tried = {one.policy for one in choice.candidates}
    packing = [name for name in POLICIES.candidates if name != "fixed_solver"]  # which plans by a clock
    assert "auto" not in packing
    assert tried == {Policy(p, s) for p in packing for s in STRATEGIES.candidates}
    assert choice.candidates[0].policy == choice.job.policy and not choice.job.undecided
    assert len(choice.rows()) == len(tried)
    assert choice.remarks() == [f"auto is {choice.job.policy}, by predicted MFU."]


def test_it_is_never_predicted_to_be_slower_than_plain(choice):
    speeds = {one.policy: one.flops_per_second for one in choice.candidates}
    assert speeds[choice.job.policy] == max(speeds.values()) > 1.1 * speeds[Policy("plain", "per_sequence")]


def test_what_travels_is_weighed(job):
    """Over a slow network it is decided by what has to travel: of short documents nothing."""
    slow = job.on(replace(job.cluster, gpus_per_node=1, network=Link(1e10, 1e-5)))
    slow = replace(slow, degrees=Degrees(context=4, pipeline=2), micro_batches=8)
    for longest, best in ((1024, "hybrid"), (16384, "ulysses")):
        short = Documents(lengths=LENGTHS.clip(max=longest), seed=0)
        choice = choose(slow.under(Policy("wlb_lazy", "auto")), short)
        assert choice.job.policy.sharding == best


def test_a_large_job_is_tried_on_some_of_its_data_parallel_ranks(monkeypatch):
    """And not sharded while queues fill: so few micro-batches are divided over context-parallel ranks."""
    large = Job(window=16384, micro_batches=512, degrees=Degrees(context=2, shard=256))
    small = replace(large, micro_batches=64, planned=32)
    assert large.sample(64) == small and small.sample(64) == small
    divided = []
    strategy = type(large.strategy)
    shard = strategy.shard
    monkeypatch.setattr(strategy, "shard", lambda self, *a, **k: divided.append(1) or shard(self, *a, **k))
    found = predicted(large, Policy("plain", "per_sequence"), DOCUMENTS)
    assert len(divided) == 64 * 16
    plans = small.plans(DOCUMENTS, 16, after=8)
    tokens = sum(plan.tokens for plan in plans) / 16
    assert found.tokens_per_second == pytest.approx(8 * tokens / found.seconds)
    # Weights are divided among all ranks, so a device holds what it holds in the large job.
    alone = replace(large, micro_batches=64, degrees=Degrees(context=2, shard=32))
    assert found.memory < predicted(alone, Policy("plain", "per_sequence"), DOCUMENTS).memory


def test_a_section_that_names_a_policy_keeps_it(job):
    for policy in (Policy("wlb_lazy", "auto"), Policy("auto", "ulysses")):
        candidates = choose(job.under(policy), DOCUMENTS).candidates
        for named, tried in zip(policy, zip(*(one.policy for one in candidates), strict=True), strict=True):
            assert named == "auto" or set(tried) == {named}


def test_what_does_not_fit_is_not_chosen(job, choice):
    by_policy = {one.policy: one for one in choice.candidates}
    enough = by_policy[Policy("plain", "per_sequence")].memory
    job = job.under(Policy("auto", "per_sequence"))
    mean = np.mean([enough, max(one.memory for one in choice.candidates)])
    found = choose(job.under(AUTO).on(replace(job.cluster, memory=mean / USABLE)), DOCUMENTS)
    assert found.candidates[0].memory <= mean
    too_large = [one for one in found.candidates if one.memory > mean]
    assert any(one.memory < mean / USABLE for one in too_large)  # it would be within the whole device
    assert too_large and all("of a device that may be filled" in one.problem for one in too_large)
    assert any("does not fit" in line for line in found.remarks())
    with pytest.raises(PlanError, match=r"finds no policy to choose: .*does not fit"):
        choose(job.on(replace(job.cluster, memory=1e9)), DOCUMENTS)


def test_what_cannot_run_is_named(job):
    few_heads = replace(job, degrees=Degrees(tensor=16, context=4, shard=4))  # of 32 heads: 2 on a rank
    found = choose(few_heads, DOCUMENTS)
    refused = {str(one.policy): one.problem for one in found.candidates if one.problem}
    assert set(refused) == {"plain:ulysses", "fixed_greedy:ulysses", "wlb:ulysses", "wlb_lazy:ulysses"}
    assert all("cannot share 2 query heads" in problem for problem in refused.values())


def test_all_ranks_choose_by_the_figures_of_one(job, choice):
    """Whatever their own predictions would be, here of other documents."""
    said = []
    mine = choose(job, DOCUMENTS, on_one_rank=lambda ask: said.append(ask()) or said[0])
    other = choose(job, Documents(lengths=LENGTHS[:10]), on_one_rank=lambda ask: said[0])
    assert other.candidates == mine.candidates == choice.candidates


def test_settings_that_candidates_have_are_passed_on(job):
    packing = replace(job.packing, cost_model="quadratic:1,500", max_length=20000, tail="drop")
    found = choose(replace(job, packing=packing).under(Policy("auto", "hybrid")), DOCUMENTS).job.packing
    assert found.cost_model == "quadratic:1,500"
    lazy = job.under(AUTO).packing.named("auto")
    assert replace(lazy, max_length=20000).named("wlb_lazy").max_length == 20000


def test_without_context_parallelism_there_is_one_sharding():
    job = Job(window=4096, micro_batches=4, degrees=Degrees(shard=4)).under(AUTO)
    assert {one.policy.sharding for one in choose(job, DOCUMENTS).candidates} == {"per_sequence"}


def test_a_solver_and_auto_do_not_go_together(job):
    with pytest.raises(PlanError, match="fixed_solver takes up to 10 s"):
        choose(job.under(Policy("fixed_solver", "auto")), DOCUMENTS)


def test_scenarios_decide(job, choice):
    scenario = Scenario(job, DOCUMENTS)
    assert scenario.under(AUTO).policy == choice.job.policy
    assert scenario.choice(Policy("plain", "hybrid")) is None
    figures = predicted(job, choice.job.policy, DOCUMENTS)
    assert figures == choice.candidates[0]
