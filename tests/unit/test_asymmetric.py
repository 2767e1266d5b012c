"""The asymmetric partition: the same tokens in other MicroPacks in forward and in backward passes."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import make_planner
from test_simulator import CLUSTER, MODEL, PAIRS, job

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.cost.workload import cost_model
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.memory.layer import MemorySettings, TokenBytes
from wlb_titan.packing.slim.asymmetric import asymmetric, cut_line, regrouped_times
from wlb_titan.packing.slim.slices import PrefixWork, kind, last_needed, piece_numbers
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import LENGTH, PREFIX, TOTAL
from wlb_titan.simulator.replicas import check_slices, replica_graph
from wlb_titan.simulator.step import simulate
from wlb_titan.simulator.timeline import step_timeline
from wlb_titan.summary import rank_imbalance

pytestmark = pytest.mark.slow

COST = cost_model("quadratic:1,40", None)
WINDOW = 64
FULL = MemorySettings(checkpointing="full")
documents = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 64)), min_size=1, max_size=20)


def slim(**settings):
    return Slim.Config(**{"micropacks": 6, "slack": 1, "asymmetric": True, **settings})


def planner(lengths, micro_batches=4, *, packing=None, pipeline=2, **changes):
    facts = {"model": MODEL, "cluster": CLUSTER, "attention": PAIRS, "memory": FULL, **changes}
    return make_planner(
        lengths,
        window=WINDOW,
        micro_batches=micro_batches,
        packing=packing or slim(),
        pipeline_parallel=pipeline,
        seed=7,
        **facts,
    )


def simulated_job(**changes):
    packing = slim(cost_model="quadratic:1,40")
    return job(**{"packing": packing, "micro_batches": 4, "memory": FULL, **changes})


def naive_cuts(works, grain, lengths, count):
    """The work before every place where the line may be cut, and of each share the place nearest to it."""
    places, before = [0.0], 0.0
    for length in lengths:
        places += [before + works(min(end, length)) for end in range(grain, length + grain, grain)]
        before = places[-1]
    shares = [before * i / count for i in range(1, count)]
    return places, [min(range(len(places)), key=lambda p: (abs(places[p] - share), -p)) for share in shares]


@given(lengths=documents, count=st.integers(1, 9), grain=st.integers(1, 5))
@settings(max_examples=200)
def test_a_line_is_cut_where_the_shares_are_as_near_as_the_grain_allows(lengths, count, grain):
    lengths = np.array(lengths)
    line = PrefixWork(COST.forward, WINDOW, grain)
    units = int((-(-lengths // grain)).sum())
    if units < count:
        with pytest.raises(PlanError, match=f"cannot be cut into {count} MicroPacks"):
            cut_line(line, lengths, count)
        return
    pieces = cut_line(line, lengths, count)
    assert len(pieces) == count and all(pieces)
    run = [(document, start, stop) for piece in pieces for document, start, stop in piece]
    for document, length in enumerate(lengths):
        own = [(start, stop) for d, start, stop in run if d == document]
        assert own[0][0] == 0 and own[-1][1] == length
        assert all(end == start and end % grain == 0 for (_, end), (start, _) in itertools.pairwise(own))
    assert [d for d, _, _ in run] == sorted(d for d, _, _ in run)
    places, nearest = naive_cuts(lambda n: float(COST.forward(np.array([n]))[0]), grain, lengths, count)
    if nearest == sorted(set(nearest)) and nearest[:1] != [0] and nearest[-1:] != [len(places) - 1]:
        # Nothing would be empty, so that every cut can be where it is best.
        found = np.cumsum([sum(-(-(stop - a) // grain) for _, a, stop in piece) for piece in pieces])[:-1]
        shares = places[-1] * np.arange(1, count) / count
        for mine, best, share in zip(found, nearest, shares, strict=True):
            assert abs(places[mine] - share) == pytest.approx(abs(places[best] - share))


def test_the_docstrings_example():
    line = PrefixWork(lambda lengths: np.asarray(lengths, dtype=float) ** 2, 6, 1)
    forward, backward = asymmetric(np.array([4, 6]), np.array([16.0, 36.0]), (line, line), 2)
    assert [[tuple(s) for s in pack] for pack in forward] == [[(1, 0, 5)], [(1, 5, 6), (0, 0, 4)]]
    assert [[tuple(s) for s in pack] for pack in backward] == [[(1, 3, 6)], [(1, 0, 3), (0, 0, 4)]]


@given(
    lengths=st.lists(st.integers(2, 150), min_size=8, max_size=30),
    data_parallel=st.sampled_from([1, 2]),
    context_parallel=st.sampled_from([1, 2]),
    chunks=st.sampled_from([1, 2]),
    slack=st.integers(0, 3),
    tokens_in_flight=st.none() | st.integers(1, 100),
)
@settings(max_examples=60)
def test_every_token_goes_forward_once_and_backward_once_and_no_order_waits_for_itself(
    lengths, data_parallel, context_parallel, chunks, slack, tokens_in_flight
):
    planned = planner(
        lengths,
        packing=slim(slack=slack, tokens_in_flight=tokens_in_flight),
        data_parallel=data_parallel,
        context_parallel=context_parallel,
        schedule="1F1B" if chunks == 1 else "Interleaved1F1B",
        chunks=chunks,
    )
    degrees = Degrees(pipeline=2, shard=data_parallel, context=context_parallel)
    whole = simulated_job(degrees=degrees, schedule=planned.policy._job.shape.schedule, chunks=chunks)
    for _ in range(2):
        plan = planned.next()
        json.dumps(plan.to_json())
        for rank in range(data_parallel):
            packs = plan.of_rank(rank)
            forward, backward = packs[:6], packs[6:]
            assert [m.passes for m in packs] == ["F"] * 6 + ["B"] * 6
            numbers = piece_numbers(packs)
            upto, left, totals = {}, {}, {}
            for m, own in zip(forward, numbers, strict=False):
                for piece, row, (prefix, total) in zip(own, m.documents, m.slices, strict=True):
                    assert upto.get(piece, 0) == prefix
                    upto[piece], totals[piece] = prefix + row[LENGTH], total
            for m, own in zip(backward, numbers[6:], strict=True):
                for piece, row, (prefix, total) in zip(own, m.documents, m.slices, strict=True):
                    assert left.get(piece, total) == prefix + row[LENGTH] and totals[piece] == total
                    left[piece] = prefix
            assert upto == totals and left == dict.fromkeys(totals, 0)
            # Raises where passes wait for each other in a circle, or run before what they need.
            graph = replica_graph(whole, plan, rank)
            assert (
                graph.ends(PassTimes.equal_stages(np.ones((12, 1)), np.ones((12, 1)), whole.shape)).max() > 0
            )


def test_both_passes_are_balanced_where_one_packing_balances_neither():
    lengths = np.random.default_rng(1).integers(4, 64, size=200)

    def balance(asymmetric):
        plan = planner(
            lengths, 16, packing=slim(micropacks=24, asymmetric=asymmetric), cost="analytic", pipeline=4
        ).next()
        return plan.imbalance

    assert balance(True) < 1.03 < 1.05 < balance(False)


def test_imbalance_is_of_both_passes():
    plan = planner(np.random.default_rng(1).integers(4, 64, size=200), 16, data_parallel=2).next()
    work = np.array([[m.workload for m in plan.micro_batches if m.passes == kind] for kind in "FB"])
    assert plan.imbalance == pytest.approx(work.max(axis=1).sum() / work.mean(axis=1).sum())
    figures = rank_imbalance(plan, None)
    replicas = work.reshape(2, 2, 6).sum(axis=(0, 2))
    assert figures["imbalance_dp"] == pytest.approx(replicas.max() / replicas.mean())
    assert plan.longest == max(m.length for m in plan.micro_batches)


def test_resumes_where_it_was_saved():
    lengths = np.random.default_rng(0).integers(2, 150, size=40)
    one, again = planner(lengths, data_parallel=2), planner(lengths, data_parallel=2)
    one.next()
    again.load_state_dict(json.loads(json.dumps(one.state_dict(), default=np.ndarray.tolist)))
    expected, plan = one.next().to_json(), again.next().to_json()
    assert plan | {"plan_ms": 0} == expected | {"plan_ms": 0}
    assert [m["passes"] for m in plan["micro_batches"]] == (["F"] * 6 + ["B"] * 6) * 2


def test_a_backward_pass_before_what_it_needs_is_refused():
    plan = planner([64, 50, 10, 10, 10]).next()
    packs = plan.of_rank(0)
    (flow,) = plan.flows
    assert list(check_slices(flow, packs).items()) == list(zip(range(6, 12), last_needed(packs), strict=True))
    assert check_slices(flow, packs)[6] > 0  # the first waits for slices of a document
    first, last = flow
    place = next(i for i, action in enumerate(first) if action.kind == "B")
    early = (first[0], first[place], *first[1:place], *first[place + 1 :])
    with pytest.raises(PlanError, match=r"runs B6 of stage 0 before F\d of stage 0, which it needs"):
        check_slices((early, last), packs)
    backs = [i for i, action in enumerate(last) if action.kind == "B"]
    swapped = list(last)
    swapped[backs[0]], swapped[backs[1]] = swapped[backs[1]], swapped[backs[0]]
    with pytest.raises(PlanError, match="runs B7 of stage 1 before B6 of stage 1"):
        check_slices((first, tuple(swapped)), packs)


def plans(of, steps=2):
    lengths = np.random.default_rng(0).integers(4, 65, size=100)
    planned = of.planner(Documents(lengths=lengths))
    return [planned.next() for _ in range(steps)]


def test_work_is_that_of_full_checkpointing_whatever_the_packs():
    whole = simulated_job(degrees=Degrees(pipeline=2))
    tokens, attention = np.array([[5.0], [3.0]]), np.array([[2e-5], [1e-5]])
    one = MicroBatches.imagined(whole, tokens, attention, 2.5 * attention)
    symmetric, mine = pass_times(whole, one), regrouped_times(whole, one)

    def added(times):
        return sum(x.sum() for x in (times.forward, times.inputs, times.weights))

    assert added(mine) == pytest.approx(added(symmetric))
    assert mine.forward[-1].sum() < symmetric.forward[-1].sum()  # the head runs in backward passes
    assert mine.forward[0] == pytest.approx(symmetric.forward[0])


def test_a_step_is_simulated_as_long_as_its_longest_path():
    whole = simulated_job(degrees=Degrees(pipeline=2))
    (plan,) = plans(whole, 1)
    spans, _ = step_timeline(whole, plan)
    prediction = simulate(whole, [plan])
    assert max(s.start + s.duration for s in spans) == pytest.approx(prediction.pipeline[0])
    shown = {s.name: s.args["tokens"] for s in spans}
    assert shown == {f"{m.passes}{m.index}": m.length for m in plan.micro_batches}
    assert any("," in s.args.get("slice", "") for s in spans)  # the end of one document, and another's begin
    assert {s.args["MicroPack"] for s in spans} <= {"slim", "mix", "pack"}
    assert all(kind(m) for m in plan.micro_batches)


def test_as_much_is_in_flight_as_with_full_checkpointing():
    asymmetric = simulated_job(degrees=Degrees(pipeline=2))
    full = replace(asymmetric, packing=replace(asymmetric.packing, asymmetric=False))
    token = TokenBytes.of(asymmetric.model, asymmetric.degrees, asymmetric.memory)
    (first, last), (other, _) = (whole.fitting.document(WINDOW) for whole in (asymmetric, full))
    # Each stage has two layers; token ids are there for both passes.
    assert first.activations == round(2 * WINDOW * token.inputs + first.tokens * token.hidden)
    assert last.activations == round(2 * WINDOW * token.inputs + last.tokens * 3 * token.hidden)
    assert first.activations < other.activations
    assert 0.8 * other.total < first.total < other.total


@pytest.mark.parametrize(
    "changes, message, setting",
    [
        ({"memory": MemorySettings()}, "beside selective checkpointing", "packing.asymmetric"),
        ({"pipeline": 1}, "there is no pipeline", "packing.asymmetric"),
        ({"packing": slim(solver="milp")}, "has nothing to solve", "packing.solver"),
        ({"packing": slim(dp_merge=True)}, "all documents lie in one line", "packing.dp_merge"),
    ],
)
def test_what_cannot_be_is_named(changes, message, setting):
    with pytest.raises(PlanError, match=message) as error:
        planner([64, 10, 10, 10], **changes).next()
    assert error.value.setting == setting


def test_a_line_too_short_for_the_packs_asked_for_has_fewer():
    plan = planner([64, 10, 10, 10], packing=slim(micropacks=300)).next()
    assert len(plan.micro_batches) == 2 * len(plan.forward) < 600
    assert all(m.length > m.padding for m in plan.micro_batches)


def test_auto_finds_a_number_of_packs():
    lengths = np.random.default_rng(0).integers(2, 64, size=200)
    plan = planner(lengths, packing=slim(micropacks="auto", slack="auto"), pipeline=4).next()
    assert len(plan.micro_batches) == 2 * len(plan.forward) > 16
    backward = [m for m in plan.micro_batches if m.passes == "B"]
    assert sum(m.slices[m.slices[:, PREFIX] == 0, TOTAL].sum() for m in backward) == plan.tokens
