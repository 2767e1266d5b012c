"""The order of micro-batches: the graph is torch's, its times are right, and `best` is the best."""

import itertools

import numpy as np
import pytest

from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.pipeline_order import (
    ORDERS,
    PipelineGraph,
    PipelineShape,
    hill,
    order_micro_batches,
    rank_passes,
)

SHAPES = [
    PipelineShape("GPipe", 2),
    PipelineShape("GPipe", 4),
    PipelineShape("1F1B", 2),
    PipelineShape("1F1B", 4),
    PipelineShape("Interleaved1F1B", 2, 2),
    PipelineShape("Interleaved1F1B", 4, 2),
    PipelineShape("Interleaved1F1B", 2, 3),
]


def name(shape):
    return f"{shape.schedule}-{shape.ranks}x{shape.chunks}"


def drawn(n, seed=0):
    """Times of n micro-batches, some several times as long as others."""
    forward = np.random.default_rng(seed).lognormal(0.0, 0.8, size=n)
    return forward, 2.0 * forward


class RecordingStage:
    """A stage that notes the passes it is asked for and communicates with nobody."""

    is_first = is_last = False
    submod = None

    def __init__(self, stage_index, shape):
        self.stage_index = stage_index
        self.num_stages = shape.ranks * shape.chunks
        self.group_rank, self.group_size = stage_index % shape.ranks, shape.ranks
        self.stage_index_to_group_rank = {}
        self.passes = []

    def forward_one_chunk(self, micro_batch, *args, **kwargs):
        self.passes.append((False, self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch, *args, **kwargs):
        self.passes.append((True, self.stage_index, micro_batch))

    def get_fwd_recv_ops(self, micro_batch):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def clear_runtime_states(self, *args):
        pass

    release_fwd_send_outputs = perform_reduce_grad = clear_runtime_states


@pytest.mark.parametrize("micro_batches", [4, 6, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_passes_are_those_that_torch_runs(shape, micro_batches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = schedules.get_schedule_class(shape.schedule)
    letters = {schedules.FORWARD: False, schedules.FULL_BACKWARD: True}
    for rank in range(shape.ranks):
        stages = [RecordingStage(rank + chunk * shape.ranks, shape) for chunk in range(shape.chunks)]
        if issubclass(kind, schedules.PipelineScheduleSingle):
            schedule = kind(stages[0], micro_batches, loss_fn=lambda output, target: output)
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            schedule.step(arg_mbs=[()] * micro_batches, return_outputs=False)
            expected = stages[0].passes
        else:
            actions = kind(stages, micro_batches, loss_fn=lambda output, target: output).pipeline_order[rank]
            expected = [
                (letters[action.computation_type], action.stage_index, action.microbatch_index)
                for action in actions
                if action is not None
            ]
        assert list(rank_passes(shape, micro_batches, rank)) == expected


def step_time(shape, forward, backward, order):
    """The same graph evaluated by hand: a clock a rank, and a table of when each pass ended."""
    stages = shape.ranks * shape.chunks
    todo = [list(rank_passes(shape, len(order), rank)) for rank in range(shape.ranks)]
    clock, ended = [0.0] * shape.ranks, {}
    while any(todo):
        for rank, passes in enumerate(todo):
            while passes:
                is_backward, stage, place = passes[0]
                if is_backward:
                    needed = (True, stage + 1, place) if stage + 1 < stages else (False, stage, place)
                else:
                    needed = (False, stage - 1, place)
                if stage > 0 or is_backward:
                    if needed not in ended:
                        break
                    clock[rank] = max(clock[rank], ended[needed])
                times = backward if is_backward else forward
                clock[rank] += times[order[place]] / shape.chunks
                ended[passes.pop(0)] = clock[rank]
    return max(clock)


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_step_times(shape):
    forward, backward = drawn(8)
    orders = np.stack([np.random.default_rng(seed).permutation(8) for seed in range(5)])
    expected = [step_time(shape, forward, backward, order) for order in orders]
    assert PipelineGraph(shape, 8).step_times(forward, backward, orders) == pytest.approx(expected)


def test_equal_micro_batches_take_what_the_textbook_says():
    forward, backward = np.full(8, 1.0), np.full(8, 2.0)
    identity = np.arange(8)[None]
    for schedule in ("GPipe", "1F1B"):
        (time,) = PipelineGraph(PipelineShape(schedule, 4), 8).step_times(forward, backward, identity)
        assert time == (8 + 3) * 3.0
    (time,) = PipelineGraph(PipelineShape("Interleaved1F1B", 4, 2), 8).step_times(forward, backward, identity)
    assert time == 8 * 3.0 + 3 * 3.0 / 2


def test_the_example_of_the_module():
    forward = np.array([1.0, 1.0, 4.0])
    orders = np.array([[0, 1, 2], [2, 0, 1], [0, 2, 1]])
    times = {
        s: PipelineGraph(PipelineShape(s, 2), 3).step_times(forward, 2 * forward, orders)
        for s in ("1F1B", "GPipe")
    }
    assert times["1F1B"].tolist() == [30.0, 30.0, 27.0]
    assert times["GPipe"].tolist() == [30.0, 30.0, 30.0]


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
    orders = np.stack([order_micro_batches(order, forward, backward, shape) for order in ORDERS])
    assert all(sorted(order) == list(range(n)) for order in orders.tolist())
    times = PipelineGraph(shape, n).step_times(forward, backward, orders)
    assert times[ORDERS.index("best")] == times.min()


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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 3])
def test_nothing_to_order(order, n):
    work = np.ones(n)
    assert order_micro_batches(order, work, work, PipelineShape("1F1B", 1)).tolist() == list(range(n))
    if n == 1:
        assert order_micro_batches(order, work, work, PipelineShape("GPipe", 4)).tolist() == [0]


def test_refusals():
    work = np.ones(4)
    with pytest.raises(PlanError, match=r"'fastest'.*as_packed"):
        order_micro_batches("fastest", work, work, PipelineShape("1F1B", 2))
    with pytest.raises(PlanError, match="ZBVZeroBubble"):
        order_micro_batches("best", work, work, PipelineShape("ZBVZeroBubble", 2, 2))
