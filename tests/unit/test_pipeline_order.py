"""The order of micro-batches: `best` is the best, and the same on every rank."""

import itertools

import numpy as np
import pytest

from wlb_titan.errors import PlanError, UserError
from wlb_titan.pipeline.order import (
    ORDERS,
    PipelineGraph,
    PipelineShape,
    hill,
)

SHAPES = [
    PipelineShape("GPipe", 2),
    PipelineShape("GPipe", 4),
    PipelineShape("1F1B", 2),
    PipelineShape("1F1B", 4),
    PipelineShape("Interleaved1F1B", 2, 2),
    PipelineShape("Interleaved1F1B", 4, 2),
    PipelineShape("Interleaved1F1B", 2, 3),
    PipelineShape("InterleavedZeroBubble", 2, 2),
    PipelineShape("ZBVZeroBubble", 2, 2),
]


def name(shape):
    return f"{shape.schedule}-{shape.ranks}x{shape.chunks}"


def drawn(n, seed=0):
    """Times of n micro-batches, some several times as long as others."""
    forward = np.random.default_rng(seed).lognormal(0.0, 0.8, size=n)
    return forward, 2.0 * forward


def order_micro_batches(order, forward, backward, shape, **settings):
    return ORDERS.configure(order, **settings).make(shape).places(forward, backward)


def test_simple_orders():
    forward, backward = np.array([2.0, 5.0, 1.0, 5.0]), np.array([4.0, 10.0, 2.0, 10.0])
    shape = PipelineShape("DualPipeV", 2, 2)  # only `best` needs the graph
    expected = {"as_packed": [0, 1, 2, 3], "longest_first": [1, 3, 0, 2], "shortest_first": [2, 0, 1, 3]}
    for order, permutation in expected.items():
        assert order_micro_batches(order, forward, backward, shape).tolist() == permutation
    assert hill(np.array([3, 2, 1, 0])).tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("n", [4, 6, 8, 16])
def test_best_is_a_permutation_and_no_worse_than_the_others(shape, n):
    forward, backward = drawn(n, seed=n)
    orders = np.stack([order_micro_batches(order, forward, backward, shape) for order in ORDERS.names])
    assert all(sorted(order) == list(range(n)) for order in orders.tolist())
    times = PipelineGraph(shape, n).step_times(forward, backward, orders)
    assert times[ORDERS.names.index("best")] == times.min()


@pytest.mark.parametrize("seed", range(5))
def test_best_finds_the_shortest_step_or_nearly(seed):
    shape = PipelineShape("1F1B", 4)
    for n, tolerance in ((5, 0.0), (7, 0.01)):
        forward, backward = drawn(n, seed)
        graph = PipelineGraph(shape, n)
        shortest = graph.step_times(forward, backward, np.array(list(itertools.permutations(range(n))))).min()
        found = order_micro_batches("best", forward, backward, shape, budget_ms=20.0)
        (time,) = graph.step_times(forward, backward, found[None])
        assert shortest <= time <= shortest * (1 + tolerance)


def test_order_matters_with_1f1b():
    shape = PipelineShape("1F1B", 4)
    forward, backward = drawn(16)
    orders = np.stack([order_micro_batches(o, forward, backward, shape) for o in ("as_packed", "best")])
    as_packed, best = PipelineGraph(shape, 16).step_times(forward, backward, orders)
    assert best < 0.95 * as_packed


def test_every_rank_finds_the_same_order():
    forward, backward = drawn(24)
    shape = PipelineShape("1F1B", 4)
    first = order_micro_batches("best", forward, backward, shape)
    assert all(
        np.array_equal(first, order_micro_batches("best", forward.copy(), backward.copy(), shape))
        for _ in range(3)
    )


def test_a_larger_budget_is_used_and_never_worse():
    shape = PipelineShape("1F1B", 8)
    graph = PipelineGraph(shape, 32)
    forward, backward = drawn(32)
    orders = [order_micro_batches("best", forward, backward, shape, budget_ms=ms) for ms in (0.0, 3.0, 100.0)]
    times = graph.step_times(forward, backward, np.stack(orders))
    assert times[0] >= times[1] > times[2]


@pytest.mark.parametrize("order", ORDERS.names)
@pytest.mark.parametrize("n", [1, 3])
def test_nothing_to_order(order, n):
    work = np.ones(n)
    assert order_micro_batches(order, work, work, PipelineShape("1F1B", 1)).tolist() == list(range(n))
    if n == 1:
        assert order_micro_batches(order, work, work, PipelineShape("GPipe", 4)).tolist() == [0]


def test_refusals():
    work = np.ones(4)
    with pytest.raises(UserError, match=r"'fastest'.*as_packed"):
        order_micro_batches("fastest", work, work, PipelineShape("1F1B", 2))
    with pytest.raises(PlanError, match="DualPipeV"):
        order_micro_batches("best", work, work, PipelineShape("DualPipeV", 2, 2))
