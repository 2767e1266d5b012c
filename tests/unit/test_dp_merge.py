"""DP-Merge: documents that data-parallel ranks share, in plans and in predictions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import CLUSTER, LAYER, pairs
from slicing import PACKINGS, planner, run_through, sliced, slim

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.cluster import Link
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.memory.layer import token_bytes
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.predicted import attention_seconds, pass_seconds, passing
from wlb_titan.packing.slim import dp_merge
from wlb_titan.packing.slim.dp_merge import best_merging, dealt, group_sizes, numbers_of_packs
from wlb_titan.packing.slim.flow import PREDICTED_IN_STEP, Flows
from wlb_titan.pipeline.packflow import packflow
from wlb_titan.plan import ID, LENGTH, PREFIX, TOTAL
from wlb_titan.simulator.replicas import rank_memory, replicas_of, step_passes, step_timeline
from wlb_titan.simulator.step import simulate

ALWAYS, NEVER = PACKINGS["merged"], PACKINGS["slim"]
ONE_LONG = [64] + [8] * 24  # a document of the window, and short ones: a global batch of 4 windows


works_of_documents = st.lists(st.integers(1, 200), min_size=8, max_size=30)


@given(works_of_documents, st.integers(1, 9), st.integers(0, 4), st.sampled_from([0.1, 1.0, 3.0]))
def test_every_document_is_of_one_rank_or_of_one_group(works, ranks, merged, room):
    works = np.array(works, dtype=float)
    merged, capacity = merged if ranks > 1 else 0, room * works.sum() / ranks
    found = dealt(works, ranks, merged, None if room == 1 else capacity)
    everything = np.concatenate([*found.own, [merge.document for merge in found.merges]])
    assert sorted(everything.tolist()) == list(range(len(works))) and len(found.merges) == merged
    loads = np.array([works[own].sum() for own in found.own])
    for merge in found.merges:
        loads[merge.ranks] += works[merge.document] / len(merge.ranks)
        size = len(merge.ranks)
        assert size in group_sizes(ranks) and merge.ranks.start % size == 0 and merge.ranks.stop <= ranks
        fitting = [s for s in group_sizes(ranks) if works[merge.document] <= s * capacity]
        assert size == min(fitting, default=group_sizes(ranks)[-1])
    assert loads == pytest.approx(found.loads)
    assert merged or loads.max() - loads.min() <= works.max()
    sizes = [len(merge.ranks) for merge in found.merges]
    assert sizes == sorted(sizes, reverse=True)  # so that packs of larger groups come first


@given(works=works_of_documents, ranks=st.integers(2, 8))
def test_only_a_document_beyond_the_capacity_makes_ranks_merge(works, ranks):
    works = np.array(works, dtype=float)
    found = best_merging(works, ranks)
    if works.max() <= works.sum() / ranks:
        assert found is None
        return
    assert found.merges[0].document == works.argmax()
    capacity = works.sum() / ranks
    heavy = int((works > capacity / 2).sum())
    assert all(works[merge.document] > capacity / 2 for merge in found.merges)
    others = [dealt(works, ranks, n).loads.max() for n in range(1, min(heavy, dp_merge.MOST_MERGED) + 1)]
    assert found.loads.max() <= max(min(others), capacity) + capacity * dp_merge.LIGHT


def test_packs_of_merged_documents_are_as_heavy_as_others():
    # C = 100, in 10 packs of 10: 60 of a rank's work in 6 packs, and of a group within it 20 in 2.
    works = np.array([240.0, 40.0, *[10.0] * 12])
    found = dealt(works, 4, merged=2)
    assert [len(merge.ranks) for merge in found.merges] == [4, 2]
    assert numbers_of_packs(works, [100, 100], found, 10) == [6, 2]
    assert numbers_of_packs(works, [4, 100], found, 10) == [4, 2]  # no more than it can be cut into


def test_ranks_with_nothing_else_fill_all_their_packs():
    works = np.array([30.0, 1.0, 1.0])
    assert numbers_of_packs(works, [100], dealt(works, 2, merged=1), 5) == [4]
    alone = dealt(np.array([30.0]), 2, merged=1)
    assert numbers_of_packs(np.array([30.0]), [100], alone, 5) == [5]
    with pytest.raises(PlanError, match="cannot be filled"):
        numbers_of_packs(np.array([30.0]), [3], alone, 5)
    with pytest.raises(PlanError, match="without documents"):
        numbers_of_packs(works[:2], [100], dealt(works[:2], 6, merged=1), 5)


def test_what_is_counted_is_the_same_as_without():
    degrees = Degrees(shard=4, context=2, pipeline=2)
    made, without = (planner(ONE_LONG, packing, degrees=degrees, seed=None) for packing in (ALWAYS, NEVER))
    plan, other = made.next(), without.next()
    assert not any(m.merged for m in other.micro_batches)
    merged = [m for m in plan.micro_batches if m.merged]
    assert {m.merged for m in merged} == {range(0, 2)} and len(merged) >= 4
    assert made.labels(plan) == without.labels(other)
    assert sorted(plan.document_lengths) == sorted(other.document_lengths)
    loads, alone = ([sum(m.workload for m in p.of_rank(rank)) for rank in range(4)] for p in (plan, other))
    assert sum(loads) == pytest.approx(sum(alone)) and max(loads) < 0.7 * max(alone)
    record = json.loads(json.dumps(plan.to_json()))["micro_batches"]
    assert [one.get("merged") for one in record] == [list(m.merged) or None for m in plan.micro_batches]
    assert {m.documents[0, ID] for m in merged} == {0}
    assert sum(m.documents[0, LENGTH] for m in plan.packs if m.merged) == 64 == merged[0].slices[0, TOTAL]


@pytest.mark.parametrize("policy", ["ulysses", "own_policies.ulysses_gather:UlyssesGather"])
def test_strategies_that_divide_heads_are_refused_by_name(policy):
    made = {"degrees": Degrees(shard=2, context=2), "context": STRATEGIES.configure(policy)}
    with pytest.raises(PlanError, match=f"cannot share a micro-batch under {policy}, which"):
        planner(ONE_LONG, ALWAYS, **made)
    plan = planner(ONE_LONG, slim(), **made).next()
    assert not any(m.merged for m in plan.micro_batches)


def predicted(packing, *, lengths=ONE_LONG, **changes):
    made = sliced(packing, **{"degrees": Degrees(shard=4, pipeline=2), **changes})
    return made, made.plans(Documents(lengths=np.array(lengths), seed=None), 1)


def test_a_shared_document_by_hand():
    """Two ranks and a document of 8 tokens, of which each has two chunks of 2."""
    node = Link(1e6, 1e-3)
    two_ranks = {"lengths": [8] + [2] * 4, "micro_batches": 2, "window": 8, "degrees": Degrees(shard=2)}
    _, (plan,) = predicted(replace(ALWAYS, micropacks=1), **two_ranks)
    assert not any(m.merged for m in plan.micro_batches)  # the other document would have no pack
    two_ranks["cluster"] = replace(CLUSTER, node=node)
    made, (plan,) = predicted(replace(ALWAYS, micropacks=2), **two_ranks)
    first, last = plan.of_rank(0)
    assert first.merged == range(0, 2) and not last.merged and first.length == 4
    assert plan.of_rank(1)[0].length == 4 and plan.tokens == 16
    times = step_passes(made, plan).times
    # Chunks 0 and 3, or 1 and 2, of 2 tokens each: pairs of queries and keys.
    attention = max(pairs(2) + pairs(8) - pairs(6), pairs(6) - pairs(2)) * 2 * 1e-6
    matrices = 2 * LAYER * 4 / 1e9
    # Received: of 8 tokens half, 2 bytes each.
    received = 8 * made.model.kv_heads * made.model.head_dims / 2 * 2 / node.bandwidth
    layer = matrices + attention + received + node.latency
    assert times.forward[0, 0] == pytest.approx([4 * layer + 2 * 8 * 32 * 4 / 1e9] * 2)


def test_each_rank_of_a_group_has_its_own_share_of_the_attention():
    made, (plan,) = predicted(ALWAYS, degrees=Degrees(shard=4, context=2), lengths=[61] + [8] * 24)
    shared = next(m for m in plan.micro_batches if m.merged and m.padding)
    group = made.by_sharers[shared.sharers]
    everyone = attention_seconds(shared, group)
    assert len(everyone) == 2 * shared.sharers and len(set(everyone[:, 0].tolist())) > 1
    for dp_rank in shared.merged:
        own = plan.of_rank(dp_rank)[shared.index]
        for context_rank in range(2):
            found = passing([own], group, context_rank)
            number = 2 * (dp_rank - shared.merged.start) + context_rank
            assert (found.forward[0, 0], found.backward[0, 0]) == tuple(everyone[number])
    assert passing([shared], group).forward[0, 0] == everyone[:, 0].max()


@pytest.mark.parametrize("replicas, pipeline, seed", [(2, 2, 1), (4, 2, 5), (2, 4, 1)])
def test_ranks_that_share_wait_for_each_other(replicas, pipeline, seed):
    lengths = [64, *np.random.default_rng(seed).integers(2, 40, size=30).tolist()]
    degrees = Degrees(shard=replicas, pipeline=pipeline)
    made, plans = predicted(ALWAYS, lengths=lengths, micro_batches=replicas, degrees=degrees)
    assert any(m.merged for m in plans[0].micro_batches)
    replicas = replicas_of(made, plans[0], step_passes(made, plans[0]))

    def seconds(rank, action):
        return float(replicas[rank].times.of(action)[0])

    def delay(rank, action):
        return replicas[rank].delays[action.place, 0]

    found = simulate(made, plans)
    assert found.pipeline[0] == pytest.approx(run_through(plans[0], pipeline, seconds, delay), rel=1e-6)
    alone = [one.ends(np.zeros(len(one.graph.actions))).max() for one in replicas]
    assert found.pipeline[0] > 1.001 * max(alone)  # had none waited for another
    passes = step_timeline(made, plans[0])
    assert max(one.end for one in passes) == pytest.approx(found.pipeline[0])
    groups = {(m.merged[0], m.merged[-1]) for m in plans[0].of_rank(0) if m.merged}
    passes = step_timeline(made, plans[0], dp_rank=0)
    assert {one.facts.get("merged") for one in passes} == {f"dp {a}-{b}" for a, b in groups} | {None}


def test_auto_shares_where_that_is_predicted_to_be_faster():
    auto = slim()
    fast, plans = predicted(auto)
    alone, without = predicted(NEVER)
    assert any(m.merged for m in plans[0].micro_batches)
    assert simulate(fast, plans).seconds[0] < 0.8 * simulate(alone, without).seconds[0]
    slow = replace(fast.cluster, node=Link(1e3, 1.0), network=Link(1e3, 1.0))
    _, plans = predicted(auto, cluster=slow)
    assert not any(m.merged for m in plans[0].micro_batches)


def test_auto_asks_for_the_times_of_few_packs(monkeypatch):
    """However many data-parallel ranks there are."""
    asked = []

    def counted(job, packs):
        asked.append(len(packs))
        return pass_seconds(job, packs)

    made, (plan,) = predicted(slim())
    monkeypatch.setattr("wlb_titan.packing.slim.flow.pass_seconds", counted)
    flows, packs = Flows(made.ask, made.by_sharers, None), list(plan.packs)
    having = [(number, rank) for number, m in enumerate(packs) for rank in m.merged or [m.dp_rank]]
    packing = Packing(packs, assigned=[[n for n, rank in having if rank == own] for own in range(4)])
    step = flows.timed(packing, PREDICTED_IN_STEP)
    assert len(packs) > PREDICTED_IN_STEP and max(asked) <= PREDICTED_IN_STEP
    exact = flows.timed(packing, len(packs)).forward
    assert step.forward.sum() == pytest.approx(exact.sum(), rel=0.25)
    assert (step.backward > step.forward).all()
    np.testing.assert_array_equal(exact, pass_seconds(made, made.sharded(packs))[0].sum(axis=0))


def test_every_rank_of_the_group_holds_all_keys_and_a_share_of_the_activations():
    made, (plan,) = predicted(ALWAYS, degrees=Degrees(shard=4))
    alone, (other,) = predicted(NEVER, degrees=Degrees(shard=4))
    (shared,) = rank_memory(made, plan, 0)
    peaks = [rank_memory(alone, other, rank)[0] for rank in range(4)]
    whole = max(peaks, key=lambda one: one.cache)
    prefix = max(m.slices[:, PREFIX].max() for m in plan.of_rank(0) if m.merged)
    token = token_bytes(made)
    assert shared.cache == 4 * (64 * token.cached + prefix * token.cached_gradients)
    assert shared.activations < 0.75 * whole.activations


def test_a_step_is_ordered_by_its_slowest_rank_and_by_what_ranks_hold_on_average(monkeypatch):
    asked = []

    def recorded(packs, *rest, **more):
        asked.append(packs)
        return packflow(packs, *rest, **more)

    monkeypatch.setattr("wlb_titan.packing.slim.flow.packflow", recorded)
    made, (plan,) = predicted(ALWAYS)
    held = Flows(made.ask, made.by_sharers, None)._held
    assert 1 == held[1] > held[2] > held[4] > 0.25
    packs = [plan.of_rank(rank) for rank in range(4)]
    forward = np.array([[m.workload for m in own] for own in packs])
    taken = np.array([[held[m.sharers] * m.lengths.sum() for m in own] for own in packs])
    order = np.array([[a.place for a in flow[-1] if a.kind == "B"] for flow in plan.flows])
    backward, freed = (np.take_along_axis(x, order, axis=1) for x in (forward, taken))
    found = asked[-1]
    assert found.tokens == pytest.approx(taken.mean(axis=0))
    assert found.freed == pytest.approx(freed.mean(axis=0))
    for passes, slowest in ((found.forward, forward.max(axis=0)), (found.backward, backward.max(axis=0))):
        assert passes / passes.sum() == pytest.approx(slowest / slowest.sum())
