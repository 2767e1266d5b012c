"""What layers recompute, chosen by the walk: it fits the device, and repeats little more than it must."""

from dataclasses import replace

import numpy as np
import pytest
from highspy import Highs
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import CLUSTER, job

from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.memory.fits import usable_share
from wlb_titan.memory.layer import MemorySettings
from wlb_titan.memory.mix import Moments, kinds_of_layers, mixed, unmixed
from wlb_titan.memory.rank import Moment, PackSize, Passes
from wlb_titan.memory.recompute import KINDS
from wlb_titan.packing import POLICIES
from wlb_titan.simulator.replicas import peak_memory

MODEL = replace(PAPER_MODELS["550M"], layers=8)
AS_NEEDED = MemorySettings(checkpointing="as_needed")
LAYOUTS = {
    "alone": Degrees(shard=2),
    "one_gpu": Degrees(),
    "pipeline": Degrees(pipeline=2, shard=2),
    "all": Degrees(pipeline=2, context=2, tensor=2),
}
SLICED = [name for name in LAYOUTS if name != "alone"]


def sized(degrees, lengths=(8192, 4096, 2048, 8192), schedule="1F1B", chunks=1, **facts):
    """A job on devices that hold anything, and a run of micro-batches of these lengths."""
    facts = {"model": MODEL, "memory": AS_NEEDED, "window": 8192, **facts}
    made = job(
        cluster=replace(CLUSTER, memory=1e13), degrees=degrees, schedule=schedule, chunks=chunks, **facts
    )
    return made, Passes([PackSize(length) for length in lengths])


def counts_of(moments, random):
    """Layers of each kind by chunk, drawn at random."""
    return np.array([random.multinomial(n, np.ones(len(KINDS)) / len(KINDS)) for n in moments.layers])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(64, 16384), min_size=4, max_size=6))
@settings(deadline=None, max_examples=30)
def test_the_walk_holds_no_less_than_following_every_layer(layout, seed, lengths):
    """And hardly more, where nothing but the layers' own memory depends on the layer."""
    degrees = LAYOUTS[layout]
    made, run = sized(degrees, lengths)
    for number in range(degrees.pipeline):
        rank = made.packing.rank_memory(made, number)
        moments = Moments.of(rank, run, reduced=False)
        counts = counts_of(moments, np.random.default_rng(seed))
        mixes = np.zeros((len(lengths), len(made.layers), len(KINDS)), dtype=np.int64)
        mixes[:, rank.stages] = counts.reshape(len(rank.stages), -1, len(KINDS)).swapaxes(0, 1)
        packs = [pack._replace(mix=mix) for pack, mix in zip(run.packs, mixes, strict=True)]
        exact = rank.peak(run._replace(packs=packs), reduced=False).total
        held = moments.bytes_of(counts).max() + rank.at(Moment(), 0.0, 0).total
        assert held >= exact - 10
        if degrees.pipeline > 1:
            assert held <= 1.05 * exact


def program(moments, seconds, room):
    """The fewest repeated seconds of any mix, if layers could be divided and passes made least."""
    highs = Highs()
    highs.silent()
    chunks, kinds = moments.kept.shape
    number = [[highs.addVariable(lb=0) for _ in range(kinds)] for _ in range(chunks)]
    for own, layers in zip(number, moments.layers.tolist(), strict=True):
        highs.addConstr(highs.qsum(own) == layers)
    least = np.where(moments.forward, *moments.made[:2].min(axis=2)[:, moments.own])
    for base, there in zip((moments.base + least).tolist(), moments.in_flight, strict=True):
        chosen = np.flatnonzero(there)
        held = [number[c][k] * float(moments.kept[c, k]) for c in chosen for k in range(kinds)]
        highs.addConstr(highs.qsum(held) <= room - base)
    repeated = seconds.tolist()
    highs.minimize(highs.qsum(number[c][k] * repeated[c][k] for c in range(chunks) for k in range(kinds)))
    return highs.getObjectiveValue()


