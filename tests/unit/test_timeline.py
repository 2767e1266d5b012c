"""The trace file."""

import json

from wlb_titan.simulator.trace import Span, write_trace


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
