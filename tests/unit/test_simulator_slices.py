"""Steps of MicroPacks: times and memory by hand, and by oracles that go through the passes one by one."""

from dataclasses import replace

import numpy as np
import pytest
from planning import CLUSTER, FULL, MODEL, job
from slicing import PACKINGS, run_through, sliced, slim

from wlb_titan.cost.cluster import Link
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.layers.passes import Loads, pass_times
from wlb_titan.memory.layer import TokenBytes, token_bytes
from wlb_titan.memory.rank import kept_states
from wlb_titan.memory.run import RunArrays, RunPacks
from wlb_titan.packing.predicted import pack_sizes, pass_seconds, passing, regrouped_times
from wlb_titan.packing.slices import piece_numbers
from wlb_titan.pipeline.graph import PassTimes
from wlb_titan.plan import TOTAL, Action, MicroBatch, Plan
from wlb_titan.simulator.replicas import check_slices, rank_memory, step_timeline
from wlb_titan.simulator.step import simulate


def plans(simulated, steps=2):
    lengths = np.random.default_rng(0).integers(4, 65, size=100)
    return simulated.plans(Documents(lengths=lengths), steps)


def two_slices():
    """A document of 10 tokens in slices of 6 and 4 on two ranks."""
    first = MicroBatch(np.array([[0, 0, 6, 0]]), np.array([[0, 10]]), length=6, index=0)
    last = MicroBatch(np.array([[0, 6, 4, 0]]), np.array([[6, 10]]), length=4, index=1)
    order = ("F", 0), ("F", 1), ("B", 1), ("B", 0)
    flow = tuple(tuple(Action(kind, stage, place) for kind, place in order) for stage in range(2))
    return Plan(0, (first, last), 0.0, flows=(flow,))


def test_slices_do_the_work_of_their_document_once_one_after_the_other():
    simulated, plan = job(degrees=Degrees(pipeline=2)), two_slices()
    prediction = simulate(simulated, [plan])
    # Attention: 6 x 7 / 2 pairs and 6 x 4 + 4 x 5 / 2.
    assert passing(plan.packs, simulated).forward[1] == pytest.approx([21 * 2e-6, 34 * 2e-6])
    times = PassTimes(*pass_seconds(simulated, plan.packs)[..., None])
    end = run_through(plan, 2, lambda _, action: float(times.of(action)[0]))
    assert prediction.pipeline[0] == pytest.approx(end)
    assert prediction.flops[0] == pytest.approx(MODEL.flops(np.array([10])))
    assert prediction.longest == 10 and prediction.tokens[0] == 10


def walked(simulated, plan, dp_rank):
    """Bytes of keys and values and of their gradients, by a walk that keeps the size of every tensor: of each
    pipeline rank those during each action without gradients that it makes, the most within each, and those of
    all moments, as a backward pass makes its gradients of prefixes layer by layer."""
    token = TokenBytes.of(simulated.model, simulated.degrees, simulated.memory)
    packs = plan.of_rank(dp_rank)
    numbers = piece_numbers(packs)
    cut = {n for own, m in zip(numbers, packs, strict=True) for n in own[m.slices[:, TOTAL] > m.lengths]}
    for actions in plan.flows[dp_rank]:
        there, during, most, moments = {}, [], [], set()
        for kind, stage, place in actions:
            layers = simulated.layers[stage]
            before = sum(there.values())
            m = packs[place]
            rows = zip(numbers[place], m.lengths, *m.slices.T, strict=True)
            here = [row for row in rows if row[0] in cut]
            for number, length, prefix, total in here:
                if kind == "F":
                    there["keys", stage, number] = total * token.cached * layers
                elif prefix + length == total:
                    there["gradients", stage, number] = prefix * token.cached_gradients * layers
            most.append(sum(there.values()))
            during.append(most[-1] if kind == "F" else before)
            moments |= {most[-1]} if kind == "F" else set(np.linspace(before, most[-1], layers + 1).tolist())
            for number, _, prefix, _ in here if kind == "B" else ():
                if prefix == 0:
                    del there["keys", stage, number], there["gradients", stage, number]
        assert not there
        yield np.array(during), np.array(most), moments


def in_flight(simulated, actions, packs):
    """Bytes of activations after each action, float64 (actions,), without the cache."""
    token, layers = token_bytes(simulated), simulated.layers
    states = [token.hidden * states for states in kept_states(layers)]
    kept = states if simulated.packing.regroups else [token.kept * count for count in layers]
    signs = {"F": 1, "B": -1}
    held = np.cumsum([signs[a.kind] * packs[a.place].length * kept[a.stage] for a in actions])
    assert held[-1] == pytest.approx(0.0, abs=1e-6)
    return held