@pytest.mark.parametrize("schedule,chunks", [("1F1B", 1), ("Interleaved1F1B", 2)])
@given(lengths=st.lists(st.integers(4096, 32768), min_size=8, max_size=8), share=st.floats(0.25, 0.95))
@settings(deadline=None, max_examples=40)
def test_a_mix_fits_and_repeats_little_more_than_the_programs_optimum(schedule, chunks, lengths, share):
    made, run = sized(Degrees(pipeline=4), lengths, schedule, chunks, model=replace(MODEL, layers=64))
    moments = Moments.of(made.packing.rank_memory(made, 0), run, reduced=False)
    every = np.diag(np.ones(len(KINDS), dtype=np.int64))[:, None] * moments.layers[:, None]
    none, *_, full = (moments.bytes_of(counts).max() for counts in every)
    room = full + share * (none - full)
    seconds = np.array([0.0, 1.0, 3.0, 8.0]) * np.tile(lengths, len(moments.layers) // len(lengths))[:, None]
    chunks = len(moments.layers)
    counts = mixed(moments, unmixed(moments, np.ones(chunks, dtype=bool)), seconds, np.zeros(chunks), room)
    assert (counts.sum(axis=1) == moments.layers).all() and (counts >= 0).all()
    assert moments.bytes_of(counts).max() <= room + 1
    most = float((seconds[:, -1] * moments.layers).sum())
    assert (counts * seconds).sum() <= program(moments, seconds, room) + 0.12 * most


def test_chunks_without_a_choice_keep_what_they_had():
    made, run = sized(Degrees(pipeline=2))
    moments = Moments.of(made.packing.rank_memory(made, 0), run, reduced=False)
    free = np.array([True, False, True, False])
    counts = mixed(moments, unmixed(moments, free), np.arange(4.0) * np.ones((4, 1)), np.zeros(4), 0.0)
    names = [kind.name for kind in KINDS]
    assert counts[~free].tolist() == [[0, 0, MODEL.layers // 2, 0]] * 2 and names[2] == "selective"
    assert counts[free].tolist() == [[0, 0, 0, MODEL.layers // 2]] * 2  # as little as may be, and too much


def test_chunks_for_which_nothing_waits_repeat_first():
    made, run = sized(Degrees(pipeline=4), [8192] * 4, model=replace(MODEL, layers=64))
    moments = Moments.of(made.packing.rank_memory(made, 0), run, reduced=False)
    begin = unmixed(moments, np.ones(4, dtype=bool))
    room = float(moments.bytes_of(begin).max() - 8 * moments.kept[0, 0])
    for waiting in range(3):  # the last one's own backward pass is the fullest moment
        slack = np.zeros(4)
        slack[waiting] = 1e9
        counts = mixed(moments, begin.copy(), np.array([0.0, 1.0, 3.0, 8.0]) * np.ones((4, 1)), slack, room)
        assert np.flatnonzero(counts[:, 1:].sum(axis=1)).tolist() == [waiting]


def test_layers_that_keep_most_go_backward_first():
    mix = np.array([[1, 0, 2, 0], [2, 1, 0, 1]])
    assert kinds_of_layers(mix) == ("selective", "selective", "none", "full", "keys", "none", "none")


@pytest.mark.parametrize(
    ("policy", "schedule", "chunks"),
    [("plain", "1F1B", 1), ("plain", "Interleaved1F1B", 2), ("wlb_lazy", "1F1B", 1), ("slim", "1F1B", 1)],
)
def test_steps_fit_devices_between_what_the_kinds_take(policy, schedule, chunks):
    random = np.random.default_rng(0)
    documents = Documents(lengths=np.clip(random.lognormal(7.5, 1.2, 4000), 16, 8192).astype(int))
    made, _ = sized(
        Degrees(pipeline=2, shard=2),
        schedule=schedule,
        chunks=chunks,
        micro_batches=16,
        packing=POLICIES.configure(policy),
        multiple=8,
    )

    def peak(plans, **changes):
        return max(rank.total for rank in peak_memory(replace(made, **changes), plans))

    def under(kind):
        return replace(made, memory=MemorySettings(checkpointing=kind))

    none, full = (
        peak(under(kind).plans(documents, 2), memory=under(kind).memory) for kind in ("none", "full")
    )
    for share in (0.3, 0.8):
        usable = full + share * (none - full)
        cluster = replace(CLUSTER, memory=usable / usable_share(policy == "slim"))
        plans = made.on(cluster).plans(documents, 3)
        assert 0.9 * usable < peak(plans) <= usable
        kinds = {name for plan in plans for m in plan.micro_batches for name in kinds_of_layers(m.mix)}
        assert len(kinds) > 1
