"""Orders of passes: the graph's is torch's, and its times are right by hand and by another method; `best` is
the best order of micro-batches; PackFlow's ends, keeps to what slices need, and is 1F1B without them."""

import itertools
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import make_planner
from torch.distributed.pipelining import schedules

from wlb_titan.errors import PlanError, UserError
from wlb_titan.packing.slim.flow import in_own_order
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.order import ORDERS, arranged, hill, longest_first
from wlb_titan.pipeline.packflow import Packs, packflow
from wlb_titan.pipeline.schedule import Action, PipelineShape, rank_actions

SIZES = {
    "GPipe": [(2, 1), (4, 1)],
    "1F1B": [(2, 1), (4, 1)],
    "Interleaved1F1B": [(2, 2), (4, 2), (2, 3)],
    "InterleavedZeroBubble": [(2, 2), (4, 1), (4, 2)],
    "ZBVZeroBubble": [(2, 2), (4, 2)],
}
SHAPES = [PipelineShape(name, *sizes) for name, several in SIZES.items() for sizes in several]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids="{0.schedule}-{0.ranks}x{0.chunks}".format)


def lone_stage(number, shape):
    """A stage that communicates with nobody."""
    ranks = {"group_rank": number % shape.ranks, "group_size": shape.ranks, "num_stages": shape.stages}
    moves = {f"get_{way}_ops.return_value": [] for way in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send")}
    return MagicMock(stage_index=number, is_first=False, is_last=False, **ranks, **moves)


@pytest.mark.parametrize("micro_batches", [1, 4, 6, 8])
@every_shape
def test_actions_are_those_that_torch_runs(shape, micro_batches):
    if shape.schedule == "1F1B" and micro_batches < shape.ranks:
        return  # which torch refuses
    kind = schedules.get_schedule_class(shape.schedule)
    one_stage = issubclass(kind, schedules.PipelineScheduleSingle)
    calls = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
    for rank in range(shape.ranks):
        stages = [lone_stage(number, shape) for number in shape.stages_of(rank)]
        schedule = kind(stages[0] if one_stage else stages, micro_batches, loss_fn=max)  # never called
        if one_stage:
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            schedule.step(arg_mbs=[()] * micro_batches, return_outputs=False)
            asked = [(calls[name], args[0]) for name, args, _ in stages[0].method_calls if name in calls]
            expected = [(letter, rank, micro_batch) for letter, micro_batch in asked]
        else:
            order = [a for a in schedule.pipeline_order[rank] if a is not None]
            expected = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in order]
        assert list(rank_actions(shape, micro_batches, rank)) == expected


@every_shape
def test_a_step_takes_longer_as_soon_as_an_action_passes_its_slack(shape):
    durations = PassTimes(*np.random.default_rng(1).lognormal(0.0, 0.8, size=(3, shape.stages, 4, 1)))
    graph = PipelineGraph(shape, 4)
    step, slack = graph.ends(durations).max(), graph.slack(durations)
    assert abs(slack.min()) < 1e-9 < slack.max()
    for (kind, *chunk), longer in zip(graph.actions, slack, strict=True):
        term = {"F": "forward", "W": "weights"}.get(kind, "inputs")
        for beyond in (0.0, 0.5):
            times = getattr(durations, term).copy()
            times[*chunk] += longer + beyond
            later = graph.ends(durations._replace(**{term: times})).max()
            assert later == pytest.approx(step + beyond)


