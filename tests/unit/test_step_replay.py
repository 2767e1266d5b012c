"""The trace file, and traced steps put together from their passes' own times."""

import json

import numpy as np
import pytest

from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.schedule import PipelineShape
from wlb_titan.simulator.trace import COMPUTED, Span, read_trace, replayed_seconds, write_trace


def test_spans_become_complete_events_of_named_tracks(tmp_path):
    spans = [
        Span("before", "pp 0", "F0", 0.0, 0.5, {"tokens": 7}),
        Span("before", "pp 1", "F0", 0.5, 0.25),
        Span("after", "pp 0", "F0", 0.0, 0.125),
    ]
    write_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in complete] == [(0, 5e5), (5e5, 2.5e5), (0, 1.25e5)]
    assert [names["process_name", e["pid"], 0] for e in complete] == ["before", "before", "after"]
    assert [names["thread_name", e["pid"], e["tid"]] for e in complete] == ["pp 0", "pp 1", "pp 0"]
    assert len({e["tid"] for e in complete}) == 3
    assert complete[0]["args"] == {"tokens": 7}


def trace(shape, n, times, slower=1.0):
    """Spans of a step, as a trace has them: each pass as long as it took, its own time as an argument."""
    graph, spans = PipelineGraph(shape, n), []
    for action, end in zip(graph.actions, graph.ends(times)[:, 0], strict=True):
        own = float(times.of(action)[0])
        facts = {"stage": action.stage, COMPUTED: own}
        name = f"{action.kind}{action.place}"
        spans.append(
            Span("dp 0", f"pp {shape.rank_of(action.stage)}", name, slower * end, slower * own, facts)
        )
    return spans, float(graph.ends(times).max())


@pytest.mark.parametrize(
    "shape",
    [
        PipelineShape("1F1B", 2),
        PipelineShape("GPipe", 4),
        PipelineShape("Interleaved1F1B", 2, 2),
        PipelineShape("ZBVZeroBubble", 2, 2),
    ],
    ids=lambda shape: shape.schedule,
)
def test_a_step_on_shared_cores_comes_out_as_on_devices_of_its_own(shape, tmp_path):
    """Every pass took three times its own time: the step is that of its own times, through a file too."""
    times = PassTimes(*np.random.default_rng(0).uniform(1, 4, (3, shape.stages, 8, 1)))
    spans, seconds = trace(shape, 8, times, slower=3.0)
    write_trace(spans, tmp_path / "step.json")
    assert replayed_seconds(read_trace(tmp_path / "step.json")) == pytest.approx(seconds)


def span(name, track, computed, process="dp 0", start=0.0, stage=0):
    return Span(process, track, name, start, 9.0, {"stage": stage, COMPUTED: computed})


def test_losses_belong_to_forward_passes_and_the_slowest_context_parallel_rank_counts():
    spans = [
        *(span("F0", "cp 0", 1.0), span("F0", "cp 1", 2.0)),
        *(span("L0", "cp 0", 0.5, start=1.0), span("B0", "cp 0", 3.0, start=2.0)),
    ]
    assert replayed_seconds(spans) == 2.0 + 0.5 + 3.0


def test_replicas_that_meet_in_every_micro_batch_wait_for_the_slower():
    spans = [
        span(f"FB{i}", "rank", s, f"dp {dp}")
        for dp, own in enumerate([(1, 4), (3, 2)])
        for i, s in enumerate(own)
    ]
    assert replayed_seconds(spans) == 3 + 4


def test_what_has_no_own_time_is_not_put_together():
    assert replayed_seconds([Span("dp 0", "rank", "FB0", 0.0, 1.0, {"stage": 0})]) is None
    assert replayed_seconds([span("R0", "rank", 1.0)]) is None
