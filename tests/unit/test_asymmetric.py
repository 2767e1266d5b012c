"""The asymmetric partition: the same tokens in other MicroPacks in forward and in backward passes, and which
rank sends which token from the ones to the others."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import FULL
from slicing import PACKINGS, WINDOW, planner, slim

from wlb_titan.context.layout import sequence_positions
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.workload import cost_model
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.packing.slices import PrefixWork
from wlb_titan.packing.slim.asymmetric import cut_line, token_moves
from wlb_titan.plan import Action
from wlb_titan.simulator.replicas import check_slices

COST = cost_model("quadratic:1,40", None)
APART = PACKINGS["asymmetric"]
documents = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 64)), min_size=1, max_size=20)


def naive_cuts(works, grain, lengths, count):
    """The work before every place where the line may be cut, and of each share the place nearest to it."""
    places, before = [0.0], 0.0
    for length in lengths:
        places += [before + works(min(end, length)) for end in range(grain, length + grain, grain)]
        before = places[-1]
    shares = [before * i / count for i in range(1, count)]
    return places, [min(range(len(places)), key=lambda p: (abs(places[p] - share), -p)) for share in shares]


@given(lengths=documents, count=st.integers(1, 9), grain=st.integers(1, 5))
@settings(max_examples=200)
def test_a_line_is_cut_where_the_shares_are_as_near_as_the_grain_allows(lengths, count, grain):
    lengths = np.array(lengths)
    line = PrefixWork(COST.forward, WINDOW, grain)
    units = int((-(-lengths // grain)).sum())
    if units < count:
        with pytest.raises(PlanError, match=f"cannot be cut into {count} MicroPacks"):
            cut_line(line, lengths, count)
        return
    pieces = cut_line(line, lengths, count)
    assert len(pieces) == count and all(pieces)
    run = np.concatenate([np.array(piece) for piece in pieces])
    assert (np.diff(run[:, 0]) >= 0).all()
    for document, length in enumerate(lengths):
        starts, stops = run[run[:, 0] == document, 1:].T
        assert [*starts, length] == [0, *stops] and (stops[:-1] % grain == 0).all()
    places, nearest = naive_cuts(lambda n: float(COST.forward(np.array([n]))[0]), grain, lengths, count)
    if nearest == sorted(set(nearest)) and nearest[:1] != [0] and nearest[-1:] != [len(places) - 1]:
        # Nothing would be empty, so that every cut can be where it is best.
        found = np.cumsum([sum(-(-(stop - a) // grain) for _, a, stop in piece) for piece in pieces])[:-1]
        shares = places[-1] * np.arange(1, count) / count
        for mine, best, share in zip(found, nearest, shares, strict=True):
            assert abs(places[mine] - share) == pytest.approx(abs(places[best] - share))


def test_the_docstrings_example():
    line = PrefixWork(lambda lengths: np.asarray(lengths, dtype=float) ** 2, 6, 1)
    assert cut_line(line, np.array([6, 4]), 2) == [[(0, 0, 5)], [(0, 5, 6), (1, 0, 4)]]
    assert cut_line(line, np.array([4, 6]), 2) == [[(0, 0, 4), (1, 0, 3)], [(1, 3, 6)]]  # run from its end


def test_both_passes_are_balanced_where_one_packing_balances_neither():
    lengths = np.random.default_rng(1).integers(4, 64, size=200)

    def imbalance(asymmetric):
        packing = slim(micropacks=24, asymmetric=asymmetric, cost_model="simulated")
        degrees = Degrees(pipeline=4)
        return planner(lengths, packing, micro_batches=16, degrees=degrees, memory=FULL).next().imbalance

    assert imbalance(True) < 1.03 < 1.05 < imbalance(False)


def test_a_backward_pass_before_what_it_needs_is_refused():
    plan = planner([64, 50, 10, 10, 10], APART).next()
    packs, ((first, last),) = plan.of_rank(0), plan.flows
    assert check_slices((first, last), packs)[6] > 0  # it waits for slices of a document
    place = next(i for i, action in enumerate(first) if action.kind == "B")
    early = (first[0], first[place], *first[1:place], *first[place + 1 :])
    with pytest.raises(PlanError, match=r"runs B6 of stage 0 before F\d of stage 0, which it needs"):
        check_slices((early, last), packs)
    swap = {Action("B", 1, 6): Action("B", 1, 7), Action("B", 1, 7): Action("B", 1, 6)}
    with pytest.raises(PlanError, match="runs B7 of stage 1 before B6 of stage 1"):
        check_slices((first, tuple(swap.get(action, action) for action in last)), packs)


def share(micro_batch, tensor_ranks, rank):
    """What a rank holds: (document, its token) of each place of its share, None where it is padding."""
    tokens = [(id_, start + i) for id_, start, n, *_ in micro_batch.documents.tolist() for i in range(n)]
    tokens += [None] * micro_batch.padding
    held = np.arange(len(tokens))
    if micro_batch.ranks is not None:
        held = sequence_positions(micro_batch.ranks, micro_batch.lengths, len(tokens))[rank // tensor_ranks]
    own = held.reshape(tensor_ranks, -1)[rank % tensor_ranks]
    return [tokens[place] for place in own]


@pytest.mark.parametrize("context, tensor", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_rank_gets_the_tokens_of_its_share(context, tensor):
    lengths = np.random.default_rng(context + tensor).integers(2, 90, size=40)
    degrees = Degrees(pipeline=2, context=context)
    facts = {"degrees": degrees, "context": STRATEGIES.configure("per_document"), "multiple": tensor}
    planned = planner(lengths, APART, **facts)
    ranks = context * tensor
    for _ in range(2):
        plan = planned.next()
        packs = plan.of_rank(0)
        forward, backward = plan.forward, packs[len(plan.forward) :]
        ways = [token_moves(packs, tensor, rank) for rank in range(ranks)]
        held = [{i: share(m, tensor, rank) for i, m in enumerate(forward)} for rank in range(ranks)]
        for place, m in enumerate(backward):
            arrives = [[] for _ in range(ranks)]  # at each rank, by the ranks that send
            for rank, way in enumerate(ways):
                rows = [token for source in way[place].sources for token in held[rank][source]]
                parts = np.split(way[place].sent, np.cumsum(way[place].sent_counts)[:-1])
                for receiver, own in enumerate(parts):
                    arrives[receiver].append([rows[i] for i in own])
            for rank, way in enumerate(ways):
                assert way[place].received_counts == [len(part) for part in arrives[rank]]
                mine = [None] * (m.length // ranks)
                came = [token for part in arrives[rank] for token in part]
                for where, token in zip(way[place].places.tolist(), came, strict=True):
                    mine[where] = token
                assert mine == share(m, tensor, rank)
                for source in way[place].over:
                    del held[rank][source]
        for own in held:
            assert all(set(left) == {None} for left in own.values())  # padding, which nobody asks for


def test_what_cannot_be_is_named():
    for changes, message in (
        ({"degrees": Degrees()}, "1 pipeline ranks and full"),
        ({"packing": replace(APART, solver="milp")}, "nothing to solve"),
        ({"packing": replace(APART, dp_merge=True)}, "ranks share no packs"),
    ):
        with pytest.raises(PlanError, match=message) as error:
            planner([64, 10, 10, 10], **{"packing": APART, **changes})
        assert error.value.setting == "packing.asymmetric"