@pytest.mark.parametrize("name", ["slim", "asymmetric"])
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("schedule, chunks", [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_the_cache_over_time_is_that_of_an_oracle(context, schedule, chunks, name):
    """In every pass; and the peak is a moment that there is, and no less than what stays after any."""
    shape = {"degrees": Degrees(pipeline=2, context=context, shard=2), "schedule": schedule, "chunks": chunks}
    simulated = sliced(replace(PACKINGS[name], micropacks=8, slack=1), **shape)
    for plan in plans(simulated):
        for dp_rank, flow in enumerate(plan.flows):
            packs = pack_sizes(simulated, plan.of_rank(dp_rank))
            peaks = rank_memory(simulated, plan, dp_rank)
            walks = walked(simulated, plan, dp_rank)
            of_ranks = zip(simulated.fitting.pipeline_ranks, flow, peaks, walks, strict=True)
            for rank, actions, peak, (during, most, moments) in of_ranks:
                run = RunArrays(rank, RunPacks(simulated, packs), flow, reduced=False)
                assert run.terms["cache"] == pytest.approx(during)
                assert min(abs(peak.cache - bytes_) for bytes_ in moments) <= 1 and peak.cache > 0
                least = (in_flight(simulated, actions, packs) + most).max()
                assert peak.activations + peak.backward + peak.loss + peak.cache >= least - 4


def test_more_packs_hold_less():
    jobs = [sliced(slim(micropacks=number, slack=1)) for number in (4, 24)]
    few, many = (simulate(one, plans(one)) for one in jobs)
    assert many.peak_memory.activations < few.peak_memory.activations
    assert many.tokens.tolist() == few.tokens.tolist()
    assert many.flops == pytest.approx(few.flops)


@pytest.mark.parametrize("name", ["slim", "asymmetric"])
def test_the_timeline_is_as_long_as_the_step_and_names_slices(name):
    simulated = sliced(replace(PACKINGS[name], micropacks=8))
    (plan,) = plans(simulated, steps=1)
    passes = step_timeline(simulated, plan)
    assert max(one.end for one in passes) == pytest.approx(simulate(simulated, [plan]).pipeline[0])
    tokens = {(kind, m.index): m.length for m in plan.micro_batches for kind in m.passes}
    assert {(one.kind, one.micro_batch): one.facts["tokens"] for one in passes} == tokens
    states = {one.facts["MicroPack"] for one in passes}
    assert "slim" in states and states <= {"slim", "mix", "pack"}
    shown = [one.facts.get("slice", "") for one in passes]
    assert any(own.startswith("0-") for own in shown)
    assert any("," in own for own in shown) == (name == "asymmetric")  # a document's end, another's begin


@pytest.mark.parametrize("one, said", [(0, "F1 of stage 0 before F0"), (2, "B0 of stage 0 before B1")])
def test_an_order_against_the_slices_is_refused(one, said):
    plan = two_slices()
    rank = list(plan.flows[0][0])
    rank[one : one + 2] = reversed(rank[one : one + 2])
    with pytest.raises(PlanError, match=said):
        check_slices((tuple(rank), plan.flows[0][1]), plan.of_rank(0))


def test_the_most_in_flight_fits_and_one_more_does_not():
    def most(memory):
        simulated = job(degrees=Degrees(pipeline=2), micro_batches=1600)
        return simulated.on(replace(simulated.cluster, memory=memory)).fitting.most_in_flight

    step = 1600 * 64
    assert 64 < most(3e7) < step
    assert most(6e7) > 1.5 * most(3e7)
    assert most(1e12) == step
    with pytest.raises(PlanError, match=r"this cannot fit .* of 64 tokens"):
        most(1e4)


def test_regrouping_moves_the_head_into_backward_passes_and_sends_what_they_need():
    """All work once, as under full checkpointing; an all-to-all of each hidden state that a stage keeps."""
    tokens, attention = np.array([[5.0], [3.0]]), np.array([[2e-5], [1e-5]])

    def times(of, node=CLUSTER.node):
        made = {"degrees": Degrees(pipeline=2, context=2), "cluster": replace(CLUSTER, node=node)}
        whole = sliced(PACKINGS["asymmetric"], **made)
        return of(whole, Loads.imagined(whole, tokens, attention, 2.5 * attention))

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


def test_as_much_is_in_flight_as_with_full_checkpointing():
    asymmetric = sliced(PACKINGS["asymmetric"])
    full = sliced(slim(), memory=FULL)
    token = TokenBytes.of(asymmetric.model, asymmetric.degrees, asymmetric.memory)
    (first, last), (other, _) = (whole.fitting.document(64) for whole in (asymmetric, full))
    # Each stage has two layers; token ids are there for both passes.
    assert first.activations == round(2 * 64 * token.inputs + first.tokens * token.hidden)
    assert last.activations == round(2 * 64 * token.inputs + last.tokens * 3 * token.hidden)
    assert first.activations < other.activations
    assert 0.8 * other.total < first.total < other.total
