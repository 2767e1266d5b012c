"""The order of micro-batches: `best` is the best, and the same on every rank; runs keep their packs."""

import itertools

import numpy as np
import pytest
from planning import PIPELINES, make_planner, pipeline_name

from wlb_titan.errors import PlanError, UserError
from wlb_titan.pipeline.graph import PipelineGraph
from wlb_titan.pipeline.order import ORDERS, arranged, hill
from wlb_titan.pipeline.schedule import PipelineShape

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
    expected = {"as_packed": [0, 1, 2, 3], "longest_first": [1, 3, 0, 2], "shortest_first": [2, 0, 1, 3]}
    for order, permutation in expected.items():
        assert ordered(order, forward, backward, shape).tolist() == permutation
    assert hill(np.array([3, 2, 1, 0])).tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize("shape", PIPELINES, ids=pipeline_name)
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
        found = ordered("best", forward, backward, budget_ms=20.0)
        (time,) = graph.step_times(forward, backward, found[None])
        assert shortest <= time <= shortest * (1 + tolerance)


def test_order_matters_and_a_larger_budget_finds_a_better_one():
    shape = PipelineShape("1F1B", 8)
    forward, backward = drawn(32)
    orders = [ordered("as_packed", forward, backward, shape)]
    orders += [ordered("best", forward, backward, shape, budget_ms=ms) for ms in (0.0, 3.0, 100.0)]
    as_packed, none, little, much = PipelineGraph(shape, 32).step_times(forward, backward, np.stack(orders))
    assert none >= little > much
    assert little < 0.95 * as_packed


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


@pytest.mark.parametrize("order", ["longest_first", "shortest_first", "best"])
def test_the_kth_longest_of_every_rank_runs_at_the_same_place(order):
    first, second = (np.argsort(FORWARD[packs]) for packs in in_runs(8, order))
    assert first.tolist() == second.tolist()


def test_refusals():
    work = np.ones(4)
    with pytest.raises(UserError, match=r"'fastest'.*as_packed"):
        ordered("fastest", work, work)
    with pytest.raises(PlanError, match="DualPipeV"):
        ordered("best", work, work, PipelineShape("DualPipeV", 2, 2))


@pytest.mark.parametrize("policy", ["plain", "wlb_lazy"])
def test_the_order_of_a_plan(policy):
    def works(order):
        lengths = np.random.default_rng(1).integers(5, 256, 4000)
        degrees = {"data_parallel": 2, "pipeline_parallel": 2, "order": ORDERS.configure(order)}
        planner = make_planner(lengths, window=256, micro_batches=16, packing=policy, **degrees)
        plans = [planner.next() for _ in range(5)]
        return [[m.workload for m in plan.of_rank(rank)] for plan in plans for rank in range(2)]

    packed = works("as_packed")
    longest, shortest, best = map(works, ("longest_first", "shortest_first", "best"))
    assert longest == [sorted(run, reverse=True) for run in packed]
    assert shortest == [sorted(run) for run in packed]
    assert list(map(sorted, best)) == shortest != best
