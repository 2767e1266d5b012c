"""Steps of MicroPacks: times and memory by hand, and by oracles that go through the passes one by one."""

from dataclasses import replace

import numpy as np
import pytest
from test_simulator import MODEL, NONE, job

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.passes import MicroBatches, pass_times
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.memory.layer import MemorySettings, TokenBytes
from wlb_titan.packing.slim.slices import piece_numbers
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.plan import TOTAL, Action, MicroBatch, Plan
from wlb_titan.simulator.replicas import check_slices, rank_memory
from wlb_titan.simulator.step import simulate
from wlb_titan.simulator.timeline import step_timeline

FULL = MemorySettings(checkpointing="full")


def slim(micropacks=8, micro_batches=4, asymmetric=False, **changes):
    packing = Slim.Config(micropacks=micropacks, slack=1, cost_model="quadratic:1,40", asymmetric=asymmetric)
    return job(packing=packing, micro_batches=micro_batches, **changes)


def plans(simulated, steps=2):
    lengths = np.random.default_rng(0).integers(4, 65, size=100)
    planner = simulated.planner(Documents(lengths=lengths))
    return [planner.next() for _ in range(steps)]


def two_slices(first, rest):
    """A document in two slices on two ranks."""
    total = first + rest
    packs = []
    for place, (start, length) in enumerate(((0, first), (first, rest))):
        documents = np.array([[0, start, length, 0]])
        packs.append(MicroBatch(documents, np.array([[start, total]]), length=length, index=place))
    flow = tuple(
        tuple(Action(kind, stage, place) for kind, place in zip("FFBB", (0, 1, 1, 0), strict=True))
        for stage in range(2)
    )
    return Plan(0, tuple(packs), 0.0, flows=(flow,))


def test_a_document_in_two_slices_by_hand():
    simulated = job(degrees=Degrees(pipeline=2), memory=NONE)
    plan = two_slices(6, 4)
    prediction = simulate(simulated, [plan])
    # Attention: 6 x 7 / 2 pairs and 6 x 4 + 4 x 5 / 2; all work once, as of the document of 10.
    attention = np.array([21.0, 34.0]) * 2 * 1e-6
    tokens = np.array([6.0, 4.0])
    packs = (x[:, None] for x in (tokens, attention, 2 * attention))
    times = pass_times(simulated, MicroBatches.imagined(simulated, *packs))
    f, b = times.forward[:, :, 0], (times.inputs + times.weights)[:, :, 0]
    first_done = f[0, 0]
    last = max(first_done + f[1, 0], first_done + f[0, 1]) + f[1, 1]
    back = last + b[1, 1]
    end = max(back + b[1, 0], back + b[0, 1]) + b[0, 0]
    assert prediction.pipeline[0] == pytest.approx(end)
    assert prediction.flops[0] == pytest.approx(MODEL.flops(np.array([10])))
    assert prediction.longest == 10 and prediction.tokens[0] == 10


def oracle_memory(simulated, plan, dp_rank):
    """Most bytes of the cache on every pipeline rank, by a walk that keeps every tensor's size."""
    token = TokenBytes.of(simulated.model, simulated.degrees, simulated.memory)
    packs = plan.of_rank(dp_rank)
    numbers = piece_numbers(packs)
    cut = {n for own, m in zip(numbers, packs, strict=True) for n in own[m.slices[:, TOTAL] > m.lengths]}
    peaks = []
    for actions in plan.flows[dp_rank]:
        held, most = {}, 0.0
        for kind, stage, place in actions:
            pack, own = packs[place], numbers[place]
            layers = simulated.layers[stage]
            here = [
                (n, prefix, length, total)
                for n, length, (prefix, total) in zip(own, pack.lengths, pack.slices, strict=True)
                if n in cut
            ]
            for n, prefix, length, total in here:
                if kind == "F":
                    held["kv", stage, n] = total * token.cached * layers
                elif prefix + length == total:
                    held["gradients", stage, n] = prefix * token.cached_gradients * layers
            most = max(most, sum(held.values()))
            for n, prefix, _, _ in here if kind == "B" else ():
                if prefix == 0:
                    del held["kv", stage, n], held["gradients", stage, n]
        assert not held
        peaks.append(most)
    return peaks


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("schedule, chunks", [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_cache_over_time_against_an_oracle(context, schedule, chunks, asymmetric):
    degrees = Degrees(pipeline=2, context=context, shard=2)
    memory = FULL if asymmetric else NONE
    simulated = slim(asymmetric=asymmetric, degrees=degrees, schedule=schedule, chunks=chunks, memory=memory)
    for plan in plans(simulated):
        for rank in range(2):
            expected = oracle_memory(simulated, plan, rank)
            _, curves = step_timeline(simulated, plan, dp_rank=rank)
            peaks = rank_memory(simulated, plan, rank)
            assert all(0 < peak.cache <= most + 1 for peak, most in zip(peaks, expected, strict=True))
            assert all(curve.bytes_[-1] == pytest.approx(0.0, abs=1e-6) for curve in curves)


def test_more_packs_hold_less():
    few, many = (
        simulate(simulated, plans(simulated))
        for simulated in (slim(m, degrees=Degrees(pipeline=2)) for m in (4, 24))
    )
    assert many.peak_memory.activations < few.peak_memory.activations
    assert many.tokens.tolist() == few.tokens.tolist()
    assert many.flops == pytest.approx(few.flops)


def test_the_timeline_names_slices():
    simulated = slim(degrees=Degrees(pipeline=2))
    (plan,) = plans(simulated, steps=1)
    slices, _ = step_timeline(simulated, plan)
    states = {slice_.args["MicroPack"] for slice_ in slices}
    assert "slim" in states and states <= {"slim", "mix", "pack"}
    assert any(slice_.args.get("slice", "").startswith("0-") for slice_ in slices)


@pytest.mark.parametrize(
    "swapped, message", [((0, 1), "F1 of stage 0 before F0"), ((2, 3), "B0 of stage 0 before B1")]
)
def test_an_order_against_the_slices_is_refused(swapped, message):
    plan = two_slices(6, 4)
    rank = list(plan.flows[0][0])
    one, other = swapped
    rank[one], rank[other] = rank[other], rank[one]
    with pytest.raises(PlanError, match=message):
        check_slices((tuple(rank), plan.flows[0][1]), plan.of_rank(0))


def test_the_most_in_flight_fits_and_one_more_does_not():
    def most(memory):
        simulated = job(degrees=Degrees(pipeline=2), micro_batches=1600)
        return simulated.on(replace(simulated.cluster, memory=memory)).most_in_flight

    step = 1600 * 64
    assert 64 < most(3e7) < step
    assert most(6e7) > 1.5 * most(3e7)
    assert most(1e12) == step
    with pytest.raises(PlanError, match="A document of 64 tokens has all of its slices"):
        most(1e4)