@every_shape
def test_ends_by_repeated_relaxation(shape):
    """Longest paths of two steps, found by moving every action later until nothing moves any more."""
    n, random = 4, np.random.default_rng(0)
    durations = PassTimes(*random.lognormal(0.0, 0.8, size=(3, shape.stages, n, 2)))
    delay = random.random((n, 2))
    graph = PipelineGraph(shape, n)
    found = dict(zip(graph.actions, graph.ends(durations, delay), strict=True))
    orders = [list(rank_actions(shape, n, rank)) for rank in range(shape.ranks)]
    edges = [(a, b) for order in orders for a, b in itertools.pairwise(order)]
    for action in found:
        kind, stage, place = action
        if kind == "F" and stage > 0:
            edges.append((Action("F", stage - 1, place), action))
        if kind in "BI":
            last = stage == shape.stages - 1
            edges.append((Action("F", stage, place) if last else Action(kind, stage + 1, place), action))
        if kind == "W":
            edges.append((Action("I", stage, place), action))
    ends = {action: durations.of(action) for action in found}
    for _ in range(len(found)):
        for source, action in edges:
            crosses = shape.rank_of(source.stage) != shape.rank_of(action.stage)
            ready = ends[source] + crosses * delay[action.place]
            ends[action] = np.maximum(ends[action], ready + durations.of(action))
    assert np.stack(list(found.values())) == pytest.approx(np.stack([ends[action] for action in found]))


@pytest.mark.parametrize(
    ("shape", "n", "seconds"),
    [
        (PipelineShape("GPipe", 4), 8, (8 + 3) * 3),
        (PipelineShape("1F1B", 4), 8, (8 + 3) * 3),
        (PipelineShape("1F1B", 2), 4, (4 + 1) * 3),
        (PipelineShape("Interleaved1F1B", 4, 2), 8, 8 * 6 + 3 * 3),
        # F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 on rank 0, with one gap, before I0.
        (PipelineShape("InterleavedZeroBubble", 2, 1), 4, 13),
        # ZBV's promise (Qi et al., section 6): all compute all the time but for the first forward pass.
        (PipelineShape("ZBVZeroBubble", 2, 2), 6, 37),
    ],
)
def test_equal_passes_take_what_the_textbook_says(shape, n, seconds):
    graph, times = PipelineGraph(shape, n), PassTimes(*np.ones((3, shape.stages, n, 1)))
    assert graph.ends(times).max() == seconds
    assert (graph.busy(times) == 3 * n * shape.chunks).all()


def test_circles_schedules_and_numbers_of_micro_batches_without_a_graph_are_refused():
    first = [Action("F", 0, 0), Action("B", 0, 0)]
    with pytest.raises(PlanError, match=r"1F1B wait.*rank 0 at B0 of stage 0, rank 1 at B0 of stage 1"):
        PipelineGraph(PipelineShape("1F1B", 2), 1, [first, [Action("B", 1, 0), Action("F", 1, 0)]])
    with pytest.raises(PlanError, match="'DualPipeV'"):
        PipelineGraph(PipelineShape("DualPipeV", 2, 2), 4)
    with pytest.raises(PlanError, match="ZBVZeroBubble runs 2 stages a rank, not 1"):
        PipelineGraph(PipelineShape("ZBVZeroBubble", 2), 4)
    with pytest.raises(PlanError, match="7 micro-batches on 2 ranks: they do not divide into 3 equal rounds"):
        PipelineGraph(PipelineShape("Interleaved1F1B", 2, 2), 7)


SHAPE = PipelineShape("1F1B", 4)


def drawn(n, seed=0):
    """Times of n micro-batches, some several times as long as others."""
    forward = np.random.default_rng(seed).lognormal(0.0, 0.8, size=n)
    return forward, 2.0 * forward


def ordered(order, forward, backward, shape=SHAPE, **settings):
    return ORDERS.configure(order, **settings).make(shape).places(forward, backward)


def test_simple_orders():
    forward, backward = np.array([2.0, 5.0, 1.0, 5.0]), np.array([4.0, 10.0, 2.0, 10.0])
    shape = PipelineShape("DualPipeV", 2, 2)  # only `best` needs the graph
    assert ordered("as_packed", forward, backward, shape).tolist() == [0, 1, 2, 3]
    assert longest_first(forward, backward).tolist() == [1, 3, 0, 2]
    assert hill(np.array([3, 2, 1, 0])).tolist() == [1, 3, 2, 0]


