"""Scenarios and the search over degrees: what is tried, what fits, what is fastest."""

from dataclasses import replace

import numpy as np
import pytest

from wlb_titan.cost.cluster import Link, load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job, Policy
from wlb_titan.memory.fits import USABLE
from wlb_titan.memory.layer import MemorySettings
from wlb_titan.simulator import search as searching
from wlb_titan.simulator.choice import Scenario, network_sensitivity
from wlb_titan.simulator.search import at_degrees, candidates, degrees_of, pipeline_words, search

MODEL = PAPER_MODELS["550M"]
PLAIN, LAZY = Policy("plain"), Policy("wlb_lazy", "per_document")


@pytest.fixture(scope="module")
def scenario():
    lengths = (np.random.default_rng(0).pareto(0.8, 5000) * 300 + 32).clip(32, 16384).astype(np.int64)
    job = Job(
        model=MODEL,
        degrees=Degrees(context=2, pipeline=2),
        cluster=load_cluster("h100_roce"),
        window=16384,
        micro_batches=8,
    )
    return Scenario(job, Documents(lengths=lengths, name="drawn", seed=None))


def test_candidates_divide_gpus_heads_and_micro_batches(scenario):
    found = list(degrees_of(scenario.job, 16))
    assert all(degrees.ranks == 16 for degrees in found)
    assert {degrees.tensor for degrees in found} == {1, 2, 4}  # 12 heads
    assert all(8 % degrees.data == 0 and 8 // degrees.data >= degrees.pipeline for degrees in found)
    assert Degrees(tensor=2, context=4, pipeline=2) in found
    assert not any(degrees.data == 16 for degrees in found)
    assert at_degrees(scenario.job, Degrees(tensor=4), "1F1B", 1).latency.heads == 3


def test_schedules_and_stages_a_rank_are_tried(scenario):
    def of(pipeline, **memory):
        job = replace(scenario.job, memory=MemorySettings(**memory))
        return [(j.schedule, j.chunks) for j in candidates(job, 4) if j.degrees == Degrees(pipeline=pipeline)]

    interleaved = [("Interleaved1F1B", chunks) for chunks in (2, 4)]  # 16 layers on 4 ranks
    assert of(4) == [("1F1B", 1), *interleaved]
    zero_bubble = [("InterleavedZeroBubble", chunks) for chunks in (2, 4)]
    assert of(4, checkpointing="none") == [("1F1B", 1), *interleaved, *zero_bubble, ("ZBVZeroBubble", 2)]


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
    bounds = [searching._if_balanced(replace(one.job, sharding=slow.sharding), window) for one in found]
    assert all(one.flops_per_second <= most for one, most in zip(found, bounds, strict=True))
    assert any(one.job.degrees.context > 1 for one in found)


def test_what_there_is_no_time_for_is_counted(scenario):
    asked = []
    result = search(scenario, 4, [PLAIN], 1, lambda what: asked.append(what) or len(asked) < 2)
    assert len(result.found) == 1
    assert result.untried == len(list(candidates(scenario.job, 4))) - 1
    assert asked[0] == f"{result.found[0].job.degrees}, {pipeline_words(result.found[0].job)}"


def test_experts_are_spread_over_powers_of_two(scenario):
    model = replace(MODEL, experts=4, routed_width=1024, visits=2.0)
    found = set(degrees_of(replace(scenario.job, model=model), 4))
    assert {degrees.expert for degrees in found} == {1, 2, 4}
    assert all(degrees.tensor * degrees.sharding_ranks % degrees.expert == 0 for degrees in found)


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
    with pytest.raises(PlanError, match="Nothing fits 4 GPUs"):
        tiny = scenario.job.on(replace(scenario.job.cluster, memory=1e8))
        search(scenario.on(tiny), 4, [PLAIN], steps=1)


def test_a_slower_network_costs_time_where_it_is_used(scenario):
    plans = {PLAIN: scenario.plans(PLAIN, 2, warm_up=0)}
    now = network_sensitivity(scenario, plans, 1.0)[PLAIN]
    assert network_sensitivity(scenario, plans, 4.0)[PLAIN] == pytest.approx(now)  # 4 GPUs in one node
    apart = scenario.on(scenario.job.on(replace(scenario.job.cluster, gpus_per_node=1)))
    assert network_sensitivity(apart, plans, 4.0)[PLAIN] < network_sensitivity(apart, plans, 1.0)[PLAIN]
