"""Heads in groups: what their exchange hides behind attention, and which number `auto` takes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import PAIRS, job

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.cluster import Link
from wlb_titan.cost.models import ModelShape
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.layers.groups import COLLECTIVE, hidden
from wlb_titan.packing.predicted import pass_seconds, passing

MODEL = ModelShape(layers=2, hidden=64, heads=16, kv_heads=8, head_dim=4, feed_forward=64, vocabulary=128)
seconds = st.floats(1e-6, 10)


@given(attention=seconds, exchange=seconds, groups=st.integers(1, 8))
def test_hidden_seconds_are_those_of_two_streams(attention, exchange, groups):
    """One stream exchanges and one attends, group after group; backward passes exchange what was attended."""
    for first, second in ((exchange, attention), (attention, exchange)):
        ready = end = 0.0
        for _ in range(groups):
            ready += first / groups
            end = max(end, ready) + second / groups
        beside = hidden(np.array(attention), np.array(exchange), np.array(groups), units=10**9)
        assert attention + exchange - beside == pytest.approx(end, rel=1e-6)


def test_a_collective_takes_multiprocessors_from_attention():
    """Attention beside it ends later by what it takes: a quarter of twice as many, all of as many."""
    for units, share in ((4 * COLLECTIVE, 0.75), (COLLECTIVE, 0.0)):
        assert hidden(np.array(100.0), np.array(8.0), np.array(2), units) == pytest.approx(share * 4)


def divided(groups, latency=0.0, **changes):
    context = STRATEGIES.configure("per_document", groups=groups)
    cluster = replace(job().cluster, node=Link(1e6, latency))
    attention = replace(PAIRS, heads=16, group=2, units=10 * COLLECTIVE)
    facts = {"model": MODEL, "degrees": Degrees(context=2), "context": context, "attention": attention}
    return job(cluster=cluster, **{**facts, **changes})


def planned(one, steps=1):
    documents = Documents(lengths=np.array([64, 40, 24] * 16), name="test", seed=0)
    return [m for plan in one.plans(documents, steps) for m in plan.micro_batches]


def test_passes_are_shorter_by_what_is_hidden():
    one, two = divided(1, 1e-5), divided(2, 1e-5)
    alone, grouped = planned(one), planned(two)
    assert {m.groups for m in alone} == {1} and {m.groups for m in grouped} == {2}
    packs = passing(alone, one)
    latency = replace(one.latency, heads=8)  # of a group
    apart = np.array([2 * latency.seconds(m.ranks).max(axis=0) for m in grouped]).T
    together = np.array([one.latency.seconds(m.ranks).max(axis=0) for m in alone]).T
    beside = np.minimum(apart, 0.9 * (packs.moving + 2 * packs.latency)) / 2
    longer = apart - together + packs.latency - beside
    found = pass_seconds(two, grouped) - pass_seconds(one, alone)
    np.testing.assert_allclose(found[:2, 0], MODEL.layers * longer, atol=1e-12)
    assert not found[2].any() and (found[:2] < 0).all()


def test_auto_takes_the_fastest_number_for_each_micro_batch():
    """Several where launches cost nothing, one where they cost more than anything hidden."""
    assert 1 not in {m.groups for m in planned(divided("auto"))}
    assert {m.groups for m in planned(divided("auto", 1.0))} == {1}
    between = [planned(divided(n, 2e-6)) for n in (1, 2, 4, 8)]
    chosen = planned(divided("auto", 2e-6))
    totals = [pass_seconds(divided(1, 2e-6), own).sum(axis=(0, 1)) for own in between]
    best = pass_seconds(divided("auto", 2e-6), chosen).sum(axis=(0, 1))
    np.testing.assert_allclose(best, np.min(totals, axis=0))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="3 groups of heads cannot be made of the 8 key heads") as refused:
        divided(3)
    assert refused.value.setting == "context.groups"
    assert divided(2, degrees=Degrees(context=2, tensor=4)).strategy.groups == [2]