@every_shape
@pytest.mark.parametrize("n", [4, 8, 16])
def test_best_is_a_permutation_and_no_worse_than_the_others(shape, n):
    forward, backward = drawn(n, seed=n)
    orders = np.stack([ordered(order, forward, backward, shape) for order in ORDERS.names])
    assert all(sorted(order) == list(range(n)) for order in orders.tolist())
    times = PipelineGraph(shape, n).step_times(forward, backward, orders)
    assert times[ORDERS.names.index("best")] == times.min()
    again = ordered("best", forward.copy(), backward.copy(), shape)  # as another rank finds it
    assert again.tolist() == orders[ORDERS.names.index("best")].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_best_finds_the_shortest_step_or_nearly(seed):
    for n, tolerance in ((5, 0.0), (7, 0.01)):
        forward, backward = drawn(n, seed)
        graph = PipelineGraph(SHAPE, n)
        shortest = graph.step_times(forward, backward, np.array(list(itertools.permutations(range(n))))).min()
        found = ordered("best", forward, backward)
        (time,) = graph.step_times(forward, backward, found[None])
        assert shortest <= time <= shortest * (1 + tolerance)


def test_order_matters():
    shape = PipelineShape("1F1B", 8)
    forward, backward = drawn(32)
    orders = [ordered(order, forward, backward, shape) for order in ("as_packed", "best")]
    as_packed, best = PipelineGraph(shape, 32).step_times(forward, backward, np.stack(orders))
    assert best < 0.95 * as_packed


@pytest.mark.parametrize("order", ORDERS.names)
@pytest.mark.parametrize(("ranks", "n"), [(1, 1), (1, 3), (4, 1)])
def test_nothing_to_order(order, ranks, n):
    assert ordered(order, np.ones(n), np.ones(n), PipelineShape("1F1B", ranks)).tolist() == list(range(n))


FORWARD, BACKWARD = drawn(16)
PACKED = [list(range(8)), list(range(8, 16))]  # of two data-parallel ranks


def in_runs(run, order):
    return arranged(ORDERS.configure(order).make(PipelineShape("1F1B", 2)), run, PACKED, FORWARD, BACKWARD)


@pytest.mark.parametrize("order", ORDERS.names)
def test_every_rank_keeps_the_packs_of_each_run(order):
    found = in_runs(4, order)
    for packed, mine in zip(PACKED, found, strict=True):
        assert sorted(mine[:4]) == packed[:4]
        assert sorted(mine[4:]) == packed[4:]
    assert (found == PACKED) == (order == "as_packed")


def test_the_kth_longest_of_every_rank_runs_at_the_same_place():
    first, second = (np.argsort(FORWARD[packs]) for packs in in_runs(8, "best"))
    assert first.tolist() == second.tolist()


def test_orders_that_are_not_there_are_refused():
    with pytest.raises(UserError, match=r"'fastest'.*as_packed"):
        ordered("fastest", np.ones(4), np.ones(4))


@pytest.mark.parametrize("policy", ["plain", "wlb_lazy"])
def test_the_order_of_a_plan(policy):
    def works(order):
        lengths = np.random.default_rng(1).integers(5, 256, 4000)
        degrees = {"data_parallel": 2, "pipeline_parallel": 2, "order": ORDERS.configure(order)}
        planner = make_planner(lengths, window=256, micro_batches=16, packing=policy, **degrees)
        plans = [planner.next() for _ in range(5)]
        return [[m.workload for m in plan.of_rank(rank)] for plan in plans for rank in range(2)]

    packed, best = works("as_packed"), works("best")
    assert list(map(sorted, best)) == list(map(sorted, packed)) and best != packed


def waits(chains):
    """The order of backward passes of chains of so many packs each, and the last pack of each one's chain."""
    ends = np.cumsum(chains)
    order = [np.arange(end - packs, end)[::-1] for end, packs in zip(ends, chains, strict=True)]
    return np.concatenate(order), np.repeat(ends - 1, chains)


