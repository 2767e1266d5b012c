"""The asymmetric partition: the same tokens in other MicroPacks in forward and in backward passes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import CLUSTER, FULL
from slicing import PACKINGS, WINDOW, planner, sliced, slim

from wlb_titan.cost.cluster import Link
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.cost.workload import cost_model
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.packing.slim.asymmetric import cut_line, regrouped_times
from wlb_titan.packing.slim.slices import PrefixWork, last_needed
from wlb_titan.simulator.replicas import check_slices
from wlb_titan.simulator.step import simulate
from wlb_titan.simulator.timeline import step_timeline

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
    run = [(document, start, stop) for piece in pieces for document, start, stop in piece]
    for document, length in enumerate(lengths):
        own = [(start, stop) for d, start, stop in run if d == document]
        assert own[0][0] == 0 and own[-1][1] == length
        assert all(end == start and end % grain == 0 for (_, end), (start, _) in itertools.pairwise(own))
    assert [d for d, _, _ in run] == sorted(d for d, _, _ in run)
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
        packing = slim(micropacks=24, asymmetric=asymmetric, cost_model="analytic")
        degrees = Degrees(pipeline=4)
        return planner(lengths, packing, micro_batches=16, degrees=degrees, memory=FULL).next().imbalance

    assert imbalance(True) < 1.03 < 1.05 < imbalance(False)


def test_a_backward_pass_before_what_it_needs_is_refused():
    plan = planner([64, 50, 10, 10, 10], APART).next()
    packs = plan.of_rank(0)
    (flow,) = plan.flows
    assert check_slices(flow, packs) == dict(zip(range(6, 12), last_needed(packs).tolist(), strict=True))
    assert check_slices(flow, packs)[6] > 0  # the first waits for slices of a document
    first, last = flow
    place = next(i for i, action in enumerate(first) if action.kind == "B")
    early = (first[0], first[place], *first[1:place], *first[place + 1 :])
    with pytest.raises(PlanError, match=r"runs B6 of stage 0 before F\d of stage 0, which it needs"):
        check_slices((early, last), packs)
    backs = [i for i, action in enumerate(last) if action.kind == "B"]
    swapped = list(last)
    swapped[backs[0]], swapped[backs[1]] = swapped[backs[1]], swapped[backs[0]]
    with pytest.raises(PlanError, match="runs B7 of stage 1 before B6 of stage 1"):
        check_slices((first, tuple(swapped)), packs)


def test_regrouping_moves_the_head_into_backward_passes_and_sends_what_they_need():
    """All work once, as under full checkpointing; an all-to-all of each hidden state that a stage keeps."""
    tokens, attention = np.array([[5.0], [3.0]]), np.array([[2e-5], [1e-5]])

    def times(of, node=CLUSTER.node):
        whole = sliced(APART, degrees=Degrees(pipeline=2, context=2), cluster=replace(CLUSTER, node=node))
        return of(whole, MicroBatches.imagined(whole, tokens, attention, 2.5 * attention))

    symmetric, mine, sent = times(pass_times), times(regrouped_times), times(regrouped_times, Link(1e6, 0.0))
    assert sum(x.sum() for x in mine) == pytest.approx(sum(x.sum() for x in symmetric))
    assert mine.forward[-1].sum() < symmetric.forward[-1].sum()  # the head runs in backward passes
    assert mine.forward[0] == pytest.approx(symmetric.forward[0])
    slower = (sent.inputs - times(pass_times, Link(1e6, 0.0)).inputs)[:, :, 0]
    slower -= (mine.inputs - symmetric.inputs)[:, :, 0]
    # Of 8 elements of 2 bytes each of two ranks holds half of the tokens, and sends half of these; the first
    # of the stages of two layers keeps one state of a token, the last three.
    each = tokens[:, 0] / 2 * 8 * 2 / 2 / 1e6
    assert slower == pytest.approx(np.stack([each, 3 * each]))


def test_a_step_is_simulated_as_long_as_its_longest_path():
    whole = sliced(APART)
    lengths = np.random.default_rng(0).integers(4, 65, size=100)
    (plan,) = whole.plans(Documents(lengths=lengths), 1)
    spans = step_timeline(whole, plan)
    assert max(s.start + s.duration for s in spans) == pytest.approx(simulate(whole, [plan]).pipeline[0])
    shown = {s.name: s.args["tokens"] for s in spans}
    assert shown == {f"{m.passes}{m.index}": m.length for m in plan.micro_batches}
    assert any("," in s.args.get("slice", "") for s in spans)  # the end of one document, and another's begin


def test_as_much_is_in_flight_as_with_full_checkpointing():
    asymmetric = sliced(APART)
    full = replace(asymmetric, packing=replace(asymmetric.packing, asymmetric=False))
    token = TokenBytes.of(asymmetric.model, asymmetric.degrees, asymmetric.memory)
    (first, last), (other, _) = (whole.fitting.document(WINDOW) for whole in (asymmetric, full))
    # Each stage has two layers; token ids are there for both passes.
    assert first.activations == round(2 * WINDOW * token.inputs + first.tokens * token.hidden)
    assert last.activations == round(2 * WINDOW * token.inputs + last.tokens * 3 * token.hidden)
    assert first.activations < other.activations
    assert 0.8 * other.total < first.total < other.total


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"degrees": Degrees()}, "1 pipeline ranks and full"),
        ({"packing": replace(APART, solver="milp")}, "nothing to solve"),
        ({"packing": replace(APART, dp_merge=True)}, "no place for packs that ranks share"),
    ],
)
def test_what_cannot_be_is_named(changes, message):
    with pytest.raises(PlanError, match=message) as error:
        planner([64, 10, 10, 10], **{"packing": APART, **changes})
    assert error.value.setting == "packing.asymmetric"
