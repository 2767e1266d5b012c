"""DP-Merge: documents that data-parallel ranks share, in plans and in predictions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from test_pack_slim import planner
from test_simulator import LAYER, NONE, job, pairs

from wlb_titan.context import sequence_positions
from wlb_titan.cost.cluster import Link
from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.packing.policy import Packing
from wlb_titan.packing.predicted import pass_seconds
from wlb_titan.packing.slim.dp_merge import (
    LIGHT,
    MOST_MERGED,
    Merge,
    best_merging,
    dealt,
    group_sizes,
    numbers_of_packs,
)
from wlb_titan.packing.slim.flow import PREDICTED_IN_STEP, Flows
from wlb_titan.packing.slim.slices import sliced_document
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.plan import ID, LENGTH, PREFIX, START, TOTAL
from wlb_titan.simulator.replicas import (
    check_slices,
    planned_times,
    rank_memory,
    replicas_of,
    transfer_seconds,
)
from wlb_titan.simulator.step import simulate
from wlb_titan.simulator.timeline import step_timeline

ALWAYS = Slim.Config(micropacks=6, dp_merge=True)
NEVER = replace(ALWAYS, dp_merge=False)


def one_long(short=8, count=24):
    """A document of the window, and short ones: a global batch of 4 windows."""
    return [64] + [short] * count


# ---- phase 1


def test_the_docstrings_example():
    works = np.array([12.0, 3.0, 3.0, 3.0, 3.0])
    found = best_merging(works, 4)
    assert found.merges == (Merge(0, range(0, 2)),)
    assert [own.tolist() for own in found.own] == [[], [], [1, 3], [2, 4]]
    assert found.loads.tolist() == [6.0] * 4
    assert dealt(works, 4).loads.max() == 12.0


works_of_documents = st.lists(st.integers(1, 200), min_size=8, max_size=30)


@given(works=works_of_documents, ranks=st.integers(1, 9), merged=st.integers(0, 4))
def test_every_document_is_of_one_rank_or_of_one_group(works, ranks, merged):
    works = np.array(works, dtype=float)
    merged = merged if ranks > 1 else 0
    found = dealt(works, ranks, merged)
    everything = np.concatenate([*found.own, [merge.document for merge in found.merges]])
    assert sorted(everything.tolist()) == list(range(len(works))) and len(found.merges) == merged
    loads = np.array([works[own].sum() for own in found.own])
    for merge in found.merges:
        loads[merge.ranks] += works[merge.document] / len(merge.ranks)
        size = len(merge.ranks)
        assert size in group_sizes(ranks) and merge.ranks.start % size == 0 and merge.ranks.stop <= ranks
        fits = works[merge.document] / size <= works.sum() / ranks * (1 + 1e-12)
        assert fits or size == group_sizes(ranks)[-1]
    assert loads == pytest.approx(found.loads)
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
    others = [dealt(works, ranks, n).loads.max() for n in range(1, min(heavy, MOST_MERGED) + 1)]
    assert found.loads.max() <= max(min(others), capacity) + capacity * LIGHT


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


# ---- plans


def run_all(plan, stages_of_rank):
    """Runs the passes of all ranks of the job; a shared pass only where all of its sharers are about to."""
    queues = {
        (dp, pp): list(actions) for dp, flow in enumerate(plan.flows) for pp, actions in enumerate(flow)
    }
    stages = stages_of_rank * len(plan.flows[0])
    done = set()

    def needed(dp, action):
        kind, stage, place = action
        if kind == "F":
            return stage == 0 or (dp, "F", stage - 1, place) in done
        if stage == stages - 1:
            return (dp, "F", stage, place) in done
        return (dp, "B", stage + 1, place) in done

    moved = True
    while moved:
        moved = False
        for (dp, pp), queue in queues.items():
            if not queue:
                continue
            action = queue[0]
            sharers = plan.of_rank(dp)[action.place].merged or [dp]
            if all(
                queues[one, pp] and queues[one, pp][0] == action and needed(one, action) for one in sharers
            ):
                for one in sharers:
                    done.add((one, *queues[one, pp].pop(0)))
                moved = True
    return not any(queues.values())


@given(
    lengths=st.lists(st.one_of(*[st.integers(4, 12)] * 5, st.integers(30, 64)), min_size=24, max_size=50),
    data_parallel=st.sampled_from([2, 3, 4]),
    context=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    micropacks=st.integers(4, 6),
)
@settings(max_examples=40)
def test_plans_have_every_token_once_and_ranks_meet(lengths, data_parallel, context, pipeline, micropacks):
    ranks, chunks = pipeline
    try:
        made = planner(
            [64, *lengths],
            micro_batches=data_parallel,
            seed=None,
            data_parallel=data_parallel,
            context_parallel=context,
            pipeline=ranks,
            schedule="Interleaved1F1B" if chunks > 1 else "1F1B",
            chunks=chunks,
            slim=replace(ALWAYS, micropacks=micropacks),
            sharding="hybrid",
        )
        plans = [made.next(), made.next()]
    except PlanError:  # too few tokens, with or without
        reject()
    assume(any(m.merged for m in plans[0].micro_batches))
    for plan in plans:
        seen = {}
        for m in plan.micro_batches:
            if m.merged:
                assert m.dp_rank in m.merged
                others = [plan.of_rank(rank)[m.index] for rank in m.merged]
                assert all((other.documents == m.documents).all() for other in others)
                assert all(other.merged == m.merged and other.length == m.length for other in others)
                assert m.shared_length - sum(o.padding for o in others) == m.documents[:, LENGTH].sum()
            if m.ranks is not None:
                assert len(m.ranks) == m.sharers * context
                positions = sequence_positions(m.ranks, m.documents[:, LENGTH], m.shared_length)
                assert positions.shape == (len(m.ranks), m.length // context)
                assert sorted(positions.ravel().tolist()) == list(range(m.shared_length))
        for m in plan.packs:
            for row, (prefix, total) in zip(m.documents.tolist(), m.slices.tolist(), strict=True):
                piece = row[ID], row[START] - prefix, total
                assert seen.get(piece, 0) == prefix  # each token once, in order
                seen[piece] = prefix + row[LENGTH]
        assert all(upto == total for (_, _, total), upto in seen.items())
        assert plan.tokens == sum(seen.values()) == plan.document_lengths.sum()
        assert plan.delay == 0
        kinds = [[[(a.kind, a.stage) for a in rank] for rank in flow] for flow in plan.flows]
        assert all(other == kinds[0] for other in kinds)
        for rank, flow in enumerate(plan.flows):
            check_slices(flow, plan.of_rank(rank))
        assert run_all(plan, chunks)


def test_what_is_counted_is_the_same_as_without():
    degrees = {"data_parallel": 4, "context_parallel": 2}
    made, without = (planner(one_long(), **degrees, seed=None, slim=slim) for slim in (ALWAYS, NEVER))
    plan, other = made.next(), without.next()
    assert not any(m.merged for m in other.micro_batches)
    merged = [m for m in plan.micro_batches if m.merged]
    assert {m.merged for m in merged} == {range(0, 2)} and len(merged) >= 4
    assert plan.tokens == other.tokens and made.labels(plan) == without.labels(other)
    assert sorted(plan.document_lengths) == sorted(other.document_lengths)
    whole, alone = (sum(m.workload for m in one.micro_batches) for one in (plan, other))
    assert whole == pytest.approx(alone)
    loads = [sum(m.workload for m in plan.of_rank(rank)) for rank in range(4)]
    without_loads = [sum(m.workload for m in other.of_rank(rank)) for rank in range(4)]
    assert max(loads) < 0.7 * max(without_loads)
    record = json.loads(json.dumps(plan.to_json()))["micro_batches"]
    assert [one.get("merged") for one in record] == [list(m.merged) or None for m in plan.micro_batches]
    (sliced,) = {sliced_document(m) for m in merged}
    assert sum(m.documents[0, LENGTH] for m in plan.packs if m.merged) == 64 == merged[0].slices[0, TOTAL]
    assert sliced >= 0


def test_a_rank_of_the_group_has_the_share_that_it_asks_for():
    plan = planner(one_long(), data_parallel=4, seed=None, slim=ALWAYS).next(sharded=[1])
    shared = [m for m in plan.micro_batches if m.merged]
    assert [m.ranks is not None for m in shared] == [m.dp_rank == 1 for m in shared]
    assert all(m.ranks is None for m in plan.of_rank(1) if not m.merged)  # no context parallelism


def test_resumes_where_it_was_saved():
    made, again = (planner(one_long() * 2, data_parallel=4, seed=3, slim=ALWAYS) for _ in range(2))
    made.next()
    again.load_state_dict(json.loads(json.dumps(made.state_dict(), default=np.ndarray.tolist)))
    following = [one.next().to_json() | {"plan_ms": 0} for one in (made, again)]
    assert following[0] == following[1]


@pytest.mark.parametrize("policy", ["ulysses", "own_policies.ulysses_gather:UlyssesGather"])
def test_strategies_that_divide_heads_are_refused_by_name(policy):
    made = {"data_parallel": 2, "context_parallel": 2, "sharding": policy}
    with pytest.raises(PlanError, match=f"cannot share a document under .* {policy}, which") as error:
        planner(one_long(), slim=ALWAYS, **made)
    assert error.value.setting == "packing.dp_merge"
    plan = planner(one_long(), slim=replace(ALWAYS, dp_merge="auto"), **made).next()
    assert not any(m.merged for m in plan.micro_batches)


# ---- predictions


def predicted(slim, *, data_parallel=4, lengths=(), micro_batches=4, **changes):
    changes = {"degrees": Degrees(shard=data_parallel, pipeline=2), **changes}
    slim = replace(slim, cost_model="quadratic:1,40")
    made = job(packing=slim, micro_batches=micro_batches, **changes)
    lengths = np.array(lengths or one_long())
    return made, made.plans(Documents(lengths=lengths, seed=None), 1)


def test_a_shared_document_by_hand():
    """Two ranks and a document of 8 tokens, of which each has two chunks of 2."""
    slim = Slim.Config(micropacks=1, dp_merge=True)
    node = Link(1e6, 1e-3)
    two_ranks = {
        **{"data_parallel": 2, "lengths": [8] + [2] * 4, "micro_batches": 2, "window": 8},
        **{"degrees": Degrees(shard=2), "cluster": replace(job().cluster, node=node)},
    }
    made, (plan,) = predicted(slim, **two_ranks)
    assert not any(m.merged for m in plan.micro_batches)  # the other document would have no pack
    made, (plan,) = predicted(replace(slim, micropacks=2), **two_ranks)
    first, last = plan.of_rank(0)
    assert first.merged == range(0, 2) and not last.merged and first.length == 4
    assert plan.of_rank(1)[0].length == 4 and plan.tokens == 16
    times, tokens = planned_times(made, plan.micro_batches, 2)
    assert tokens.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    # Chunks 0 and 3, or 1 and 2, of 2 tokens each: pairs of queries and keys.
    attention = max(pairs(2) + pairs(8) - pairs(6), pairs(6) - pairs(2)) * 2 * 1e-6
    matrices = 2 * LAYER * 4 / 1e9
    received = 8 * made.model.key_elements(1) / 2 * 2 / node.bandwidth  # of 8 tokens half, 2 bytes each
    layer = matrices + attention + received + node.latency
    assert times.forward[0, 0] == pytest.approx([4 * layer + 2 * 8 * 32 * 4 / 1e9] * 2)


def joint_ends(made, plan):
    """Every pass of the job run when it can: of shared ones none before all sharers can."""
    times, tokens = planned_times(made, plan.micro_batches, len(plan.of_rank(0)))
    delays = transfer_seconds(made, tokens)
    replicas = replicas_of(made, plan, times, delays)
    ends = {}
    left = [list(range(len(replica.graph.actions))) for replica in replicas]

    def ready(rank, number):
        replica = replicas[rank]
        before, needed, crosses = replica.graph._waits[number]
        delay = replica.delays[replica.graph.actions[number].place, 0] if crosses else 0.0
        return max(
            ends[rank, before - 1] if before else 0.0, (ends[rank, needed - 1] if needed else 0.0) + delay
        )

    while any(left):
        for rank, numbers in enumerate(left):
            for number in list(numbers):
                before, needed, _ = replicas[rank].graph._waits[number]
                if any(n and (rank, n - 1) not in ends for n in (before, needed)):
                    break
                action = replicas[rank].graph.actions[number]
                sharers = replicas[rank].micro_batches[action.place].merged or [rank]
                at = [(one, replicas[one].graph.actions.index(action)) for one in sharers]
                if any(
                    n and (one, n - 1) not in ends for one, i in at for n in replicas[one].graph._waits[i][:2]
                ):
                    break
                begin = max(ready(one, i) for one, i in at)
                for one, i in at:
                    ends[one, i] = begin + float(replicas[one].times.of(action)[0])
                    left[one].remove(i)
    return max(ends.values())


@pytest.mark.parametrize("data_parallel, seed", [(2, 0), (4, 1), (4, 2)])
def test_ranks_that_share_wait_for_each_other(data_parallel, seed):
    random = np.random.default_rng(seed)
    lengths = [64, *random.integers(2, 14, size=40).tolist()]
    made, plans = predicted(ALWAYS, data_parallel=data_parallel, lengths=lengths, micro_batches=data_parallel)
    assert any(m.merged for m in plans[0].micro_batches)
    found = simulate(made, plans)
    assert found.pipeline[0] == pytest.approx(joint_ends(made, plans[0]), rel=1e-6)
    spans, curves = step_timeline(made, plans[0])
    assert max(s.start + s.duration for s in spans) == pytest.approx(found.pipeline[0])
    assert all(curve.bytes_[-1] == pytest.approx(0.0, abs=1e-6) for curve in curves)


def test_the_timeline_names_the_ranks_that_share():
    made, plans = predicted(ALWAYS)
    spans, _ = step_timeline(made, plans[0], dp_rank=0)
    assert {span.args.get("merged") for span in spans} == {"dp 0-1", None}


def test_auto_shares_where_that_is_predicted_to_be_faster():
    auto = replace(ALWAYS, dp_merge="auto")
    fast, plans = predicted(auto)
    alone, without = predicted(NEVER)
    assert any(m.merged for m in plans[0].micro_batches)
    assert simulate(fast, plans).seconds[0] < 0.8 * simulate(alone, without).seconds[0]
    slow = replace(fast.cluster, node=Link(1e3, 1.0), network=Link(1e3, 1.0))
    _, plans = predicted(auto, cluster=slow)
    assert not any(m.merged for m in plans[0].micro_batches)


def test_auto_asks_for_the_times_of_few_packs(monkeypatch):
    """However many data-parallel ranks there are."""
    auto = replace(ALWAYS, dp_merge="auto")
    asked = []

    def counted(job, packs):
        asked.append(len(packs))
        return pass_seconds(job, packs)

    job, plans = predicted(auto)
    monkeypatch.setattr("wlb_titan.packing.slim.flow.pass_seconds", counted)
    flows = Flows(job)
    packs = list(plans[0].packs)
    assigned = [
        [number for number, m in enumerate(packs) if rank in (m.merged or [m.dp_rank])]
        for rank in range(job.degrees.data)
    ]
    packing = Packing(packs, assigned=assigned)
    _, forward, backward = flows.timed(packing, PREDICTED_IN_STEP)
    assert len(packs) > PREDICTED_IN_STEP and max(asked) <= PREDICTED_IN_STEP
    _, exact, _ = flows.timed(packing, len(packs))
    assert forward.sum() == pytest.approx(exact.sum(), rel=0.25)
    assert (backward > forward).all()
    np.testing.assert_array_equal(exact, pass_seconds(job, list(map(job.sharded, packs)))[0].sum(axis=0))


def test_every_rank_of_the_group_holds_all_keys_and_a_share_of_the_activations():
    made, (plan,) = predicted(ALWAYS, memory=NONE, degrees=Degrees(shard=4))
    alone, (other,) = predicted(NEVER, memory=NONE, degrees=Degrees(shard=4))
    (shared,) = rank_memory(made, plan, 0)
    peaks = [rank_memory(alone, other, rank)[0] for rank in range(4)]
    whole = max(peaks, key=lambda one: one.cache)
    prefix = max(m.slices[:, PREFIX].max() for m in plan.of_rank(0) if m.merged)
    token = made.token_bytes
    assert shared.cache == 4 * (64 * token.cached + prefix * token.cached_gradients)
    assert shared.activations < 0.75 * whole.activations


def test_tokens_in_flight_count_the_share_that_memory_takes():
    made, _ = predicted(ALWAYS)
    assert set(made.merged) == {1, 2, 4}
    held = Flows(made)._held
    assert 1 == held[1] > held[2] > held[4] > 0.25
