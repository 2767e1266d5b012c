"""`slim`: documents in slices, shared by data-parallel ranks and MicroPacks."""

import itertools
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import slicing
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from planning import CLUSTER
from slicing import PACKINGS, WINDOW, planner, sliced, slim

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.workload import cost_model, workload
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.mixture import Mixture
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.memory.fits import USABLE_IN_SLICES
from wlb_titan.packing.slices import PrefixWork
from wlb_titan.packing.slim.micropacks import Slots, SolvedPlacing, micropacks, place_greedily
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.simulator.replicas import rank_memory

COST = cost_model("quadratic:1,40", None)
documents = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 64)), min_size=1, max_size=25)


def work(length):
    return workload(COST, np.array([length]))[0] if length else 0.0


@given(length=st.integers(1, 300), grain=st.integers(1, 20), data=st.data())
def test_cuts_come_nearest_to_the_shares_that_the_grain_allows(length, grain, data):
    table = PrefixWork(partial(workload, COST), 300, grain)
    most = -(-length // grain)
    assert table.most_slices(np.array([length])) == [most]
    k = data.draw(st.integers(1, min(most, 6)))
    shares = np.array(data.draw(st.lists(st.integers(1, 9), min_size=k, max_size=k)), dtype=float)
    shares *= work(length) / shares.sum()
    cuts = table.cuts(length, float(table.work_of(np.array([length]))[0]), shares)
    assert len(cuts) == k + 1 and cuts[0] == 0 and cuts[-1] == length
    assert all(a < b for a, b in itertools.pairwise(cuts))
    assert all(cut % grain == 0 for cut in cuts[:-1])
    if k == 2:  # without neighbours that need room the nearest of all places is found
        off = [abs(work(place) - shares[0]) for place in range(grain, length, grain)]
        assert abs(work(cuts[1]) - shares[0]) == pytest.approx(min(off))


@given(lengths=documents, count=st.integers(1, 12), grain=st.integers(1, 4), milp=st.booleans())
@settings(max_examples=60)
def test_micropacks_hold_every_token_once_and_slices_lead(lengths, count, grain, milp):
    lengths = np.array(lengths)
    table = PrefixWork(partial(workload, COST), WINDOW, grain)
    place = SolvedPlacing(0.2, 0.01) if milp else place_greedily
    works = workload(COST, lengths)
    if table.most_slices(lengths).sum() < count:
        with pytest.raises(PlanError, match="cannot be cut into"):
            micropacks(lengths, works, table, count, place)
        return
    packs = micropacks(lengths, works, table, count, place)
    assert len(packs) == count and all(packs)
    for pack in packs:
        assert all(s.stop - s.start == lengths[s.document] for s in pack[1:]), "a slice leads"
    for document, length in enumerate(lengths):
        own = [(i, s.start, s.stop) for i, pack in enumerate(packs) for s in pack if s.document == document]
        places, starts, stops = np.array(own).T
        assert (np.diff(places) == 1).all() and (starts < stops).all()
        assert [*starts, length] == [0, *stops]  # forward passes go from begin to end


def lowest_level(slots, works):
    """Every placing tried."""
    best = np.inf
    for placed in itertools.product(range(len(slots.size)), repeat=len(works)):
        beside = np.bincount(np.array(placed, dtype=int), works, len(slots.size))
        level = (slots.work + beside) / slots.size
        if (beside < level)[slots.size > 1].all():
            best = min(best, level.max())
    return best


@given(
    cut=st.lists(st.tuples(st.integers(20, 60), st.integers(2, 4)), max_size=2),
    alone=st.integers(0, 2),
    works=st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
@settings(max_examples=40)
def test_placing_against_every_placing(cut, alone, works):
    alone += not cut and not alone
    slots = Slots(np.array([w for w, _ in cut] + [0.0] * alone), np.array([k for _, k in cut] + [1] * alone))
    works = np.array(sorted(works, reverse=True), dtype=float)
    best = lowest_level(slots, works)
    (solved, gap), greedy = SolvedPlacing(5.0, 0.0).solved(slots, works), place_greedily(slots, works)

    def level(placed):
        return ((slots.work + np.bincount(placed, works, len(slots.size))) / slots.size).max()

    if solved is None:
        assert best == np.inf
    else:
        assert level(solved) == pytest.approx(best, rel=1e-5)
        assert gap == pytest.approx(0.0, abs=1e-5)
    if greedy is not None:
        assert best - 1e-9 <= level(greedy) <= 2 * best


def test_without_a_pipeline_a_document_goes_backward_as_soon_as_it_can():
    alone = {"micro_batches": 2, "degrees": Degrees()}
    plan = planner([64, 64, 5, 5], slim(micropacks=4, slack=0), seed=None, **alone).next()
    (actions,) = plan.flows[0]
    assert [f"{a.kind}{a.place}" for a in actions] == ["F0", "F1", "B1", "B0", "F2", "F3", "B3", "B2"]


@pytest.mark.parametrize("name", PACKINGS)
@given(
    lengths=st.lists(st.one_of(*[st.integers(4, 12)] * 5, st.integers(30, 150)), min_size=24, max_size=50),
    replicas=st.sampled_from([2, 4]),
    context=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    micropacks=st.integers(4, 6),
    slack=st.integers(0, 3),
    limit=st.none() | st.integers(1, 100),
)
@settings(max_examples=30)
def test_every_token_is_trained_once_and_no_pass_waits_for_ever(
    name, lengths, replicas, context, pipeline, micropacks, slack, limit
):
    ranks, chunks = pipeline
    assume(ranks > 1 or name != "asymmetric")
    packing = replace(PACKINGS[name], micropacks=micropacks, slack=slack, tokens_in_flight=limit)
    degrees = Degrees(shard=replicas, context=context, pipeline=ranks)
    stages = {"schedule": "Interleaved1F1B" if chunks > 1 else "1F1B", "chunks": chunks}
    job = {"micro_batches": replicas, "degrees": degrees, **stages}
    planned = planner([WINDOW, *lengths], packing, seed=None, context=STRATEGIES.configure("hybrid"), **job)
    try:
        plans = [planned.next() for _ in range(2)]
    except PlanError as error:
        assert "documents" in str(error)  # too few tokens for so many ranks
        reject()
    slicing.assert_conserved(planned, plans)
    for plan in plans:
        slicing.assert_sharers_agree(plan)
        if name != "asymmetric":  # which computes the forward pass again
            work = sum(m.workload for m in plan.micro_batches)
            assert work == pytest.approx(workload(COST, plan.document_lengths).sum())
        assert all(m.length % (4 if context == 2 else 1) == 0 for m in plan.packs)
        assert plan.delay == plan.waiting_tokens == 0
        kinds = [[[(a.kind, a.stage) for a in rank] for rank in flow] for flow in plan.flows]
        assert all(own == kinds[0] for own in kinds)
        slicing.run_through(plan, ranks * chunks)


def test_a_plan_of_slices_as_json():
    plan = planner([64, 10, 10, 10], seed=None, micro_batches=2).next().to_json()
    first = plan["micro_batches"][0]["documents"][0]
    assert first["prefix"] == 0 and first["total"] == 64 > first["length"]
    assert plan["order"][0][0][0] == "F0.0" and plan["order"][0][1][0] == "F0.1"
    assert sorted(plan["order"][0][1]) == sorted(f"{kind}{pack}.1" for kind in "FB" for pack in range(6))


def test_auto_takes_more_packs_where_they_shrink_the_bubble():
    lengths = np.random.default_rng(0).integers(2, 64, size=200)
    auto = slim(micropacks="auto", slack="auto")
    alone, deep = (planner(lengths, auto, degrees=Degrees(pipeline=ranks)).next() for ranks in (1, 4))
    assert len(alone.micro_batches) == 4  # without a bubble the fewest
    assert len(deep.micro_batches) > 16
    grouped = replace(auto, asymmetric=True)
    plan = planner(lengths, grouped, degrees=Degrees(pipeline=4)).next()
    assert len(plan.micro_batches) == 2 * len(plan.forward) > 16


def test_fewer_packs_where_there_are_too_few_tokens():
    plan = planner([64, 10, 10, 10], slim(micropacks=300), micro_batches=2).next()
    assert len(plan.micro_batches) == 150 < plan.tokens < 300
    plan = planner([64, 10, 10, 10], slim(micropacks=300, asymmetric=True)).next()
    assert len(plan.micro_batches) == 2 * len(plan.forward) < 600
    assert all(m.length > m.padding for m in plan.micro_batches)
    with pytest.raises(PlanError, match="3 documents of 30 tokens cannot be cut into 31 MicroPacks"):
        micropacks(np.full(3, 10), np.full(3, 10.0), PrefixWork(partial(workload, COST), 64, 1), 31)


def test_a_step_that_does_not_fit_is_packed_again_with_more_packs():
    packing = slim(micropacks=4, slack=0)
    made = sliced(packing, degrees=Degrees())
    documents = Documents(lengths=np.random.default_rng(3).choice([8, 16, 64], 400))

    def planned(usable):
        memory = usable / USABLE_IN_SLICES
        plans = made.on(replace(CLUSTER, memory=memory)).plans(documents, 8)
        peaks = [rank_memory(made, plan, 0)[0].total for plan in plans]
        return peaks, [len(plan.micro_batches) for plan in plans]

    peaks, packs = planned(1e12)
    assert packs == [4] * 8
    *_, bound, _ = sorted(peaks)
    bounded, more = planned(bound)
    assert max(bounded) <= bound < max(peaks)
    assert [b > 4 for b in more] == [peak > bound for peak in peaks]
    packing = replace(packing, tokens_in_flight=4 * WINDOW)  # else memory would refuse the window
    job = replace(made, packing=packing, cluster=replace(CLUSTER, memory=1.0))
    policy = Slim(packing, DocumentStream(Mixture(documents.lengths, seed=0), WINDOW), job.ask)
    with pytest.warns(UserWarning, match=r"Step 1 is predicted not to fit .* needs least.*\npipeline rank 0"):
        first = policy.next()
    with warnings.catch_warnings(action="error"):  # said once
        policy.next()
    assert len(first.packs) > 4


def test_a_solver_is_asked_about_no_more_than_it_can_write_down_in_time(monkeypatch):
    """In size, and in the time of the whole step."""
    from wlb_titan.packing import fixed as milp

    asked = []
    run = milp.Milp.__call__
    monkeypatch.setattr(milp.Milp, "__call__", lambda *a, **k: asked.append(1) or run(*a, **k))
    works = np.sort(np.random.default_rng(0).uniform(1, 2, 40))[::-1]
    slots = Slots(np.zeros(8), np.ones(8, dtype=np.int64))
    solve = SolvedPlacing(100.0, 0.5, placings=1)
    monkeypatch.setattr(milp, "MOST_VARIABLES", 40 * 8 - 1)
    placed, gap = solve.solved(slots, works)
    assert (placed == place_greedily(slots, works)).all() and 0 <= gap < 0.2
    monkeypatch.setattr("wlb_titan.packing.slim.micropacks.time.perf_counter", lambda: 0.0)
    solve.start_step()
    monkeypatch.setattr("wlb_titan.packing.slim.micropacks.time.perf_counter", lambda: 101.0)
    assert (solve(slots, works) == placed).all() and len(asked) == 1