def flowing(chains, shape, times=None, **settings):
    """The order of passes, whose backward passes are numbered by their packs."""
    order, needed = waits(chains)
    ones = np.ones(len(order))
    times = ones if times is None else np.array(times, dtype=float)
    found = packflow(Packs(times, ones, 2 * times[order], ones, needed.tolist()), shape, **settings)
    return replace(found, flow=in_own_order(found.flow, order))


def most_in_flight(schedule):
    """Packs that a rank has in flight at most."""
    signs = {"F": 1, "B": -1}
    return max(int(np.cumsum([signs[action.kind] for action in rank]).max()) for rank in schedule.flow)


def test_the_example_of_packflow():
    schedule = flowing([3, 1, 1], PipelineShape("1F1B", 2))
    passes = [" ".join(f"{a.kind}{a.place}" for a in rank) for rank in schedule.flow]
    assert passes == ["F0 F1 F2 F3 B2 F4 B1 B0 B3 B4", "F0 F1 F2 B2 F3 B1 F4 B0 B3 B4"]


@given(
    chains=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    slack=st.integers(0, 3),
    limit=st.none() | st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=200)
def test_no_order_waits_for_itself(chains, ranks, chunks, slack, limit, data):
    n = sum(chains)
    times = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    _, needed = waits(chains)
    shape = PipelineShape("Interleaved1F1B", ranks, chunks)
    schedule = flowing(chains, shape, times, slack=slack, limit=limit)
    for rank, actions in enumerate(schedule.flow):
        assert len(actions) == len(set(actions)) == 2 * n * chunks
        for stage in shape.stages_of(rank):
            at = {(a.kind, a.place): i for i, a in enumerate(actions) if a.stage == stage}
            assert [place for kind, place in at if kind == "F"] == list(range(n))
            for pack, last in enumerate(needed):
                assert at["B", pack] > at["F", last]  # all slices of its document are through
                assert pack == last or at["B", pack] > at["B", pack + 1]
    # The same step by the dependency graph, which raises where actions wait in a circle.
    graph = PipelineGraph(shape, n, schedule.flow)
    forward = np.array(times, dtype=float)[:, None]
    ends = graph.ends(PassTimes.equal_stages(forward, 2 * forward, shape))
    assert ends.max() == pytest.approx(schedule.seconds)


@pytest.mark.parametrize("ranks, chunks, n", [(2, 1, 5), (4, 1, 8), (4, 2, 8), (4, 4, 16), (2, 3, 6)])
def test_whole_documents_of_equal_work_are_1f1b(ranks, chunks, n):
    shape = PipelineShape("1F1B" if chunks == 1 else "Interleaved1F1B", ranks, chunks)
    schedule = flowing([1] * n, shape)
    own = PipelineGraph(shape, n).ends(PassTimes.equal_stages(np.ones((n, 1)), 2 * np.ones((n, 1)), shape))
    assert schedule.seconds == pytest.approx(own.max())
    if chunks == 1:
        for rank, actions in enumerate(schedule.flow):
            assert list(actions) == list(rank_actions(shape, n, rank))


def test_equal_slices_have_the_bubble_of_1f1b():
    chains = [12, 6, 3] + [1] * 11
    for chunks, bubble in ((1, 9 / 105), (2, 4.5 / 100.5), (4, 2.25 / 98.25)):
        schedule = flowing(chains, PipelineShape("Interleaved1F1B", 4, chunks))
        assert 1 - 3 * sum(chains) / schedule.seconds == pytest.approx(bubble)


def test_a_limit_holds_but_for_what_a_document_needs():
    chains, shape = [6, 1, 1, 1, 1, 1, 1], PipelineShape("1F1B", 4)
    free, tight = (flowing(chains, shape, limit=limit) for limit in (None, 1))
    assert most_in_flight(free) == 9
    assert most_in_flight(tight) == 6  # the document's own six packs
    assert tight.seconds > free.seconds
