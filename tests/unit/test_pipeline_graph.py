"""The dependency graph: its order is torch's, its times are right by hand and by another method."""

import itertools

import numpy as np
import pytest
from planning import PIPELINES, pipeline_name
from torch.distributed.pipelining import schedules

from wlb_titan.errors import PlanError
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.schedule import Action, PipelineShape, check_micro_batches, rank_actions

UNEQUAL = np.array([1.0, 1.0, 4.0])


def times(forward, inputs, weights, stages):
    """The same on every stage, for one step."""
    return PassTimes(
        *(np.tile(np.asarray(t, float)[None, :, None], (stages, 1, 1)) for t in (forward, inputs, weights))
    )


class RecordingStage:
    """A stage that notes the passes it is asked for and communicates with nobody."""

    is_first = is_last = False
    submod = None

    def __init__(self, stage_index, shape):
        self.stage_index = stage_index
        self.num_stages = shape.ranks * shape.chunks
        self.group_rank, self.group_size = stage_index % shape.ranks, shape.ranks
        self.stage_index_to_group_rank = {}
        self.actions = []

    def forward_one_chunk(self, micro_batch, *args, **kwargs):
        self.actions.append(("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch, *args, **kwargs):
        self.actions.append(("B", self.stage_index, micro_batch))

    def get_fwd_recv_ops(self, micro_batch):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def clear_runtime_states(self, *args):
        pass

    release_fwd_send_outputs = perform_reduce_grad = clear_runtime_states


@pytest.mark.parametrize("micro_batches", [1, 4, 6, 8])
@pytest.mark.parametrize("shape", PIPELINES, ids=pipeline_name)
def test_actions_are_those_that_torch_runs(shape, micro_batches):
    kind = schedules.get_schedule_class(shape.schedule)
    letters = {
        schedules.FORWARD: "F",
        schedules.FULL_BACKWARD: "B",
        schedules.BACKWARD_INPUT: "I",
        schedules.BACKWARD_WEIGHT: "W",
    }
    if shape.schedule == "1F1B" and micro_batches < shape.ranks:  # which torch refuses
        with pytest.raises(PlanError, match=f"{micro_batches} for {shape.ranks} stages"):
            check_micro_batches("1F1B", shape.ranks, shape.stages, micro_batches)
        return
    for rank in range(shape.ranks):
        stages = [RecordingStage(stage, shape) for stage in shape.stages_of(rank)]
        if issubclass(kind, schedules.PipelineScheduleSingle):
            schedule = kind(stages[0], micro_batches, loss_fn=lambda output, target: output)
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            schedule.step(arg_mbs=[()] * micro_batches, return_outputs=False)
            expected = stages[0].actions
        else:
            order = kind(stages, micro_batches, loss_fn=lambda output, target: output).pipeline_order[rank]
            expected = [
                (letters[action.computation_type], action.stage_index, action.microbatch_index)
                for action in order
                if action is not None
            ]
        assert list(rank_actions(shape, micro_batches, rank)) == expected


@pytest.mark.parametrize("shape", PIPELINES, ids=pipeline_name)
def test_ends_by_repeated_relaxation(shape):
    """Longest paths found another way: by moving every action later until nothing moves any more."""
    n, random = 4, np.random.default_rng(0)
    durations = PassTimes(*random.lognormal(0.0, 0.8, size=(3, shape.stages, n, 1)))
    delay = random.random((n, 1))
    graph = PipelineGraph(shape, n)
    found = dict(zip(graph.actions, graph.ends(durations, delay)[:, 0], strict=True))

    orders = [list(rank_actions(shape, n, rank)) for rank in range(shape.ranks)]
    edges = [(a, b) for order in orders for a, b in itertools.pairwise(order)]
    for action in found:
        kind, stage, place = action
        if kind == "F" and stage > 0:
            edges.append((Action("F", stage - 1, place), action))
        if kind in "BI":
            source = Action(
                "F" if stage == shape.stages - 1 else kind, min(stage + 1, shape.stages - 1), place
            )
            edges.append((source, action))
        if kind == "W":
            edges.append((Action("I", stage, place), action))
    ends = {action: durations.of(action)[0] for action in found}
    for _ in range(len(found)):
        for source, action in edges:
            crosses = shape.rank_of(source.stage) != shape.rank_of(action.stage)
            ready = ends[source] + crosses * delay[action.place, 0]
            ends[action] = max(ends[action], ready + durations.of(action)[0])
    assert found == pytest.approx(ends)


def test_1f1b_by_hand():
    """Two ranks, forward 1 1 4, backward twice that.

    rank 0: F0 0-1, F1 1-2, B0 4-6, F2 6-10, B1 10-12, B2 22-30
    rank 1:         F0 1-2, B0 2-4, F1 4-5, B1 5-7, F2 10-14, B2 14-22
    """
    graph = PipelineGraph(PipelineShape("1F1B", 2), 3)
    ends = graph.ends(times(UNEQUAL, UNEQUAL, UNEQUAL, 2))[:, 0]
    by_rank = {rank: [] for rank in (0, 1)}
    for action, end in zip(graph.actions, ends, strict=True):
        by_rank[action.stage].append((str(action)[:2], end))
    assert by_rank[0] == [("F0", 1), ("F1", 2), ("B0", 6), ("F2", 10), ("B1", 12), ("B2", 30)]
    assert by_rank[1] == [("F0", 2), ("B0", 4), ("F1", 5), ("B1", 7), ("F2", 14), ("B2", 22)]


SLOW_LAST = times(np.ones(5), np.ones(5), np.zeros(5), 3)
SLOW_LAST.forward[2] = 3.0


@pytest.mark.parametrize(
    ("shape", "durations", "delay", "seconds"),
    [
        # One micro-batch on three ranks: forward 1, backward 2, and 4 hops of half a unit.
        (PipelineShape("GPipe", 3), times([1.0], [1.0], [1.0], 3), 0.5, 3 * 3 + 4 * 0.5),
        # All forwards in a row, the longest through all ranks, and back the same way.
        (PipelineShape("GPipe", 4), times(UNEQUAL, UNEQUAL, UNEQUAL, 4), 0.0, (6 + 3 * 4) * 3),
        # The slow last stage (head and loss) sets the pace: 2 units to reach it, its work, 2 back.
        (
            PipelineShape("1F1B", 3),
            SLOW_LAST,
            0.0,
            2 + 5 * (3 + 1) + 2,
        ),
    ],
    ids=["hops", "longest", "slow last stage"],
)
def test_steps_by_hand(shape, durations, delay, seconds):
    graph = PipelineGraph(shape, durations.forward.shape[1])
    assert graph.ends(durations, delay).max() == seconds


def test_weights_gradients_fill_the_gaps():
    """Zero bubble: with equal F, I and W, two ranks and four micro-batches wait for one unit, 1F1B for three.

    1F1B takes (4 + 1) (1 + 2) = 15. Rank 0 here: F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 with one gap, before I0.
    """
    ones = np.ones(4)
    split = PipelineGraph(PipelineShape("InterleavedZeroBubble", 2, 1), 4)
    whole = PipelineGraph(PipelineShape("1F1B", 2), 4)
    durations = times(ones, ones, ones, 2)
    assert whole.ends(durations).max() == 15
    assert split.ends(durations).max() == 13
    assert split.busy(durations)[:, 0].tolist() == [12, 12]


def test_v_shape_has_no_bubble_when_passes_are_equal():
    """ZBV's promise (Qi et al., section 6): two ranks compute all the time but for the first forward pass."""
    shape = PipelineShape("ZBVZeroBubble", 2, 2)
    ones = np.ones(6)
    graph = PipelineGraph(shape, 6)
    durations = times(ones, ones, ones, 4)
    assert graph.busy(durations)[:, 0].tolist() == [36, 36]
    assert graph.ends(durations).max() == 37


def test_many_steps_at_once():
    shape, random = PipelineShape("1F1B", 4), np.random.default_rng(1)
    both = PassTimes(*random.random((3, 4, 6, 2)))
    graph = PipelineGraph(shape, 6)
    for k in range(2):
        one = PassTimes(both.forward[..., k, None], both.inputs[..., k, None], both.weights[..., k, None])
        assert graph.ends(both)[:, k] == pytest.approx(graph.ends(one)[:, 0])


def test_equal_micro_batches_take_what_the_textbook_says():
    forward, backward = np.full(8, 1.0), np.full(8, 2.0)
    identity = np.arange(8)[None]
    for schedule in ("GPipe", "1F1B"):
        (time,) = PipelineGraph(PipelineShape(schedule, 4), 8).step_times(forward, backward, identity)
        assert time == (8 + 3) * 3.0
    (time,) = PipelineGraph(PipelineShape("Interleaved1F1B", 4, 2), 8).step_times(forward, backward, identity)
    assert time == 8 * 3.0 + 3 * 3.0 / 2


def test_the_example_of_the_module():
    orders = np.array([[0, 1, 2], [2, 0, 1], [0, 2, 1]])
    expected = {"1F1B": [30.0, 30.0, 27.0], "GPipe": [30.0, 30.0, 30.0]}
    for schedule, steps in expected.items():
        graph = PipelineGraph(PipelineShape(schedule, 2), 3)
        assert graph.step_times(UNEQUAL, 2 * UNEQUAL, orders).tolist() == steps


def test_a_circle_is_refused_by_name():
    first = [Action("F", 0, 0), Action("B", 0, 0)]
    with pytest.raises(PlanError, match=r"1F1B wait.*rank 0 at B0 of stage 0, rank 1 at B0 of stage 1"):
        PipelineGraph(PipelineShape("1F1B", 2), 1, [first, [Action("B", 1, 0), Action("F", 1, 0)]])


def test_refusals():
    with pytest.raises(PlanError, match="'DualPipeV'"):
        PipelineGraph(PipelineShape("DualPipeV", 2, 2), 4)
    with pytest.raises(PlanError, match="ZBVZeroBubble runs 2 stages a rank, not 1"):
        PipelineGraph(PipelineShape("ZBVZeroBubble", 2), 4)
    with pytest.raises(PlanError, match="7 micro-batches on 2 ranks in 3 equal rounds"):
        PipelineGraph(PipelineShape("Interleaved1F1B", 2, 2), 7)
