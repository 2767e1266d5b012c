"""PackFlow: orders that end, keep to what slices need, and are 1F1B where nothing is sliced."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb_titan.packing.slim.flow import in_own_order
from wlb_titan.pipeline.graph import PassTimes, PipelineGraph
from wlb_titan.pipeline.packflow import Packs, packflow
from wlb_titan.pipeline.schedule import PipelineShape, rank_actions


def waits(chains):
    """The order of backward passes of chains of so many packs each, and the last pack of each one's chain."""
    ends = np.cumsum(chains)
    order = [np.arange(end - packs, end)[::-1] for end, packs in zip(ends, chains, strict=True)]
    return np.concatenate(order), np.repeat(ends - 1, chains)


def run(chains, shape, times=None, **settings):
    """The order of passes, whose backward passes are numbered by their packs."""
    order, needed = waits(chains)
    ones = np.ones(len(order))
    times = ones if times is None else np.array(times, dtype=float)
    found = packflow(Packs(times, ones, 2 * times[order], ones, needed.tolist()), shape, **settings)
    return replace(found, flow=in_own_order(found.flow, order))


def most_in_flight(schedule):
    """Packs that a rank has in flight at most."""
    return max(
        int(np.cumsum([1 if action.kind == "F" else -1 for action in rank]).max()) for rank in schedule.flow
    )


def test_the_docstrings_example():
    schedule = run([3, 1, 1], PipelineShape("1F1B", 2))
    assert [" ".join(f"{a.kind}{a.place}" for a in rank) for rank in schedule.flow] == [
        "F0 F1 F2 F3 B2 F4 B1 B0 B3 B4",
        "F0 F1 F2 B2 F3 B1 F4 B0 B3 B4",
    ]


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
    shape = PipelineShape("1F1B" if chunks == 1 else "Interleaved1F1B", ranks, chunks)
    schedule = run(chains, shape, times, slack=slack, limit=limit)
    for rank, actions in enumerate(schedule.flow):
        assert len(actions) == len(set(actions)) == 2 * n * chunks
        for stage in shape.stages_of(rank):
            at = {(a.kind, a.place): i for i, a in enumerate(actions) if a.stage == stage}
            forwards = [a.place for a in actions if a.stage == stage and a.kind == "F"]
            assert forwards == list(range(n))
            for pack in range(n):
                assert at["B", pack] > at["F", needed[pack]]  # all slices of its document are through
                later = pack + 1
                if later < n and needed[pack] == needed[later]:
                    assert at["B", pack] > at["B", later]
    # The same step by the dependency graph, which raises where actions wait in a circle.
    graph = PipelineGraph(shape, n, schedule.flow)
    forward = np.array(times, dtype=float)[:, None]
    ends = graph.ends(PassTimes.equal_stages(forward, 2 * forward, shape))
    assert ends.max() == pytest.approx(schedule.seconds)


@pytest.mark.parametrize("ranks, chunks, n", [(2, 1, 5), (4, 1, 8), (4, 2, 8), (4, 4, 16), (2, 3, 6)])
def test_whole_documents_of_equal_work_are_1f1b(ranks, chunks, n):
    shape = PipelineShape("1F1B" if chunks == 1 else "Interleaved1F1B", ranks, chunks)
    schedule = run([1] * n, shape)
    own = PipelineGraph(shape, n).ends(PassTimes.equal_stages(np.ones((n, 1)), 2 * np.ones((n, 1)), shape))
    assert schedule.seconds == pytest.approx(own.max())
    if chunks == 1:
        assert [list(rank) for rank in schedule.flow] == [
            list(rank_actions(shape, n, r)) for r in range(ranks)
        ]


def test_equal_slices_have_the_bubble_of_1f1b():
    chains = [12, 6, 3] + [1] * 11
    for chunks, bubble in ((1, 9 / 105), (2, 4.5 / 100.5), (4, 2.25 / 98.25)):
        schedule = run(chains, PipelineShape("Interleaved1F1B", 4, chunks))
        assert 1 - 3 * sum(chains) / schedule.seconds == pytest.approx(bubble)


def test_a_limit_holds_but_for_what_a_document_needs():
    free, tight = (run([6, 1, 1, 1, 1, 1, 1], PipelineShape("1F1B", 4), limit=limit) for limit in (None, 1))
    assert most_in_flight(free) == 9
    assert most_in_flight(tight) == 6  # the document's own six packs
    assert tight.seconds > free.seconds
