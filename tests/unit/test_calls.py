"""Calls of all ranks that meet are found to, and each fault in them is found, with the rank that has it."""

import re
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from wlb_titan.files import checked
from wlb_titan.simulator.calls import RECEIVE, SEND, Call, RankCalls, unmet

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")
EDGES = st.booleans()


@st.composite
def jobs(draw):
    """Ranks that do one thing after the other, each with all that take part: all of it meets."""
    ranks = draw(st.integers(2, 5))
    members = st.lists(st.integers(0, ranks - 1), min_size=2, max_size=ranks, unique=True).map(sorted)
    groups = [tuple(range(ranks)), *map(tuple, draw(st.lists(members, max_size=4)))]
    own = {rank: [g for g in range(len(groups)) if rank in groups[g]] for rank in range(ranks)}
    calls = {rank: [] for rank in range(ranks)}
    for number in range(draw(st.integers(1, 25))):
        group = draw(st.integers(0, len(groups) - 1))
        bytes_, place = draw(st.integers(1, 9)), f"line {number}"
        if draw(st.booleans()):
            kind = draw(st.sampled_from(KINDS))
            root = groups[group][-1] if kind == "broadcast" else -1
            received = bytes_ if kind in ("all-reduce", "all-to-all", "broadcast") else 2 * bytes_
            for rank in groups[group]:
                at = own[rank].index(group)
                calls[rank].append(Call(kind, at, bytes_, received, "float32", root, 0, place))
        else:
            one, other = draw(st.permutations(groups[group]))[:2]
            both = draw(st.booleans())  # in both directions, issued together
            for rank, peer in ((one, other), (other, one)):
                at, batch = own[rank].index(group), number + 1 if both else 0
                if both or rank == one:
                    calls[rank].append(Call(SEND, at, bytes_, 0, "float32", peer, batch, place))
                if both or rank == other:
                    calls[rank].append(Call(RECEIVE, at, 0, bytes_, "float32", peer, batch, place))
    made = len(groups) + 1
    return {rank: RankCalls(made, [groups[g] for g in own[rank]], tuple(calls[rank])) for rank in own}


def assert_found(job, rank, edges, calls=None):
    """That `rank` is named, which may have these `calls` instead of its own."""
    if calls is not None:
        job = job | {rank: replace(job[rank], calls=tuple(calls))}
    found = unmet(job, queue_per_edge=edges)
    assert found is not None
    named = ", ".join(re.findall(r"[Rr]anks? (\d+(?:, \d+)*)", found))
    assert str(rank) in named.split(", "), found


@given(jobs(), EDGES)
def test_what_meets_is_found_to_meet_and_survives_json(job, edges):
    assert unmet(job, queue_per_edge=edges) is None
    for own in job.values():
        read = checked(RankCalls, vars(own))
        assert read == replace(own, calls=list(own.calls))


@given(jobs(), EDGES, st.data())
def test_a_group_that_one_rank_does_not_make(job, edges, data):
    rank = data.draw(st.sampled_from(sorted(job)))
    assert_found(job | {rank: replace(job[rank], made=job[rank].made - 1)}, rank, edges)
    others = [number for number, members in enumerate(job[rank].groups) if number]
    assume(others)
    lost = data.draw(st.sampled_from(others))
    groups = [members for number, members in enumerate(job[rank].groups) if number != lost]
    calls = [c._replace(group=c.group - (c.group > lost)) for c in job[rank].calls if c.group != lost]
    assert_found(job | {rank: RankCalls(job[rank].made, groups, calls)}, rank, edges)


@given(jobs(), EDGES, st.data())
def test_a_call_that_one_rank_leaves_out_or_makes_larger(job, edges, data):
    rank = data.draw(st.sampled_from([rank for rank in job if job[rank].calls]))
    place = data.draw(st.integers(0, len(job[rank].calls) - 1))
    before, call, after = job[rank].calls[:place], job[rank].calls[place], job[rank].calls[place + 1 :]
    way = "received" if call.kind == RECEIVE else "sent"
    larger = call._replace(**{way: getattr(call, way) + 1})
    assert_found(job, rank, edges, [*before, *after])
    assert_found(job, rank, edges, [*before, larger, *after])


@given(jobs(), EDGES, st.data())
def test_two_calls_that_one_rank_swaps(job, edges, data):
    """Collectives of one group that differ; in other groups the order of two may not matter."""
    swaps = [
        (rank, place)
        for rank, own in job.items()
        for place, (one, next_) in enumerate(pairwise(own.calls))
        if one.group == next_.group and {SEND, RECEIVE}.isdisjoint({one.kind, next_.kind})
        if one[:-1] != next_[:-1] and not one.kind == next_.kind == "all-to-all"  # known by its totals
    ]
    assume(swaps)
    rank, place = data.draw(st.sampled_from(swaps))
    calls = list(job[rank].calls)
    calls[place : place + 2] = reversed(calls[place : place + 2])
    assert_found(job, rank, edges, calls)


@given(jobs(), EDGES, st.data())
def test_a_send_too_many(job, edges, data):
    rank = data.draw(st.sampled_from(sorted(job)))
    peer = data.draw(st.sampled_from([other for other in job if other != rank]))
    calls = list(job[rank].calls)
    place = data.draw(st.integers(0, len(calls)))
    calls.insert(place, Call(SEND, 0, 99, 0, "float32", peer))
    assert_found(job, rank, edges, calls)


@pytest.mark.parametrize("edges", [False, True])
def test_crossed_sends_wait_for_ever_in_one_queue(edges):
    def own(peer):
        calls = (Call(SEND, 0, 8, 0, "float32", peer), Call(RECEIVE, 0, 0, 8, "float32", peer))
        return RankCalls(1, [(0, 1)], calls)

    found = unmet({0: own(1), 1: own(0)}, queue_per_edge=edges)
    assert (found is None) is edges
    if not edges:
        assert "rank 0 waits for rank 1" in found and "rank 1 waits for rank 0" in found


def test_two_groups_in_two_orders_wait_for_each_other():
    """Which two communicators may do under NCCL, though no call of either is missing."""
    groups = [(0, 1), (0, 1)]
    one, other = (Call("all-reduce", group, 8, 8, "float32", place=f"line {group}") for group in (0, 1))
    job = {0: RankCalls(2, groups, [one, other]), 1: RankCalls(2, groups, [other, one])}
    found = unmet(job, queue_per_edge=True)
    assert "rank 0 waits for rank 1" in found and "line 0" in found and "line 1" in found
