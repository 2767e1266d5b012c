"""What is predicted fastest among what fits memory: `auto`, of all policies, and `search`, of all degrees."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.cluster import Link, load_cluster
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.memory.fits import USABLE
from wlb_titan.packing import POLICIES
from wlb_titan.simulator import search as searching
from wlb_titan.simulator.choice import Scenario, choose, predicted
from wlb_titan.simulator.search import at_degrees, candidates, degrees_of, pipeline_words, search

LENGTHS = np.random.default_rng(0).lognormal(6.5, 1.6, 4000).clip(16, 16384).astype(np.int64)
DOCUMENTS = Documents(lengths=LENGTHS, seed=0)
AUTO, PLAIN, LAZY = Policy("auto", "auto"), Policy("plain"), Policy("wlb_lazy", "per_document")


@pytest.fixture(scope="module")
def job():
    return Job(window=16384, micro_batches=4, degrees=Degrees(context=4, shard=4)).under(AUTO)


@pytest.fixture(scope="module")
def choice(job):
    return choose(job, DOCUMENTS)


def test_the_fastest_of_all_policies_of_both_families_is_chosen(job, choice):
    tried = {one.policy for one in choice.candidates}
    packing = [name for name in POLICIES.candidates if name != "fixed_solver"]  # which plans by a clock
    assert "auto" not in packing
    assert tried == {Policy(p, s) for p in packing for s in STRATEGIES.candidates}
    assert choice.candidates[0].policy == choice.job.policy and not choice.job.undecided
    assert len(choice.rows()) == len(tried)
    (remark,) = choice.remarks()
    assert remark.startswith(f"auto is {choice.job.policy}, by predicted MFU. Times of attention: ")
    assert remark.endswith("Gluon's forward and Triton's backward pass.")
    speeds = {one.policy: one.flops_per_second for one in choice.candidates}
    assert speeds[choice.job.policy] == max(speeds.values()) > 1.1 * speeds[PLAIN]


@pytest.mark.long
def test_what_travels_is_weighed(job):
    """Over a slow network it is decided by what has to travel: of short documents nothing."""
    slow = job.on(replace(job.cluster, gpus_per_node=1, network=Link(1e10, 1e-5)))
    slow = replace(slow, degrees=Degrees(context=4, pipeline=2), micro_batches=8)
    for longest, best in ((1024, "hybrid"), (16384, "ulysses")):
        short = Documents(lengths=LENGTHS.clip(max=longest), seed=0)
        choice = choose(slow.under(Policy("wlb_lazy", "auto")), short)
        assert choice.job.policy.context == best


@pytest.mark.long
def test_a_large_job_is_tried_on_some_of_its_data_parallel_ranks(monkeypatch):
    """And not sharded while queues fill: so few micro-batches are divided over context-parallel ranks."""
    large = Job(window=16384, micro_batches=512, degrees=Degrees(context=2, shard=256))
    small = replace(large, micro_batches=64, planned=32)
    assert large.sample(64) == small and small.sample(64) == small
    divided = []
    strategy = type(large.strategy)
    shard = strategy.shard
    monkeypatch.setattr(strategy, "shard", lambda self, *a, **k: divided.append(1) or shard(self, *a, **k))
    found = predicted(large, PLAIN, DOCUMENTS)
    assert len(divided) == 64 * 16
    plans = small.plans(DOCUMENTS, 16, after=8)
    tokens = sum(plan.tokens for plan in plans) / 16
    assert found.tokens_per_second == pytest.approx(8 * tokens / found.seconds)
    # Weights are divided among all ranks, so a device holds what it holds in the large job.
    alone = replace(large, micro_batches=64, degrees=Degrees(context=2, shard=32))
    assert found.memory < predicted(alone, PLAIN, DOCUMENTS).memory


def test_a_section_that_names_a_policy_keeps_it(job):
    for policy in (Policy("wlb_lazy", "auto"), Policy("auto", "ulysses")):
        candidates = choose(job.under(policy), DOCUMENTS).candidates
        for named, tried in zip(policy, zip(*(one.policy for one in candidates), strict=True), strict=True):
            assert named == "auto" or set(tried) == {named}


def test_what_does_not_fit_is_not_chosen(job, choice):
    by_policy = {one.policy: one for one in choice.candidates}
    enough = by_policy[PLAIN].memory
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
    packings = ("plain", "dealt", "fixed_greedy", "wlb", "wlb_lazy")
    assert set(refused) == {f"{packing}/ulysses" for packing in packings}
    assert all("cannot share 2 query heads" in problem for problem in refused.values())


@pytest.mark.long
def test_all_ranks_choose_by_the_figures_of_one(job, choice):
    """Whatever their own predictions would be, here of other documents."""
    said = []
    mine = choose(replace(job, on_one_rank=lambda ask: said.append(ask()) or said[0]), DOCUMENTS)
    other = choose(replace(job, on_one_rank=lambda ask: said[0]), Documents(lengths=LENGTHS[:10]))
    assert other.candidates == mine.candidates == choice.candidates


def test_settings_that_candidates_have_are_passed_on(job):
    packing = replace(job.packing, cost_model="quadratic:1,500", max_length=20000)
    found = choose(replace(job, packing=packing).under(Policy("auto", "hybrid")), DOCUMENTS).job.packing
    assert found.cost_model == "quadratic:1,500"
    lazy = job.under(AUTO).packing.named("auto")
    assert replace(lazy, max_length=20000).named("wlb_lazy").max_length == 20000


def test_without_context_parallelism_there_is_one_sharding():
    job = Job(window=4096, micro_batches=4, degrees=Degrees(shard=4)).under(AUTO)
    assert {one.policy.context for one in choose(job, DOCUMENTS).candidates} == {"per_sequence"}


def test_a_solver_and_auto_do_not_go_together(job):
    with pytest.raises(PlanError, match="fixed_solver takes up to 10 s"):
        choose(job.under(Policy("fixed_solver", "auto")), DOCUMENTS)


def test_scenarios_decide(job, choice):
    scenario = Scenario(job, DOCUMENTS)
    assert scenario.under(AUTO).policy == choice.job.policy
    assert scenario.choice(Policy("plain", "hybrid")) is None
    figures = predicted(job, choice.job.policy, DOCUMENTS)
    assert figures == choice.candidates[0]


@pytest.fixture(scope="module")
def scenario():
    lengths = (np.random.default_rng(0).pareto(0.8, 5000) * 300 + 32).clip(32, 16384).astype(np.int64)
    facts = {"model": PAPER_MODELS["550M"], "cluster": load_cluster("h100_roce"), "window": 16384}
    job = Job(degrees=Degrees(context=2, pipeline=2), micro_batches=8, **facts)
    return Scenario(job, Documents(lengths=lengths, name="drawn", seed=None))


def test_candidates_divide_gpus_heads_micro_batches_and_experts(scenario):
    found = list(degrees_of(scenario.job, 16))
    assert all(degrees.ranks == 16 for degrees in found)
    assert {degrees.tensor for degrees in found} == {1, 2, 4}  # 12 heads
    assert all(8 % degrees.data == 0 and 8 // degrees.data >= degrees.pipeline for degrees in found)
    assert Degrees(tensor=2, context=4, pipeline=2) in found
    assert not any(degrees.data == 16 for degrees in found)
    assert at_degrees(scenario.job, Degrees(tensor=4), "1F1B", 1).latency.heads == 3
    model = replace(scenario.job.model, experts=4, routed_width=1024, visits=2.0)
    found = set(degrees_of(replace(scenario.job, model=model), 4))
    assert {degrees.expert for degrees in found} == {1, 2, 4}
    assert all(degrees.tensor * degrees.sharding_ranks % degrees.expert == 0 for degrees in found)


def test_schedules_and_stages_a_rank_are_tried(scenario):
    def of(pipeline, **memory):
        job = replace(scenario.job, memory=MemorySettings(**memory))
        return [(j.schedule, j.chunks) for j in candidates(job, 4) if j.degrees == Degrees(pipeline=pipeline)]

    interleaved = [("Interleaved1F1B", chunks) for chunks in (2, 4)]  # 16 layers on 4 ranks
    assert of(4) == [("1F1B", 1), *interleaved]
    zero_bubble = [("InterleavedZeroBubble", chunks) for chunks in (2, 4)]
    assert of(4, checkpointing="none") == [("1F1B", 1), *interleaved, *zero_bubble, ("ZBVZeroBubble", 2)]


def test_nothing_is_left_out_for_memory_that_is_not_known(scenario):
    tight = scenario.job.on(replace(scenario.job.cluster, memory=1e8))
    found = search(scenario.on(replace(tight, memory_unknown="a model with experts")), 4, [PLAIN], 1).found
    assert found and all(one.fits and one.peak_memory.total > 1e8 for one in found)


@pytest.mark.long
def test_what_is_not_planned_could_not_win(scenario, monkeypatch):
    quick = search(scenario, 4, [PLAIN, LAZY], steps=2).found
    monkeypatch.setattr(searching, "LEAST", 10**6)
    full = search(scenario, 4, [PLAIN, LAZY], steps=2).found
    assert len(quick) < len(full)
    assert (quick[0].job, quick[0].flops_per_second) == (full[0].job, full[0].flops_per_second)


def test_nothing_is_faster_than_the_bound_by_which_it_is_planned(scenario, monkeypatch):
    """Under `hybrid` nothing may travel, whatever the sharding is with which the search began."""
    job = scenario.job
    slow = job.on(replace(job.cluster, gpus_per_node=1, network=Link(2e9, 1e-5)))
    short = replace(scenario.documents, lengths=scenario.documents.lengths.clip(max=4096))
    apart = Scenario(slow, short)
    monkeypatch.setattr(searching, "LEAST", 10**6)
    found = search(apart, 4, [Policy("wlb_lazy", "hybrid")], steps=1).found
    window = searching._average_window(apart)
    bounds = [searching._if_balanced(replace(one.job, context=slow.context), window) for one in found]
    assert all(one.flops_per_second <= most for one, most in zip(found, bounds, strict=True))
    assert any(one.job.degrees.context > 1 for one in found)


def test_what_there_is_no_time_for_is_counted(scenario):
    asked = []
    result = search(scenario, 4, [PLAIN], 1, lambda what: asked.append(what) or len(asked) < 2)
    assert len(result.found) == 1
    assert result.untried == len(list(candidates(scenario.job, 4))) - 1
    assert asked[0] == f"{result.found[0].job.degrees}, {pipeline_words(result.found[0].job)}"


def test_search_finds_the_fastest_that_fits(scenario):
    result = search(scenario, 4, [PLAIN, LAZY], steps=1)
    rates = [found.flops_per_second for found in result.found]
    assert rates == sorted(rates, reverse=True)
    assert {found.job.policy for found in result.found} == {PLAIN, LAZY}
    assert all(found.fits for found in result.found)
    own = max(scenario.predict(policy, 1).flops_per_second for policy in (PLAIN, LAZY))
    assert rates[0] >= result.configured.flops_per_second == own
    assert search(scenario, 8, [PLAIN], steps=1).configured is None  # of other GPUs
    most = max(found.peak_memory.total for found in result.found)
    barely = scenario.job.on(replace(scenario.job.cluster, memory=most / 0.95))
    searched = search(scenario.on(barely), 4, [PLAIN], steps=1).found
    assert all(found.peak_memory.total <= USABLE * most / 0.95 for found in searched)
    with pytest.raises(PlanError, match="No configuration fits 4 GPUs"):
        tiny = scenario.job.on(replace(scenario.job.cluster, memory=1e8))
        search(scenario.on(tiny), 4, [PLAIN], steps=1)
