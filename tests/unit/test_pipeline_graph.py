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


def test_many_steps_at_once():
    shape, random = PipelineShape("1F1B", 4), np.random.default_rng(1)
    both = PassTimes(*random.random((3, 4, 6, 2)))
    graph = PipelineGraph(shape, 6)
    for k in range(2):
        one = PassTimes(both.forward[..., k, None], both.inputs[..., k, None], both.weights[..., k, None])
        assert graph.ends(both)[:, k] == pytest.approx(graph.ends(one)[:, 0])


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
    ids=lambda value: pipeline_name(value) if isinstance(value, PipelineShape) else "",
)
def test_equal_passes_take_what_the_textbook_says(shape, n, seconds):
    graph, times = PipelineGraph(shape, n), PassTimes(*np.ones((3, shape.stages, n, 1)))
    assert graph.ends(times).max() == seconds
    assert (graph.busy(times) == 3 * n * shape.chunks).all()


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
