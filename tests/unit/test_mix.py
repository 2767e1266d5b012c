"""What layers recompute, chosen by the walk: it fits the device, and repeats little more than it must."""

from dataclasses import replace

import numpy as np
import pytest
from highspy import Highs
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import CLUSTER, FULL, NONE, job

from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.layers.recompute import KINDS, MemorySettings
from wlb_titan.memory.fits import fullest, usable_share
from wlb_titan.memory.layer import token_bytes
from wlb_titan.memory.mix import kinds_of_layers, mixed
from wlb_titan.memory.rank import PackSize, Passes
from wlb_titan.memory.run import RunArrays, RunPacks
from wlb_titan.packing import POLICIES
from wlb_titan.simulator.replicas import peak_memory
from wlb_titan.simulator.step import simulate

MODEL = replace(PAPER_MODELS["550M"], layers=8)
AS_NEEDED = MemorySettings(as_needed=True)
LAYOUTS = {
    "alone": Degrees(shard=2),
    "one_gpu": Degrees(),
    "pipeline": Degrees(pipeline=2, shard=2),
    "all": Degrees(pipeline=2, context=2, tensor=2),
}
LENGTHS = np.clip(np.random.default_rng(0).lognormal(7.5, 1.2, 4000), 16, 8192).astype(int)
DOCUMENTS = Documents(lengths=LENGTHS)


def sized(degrees, lengths=(8192, 4096, 2048, 8192), schedule="1F1B", chunks=1, **facts):
    """A job on devices that hold anything, and a run of micro-batches of these lengths."""
    facts = {"model": MODEL, "memory": AS_NEEDED, "window": 8192, **facts}
    made = job(
        cluster=replace(CLUSTER, memory=1e13), degrees=degrees, schedule=schedule, chunks=chunks, **facts
    )
    return made, Passes([PackSize(length) for length in lengths])


def arrays(made, run, number=0):
    """A pipeline rank's run, without a mix."""
    return RunArrays(made.fitting.pipeline_ranks[number], RunPacks(made, run.packs), run.flow, reduced=False)


def test_a_stage_without_layers_keeps_its_ends_alone():
    """Six layers on the eight stages of four ranks: the first and the last have none."""
    layers = (0, 1, 1, 1, 1, 1, 1, 0)
    facts = {"model": replace(MODEL, layers=6), "stage_layers": layers, "memory": NONE}
    made, run = sized(Degrees(pipeline=4), [8192] * 8, "ZBVZeroBubble", 2, **facts)
    first, second, *_ = made.fitting.peak(run)
    assert (first.layers, second.layers) == (0, 2)
    token = token_bytes(made)
    assert first.backward == 0 < first.loss  # it is fullest in the loss
    assert first.activations < 8 * 8192 * (token.inputs + 4 * token.hidden)
    assert second.backward == 8192 * token.backward


def test_as_needed_is_selective_where_memory_is_not_known():
    """In times, too; where it is known nothing is repeated as long as nothing has to be."""

    def figures(kind, settings):
        made, _ = sized(Degrees(pipeline=2, context=2), memory=settings, multiple=8)
        made = made.on(replace(made.cluster, kind=kind))
        step = simulate(made, made.plans(DOCUMENTS, 1))
        assert kind == "gpu" or step.kinds == {"selective": 1.0}
        return step.seconds.tolist(), made.cost_model.backward(np.array([4096])).tolist()

    unknown, selective = figures("cpu", AS_NEEDED), figures("gpu", MemorySettings())
    assert unknown == selective != figures("gpu", NONE) == figures("gpu", AS_NEEDED)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(64, 16384), min_size=4, max_size=6))
@settings(deadline=None, max_examples=30)
def test_a_change_of_one_chunk_is_that_of_the_whole(layout, seed, lengths):
    """And the peak's terms are those of the fullest pass."""
    made, run = sized(LAYOUTS[layout], lengths)
    random = np.random.default_rng(seed)
    for number in range(made.degrees.pipeline):
        rank = arrays(made, run, number)
        counts = np.array([random.multinomial(n, np.ones(len(KINDS)) / len(KINDS)) for n in rank.layers])
        bytes_ = rank.bytes_of(counts)
        assert rank.peak(counts).total == pytest.approx(
            bytes_.max() + made.fitting.pipeline_ranks[number].still.total, abs=8
        )
        chunk = int(random.integers(len(counts)))
        changed = counts.copy()
        changed[chunk] = random.permutation(counts[chunk])
        before, after = (rank.parts(each[[chunk]], chunk) for each in (counts, changed))
        assert bytes_ + (after - before)[0] == pytest.approx(rank.bytes_of(changed))


def program(run_of, seconds, room):
    """The fewest repeated seconds of any mix, if layers could be divided and passes made least."""
    highs = Highs()
    highs.silent()
    chunks, kinds = run_of.kept.shape
    number = [[highs.addVariable(lb=0) for _ in range(kinds)] for _ in range(chunks)]
    for own, layers in zip(number, run_of.layers.tolist(), strict=True):
        highs.addConstr(highs.qsum(own) == layers)
    for base, there in zip(run_of.there.tolist(), run_of.in_flight, strict=True):
        chosen = np.flatnonzero(there)
        held = [number[c][k] * float(run_of.kept[c, k]) for c in chosen for k in range(kinds)]
        highs.addConstr(highs.qsum(held) <= room - base)
    repeated = seconds.tolist()
    highs.minimize(highs.qsum(number[c][k] * repeated[c][k] for c in range(chunks) for k in range(kinds)))
    return highs.getObjectiveValue()


@pytest.mark.parametrize("schedule,chunks", [("1F1B", 1), ("Interleaved1F1B", 2)])
@given(lengths=st.lists(st.integers(4096, 32768), min_size=8, max_size=8), share=st.floats(0.25, 0.95))
@settings(deadline=None, max_examples=40)
def test_a_mix_fits_and_repeats_little_more_than_the_programs_optimum(schedule, chunks, lengths, share):
    made, run = sized(Degrees(pipeline=4), lengths, schedule, chunks, model=replace(MODEL, layers=64))
    run_of = arrays(made, run)
    every = np.diag(np.ones(len(KINDS), dtype=np.int64))[:, None] * run_of.layers[:, None]
    none, *_, full = (run_of.bytes_of(counts).max() for counts in every)
    room = full + share * (none - full)
    seconds = np.array([0.0, 1.0, 3.0, 8.0]) * np.tile(lengths, len(run_of.layers) // len(lengths))[:, None]
    chunks = len(run_of.layers)
    counts = mixed(run_of, seconds, np.zeros(chunks), room)
    assert (counts.sum(axis=1) == run_of.layers).all() and (counts >= 0).all()
    assert run_of.bytes_of(counts).max() <= room + 1
    most = float((seconds[:, -1] * run_of.layers).sum())
    assert (counts * seconds).sum() <= program(run_of, seconds, room) + 0.12 * most


def test_chunks_without_a_choice_keep_what_they_had():
    """Those that data-parallel ranks share."""
    made, run = sized(Degrees(pipeline=2, shard=2), [8192] * 2, packing=POLICIES.configure("slim"))
    packs = [pack._replace(sharers=sharers) for pack, sharers in zip(run.packs, (2, 1), strict=True)]
    chosen = arrays(made, run._replace(packs=packs))
    counts = mixed(chosen, np.arange(4.0) * np.ones((2, 1)), np.zeros(2), 0.0)
    shared, free = ({kind.name: n for kind, n in zip(KINDS, of, strict=True) if n} for of in counts.tolist())
    assert shared == {"selective": MODEL.layers // 2}
    assert free == {"full": MODEL.layers // 2}  # as little as may be, and too much


def test_chunks_for_which_nothing_waits_repeat_first():
    made, run = sized(Degrees(pipeline=4), [8192] * 4, model=replace(MODEL, layers=64))
    run_of = arrays(made, run)
    room = float(run_of.bytes_of(run_of.counts(0)).max() - 8 * run_of.kept[0, 0])
    for waiting in range(3):  # the last one's own backward pass is the fullest moment
        slack = np.zeros(4)
        slack[waiting] = 1e9
        counts = mixed(run_of, np.array([0.0, 1.0, 3.0, 8.0]) * np.ones((4, 1)), slack, room)
        assert np.flatnonzero(counts[:, 1:].sum(axis=1)).tolist() == [waiting]


def test_layers_that_keep_most_go_backward_first():
    mix = np.array([[1, 0, 2, 0], [2, 1, 0, 1]])
    assert kinds_of_layers(mix) == ("selective", "selective", "none", "full", "keys", "none", "none")


@pytest.mark.parametrize(
    ("policy", "schedule", "chunks"),
    [("plain", "1F1B", 1), ("plain", "Interleaved1F1B", 2), ("wlb_lazy", "1F1B", 1), ("slim", "1F1B", 1)],
)
def test_steps_fit_devices_between_what_the_kinds_take(policy, schedule, chunks):
    made, _ = sized(
        Degrees(pipeline=2, shard=2),
        schedule=schedule,
        chunks=chunks,
        micro_batches=16,
        packing=POLICIES.configure(policy, **{"micropacks": 32, "slack": 0} if policy == "slim" else {}),
        multiple=8,
    )

    def peak(plans, **changes):
        return fullest(peak_memory(replace(made, **changes), plans)).total

    def under(kind):
        return replace(made, memory=MemorySettings(checkpointing=kind))

    none, full = (
        peak(under(kind).plans(DOCUMENTS, 2), memory=under(kind).memory) for kind in ("none", "full")
    )
    for share in (0.3, 0.8):
        usable = full + share * (none - full)
        cluster = replace(CLUSTER, memory=usable / usable_share(policy == "slim"))
        plans = made.on(cluster).plans(DOCUMENTS, 3)
        assert 0.9 * usable < peak(plans) <= usable
        kinds = {name for plan in plans for m in plan.micro_batches for name in kinds_of_layers(m.mix)}
        assert len(kinds) > 1


def test_slices_are_judged_by_what_their_layers_may_repeat():
    """A device on which the steps do not fit with all layers selective: no more packs, and more in flight."""
    packing = POLICIES.configure("slim", micropacks=16, slack=2, dp_merge=False)
    facts = {"packing": packing, "micro_batches": 16, "multiple": 8}
    kinds = AS_NEEDED, MemorySettings(), FULL
    made = [sized(Degrees(pipeline=2, shard=2), memory=kind, **facts)[0] for kind in kinds]
    selective, full = (fullest(peak_memory(one, one.plans(DOCUMENTS, 2))).total for one in made[1:])
    usable = 0.1 * selective + 0.9 * full
    cluster = replace(CLUSTER, memory=usable / usable_share(slices=True))
    chosen, selective = (one.on(cluster) for one in made[:2])
    plans = chosen.plans(DOCUMENTS, 2)
    assert {len(plan.micro_batches) for plan in plans} == {32}
    assert fullest(peak_memory(chosen, plans)).total <= usable
    assert selective.fitting.most_in_flight < chosen.fitting.most_in_flight
    with pytest.warns(UserWarning, match="predicted not to fit"):
        selective.plans(DOCUMENTS, 2)


def test_what_layers_repeat_counts_in_the_choice_of_micropacks():
    """A tight device takes more packs than an ample one, of which layers repeat less: steps are shorter."""
    packing = POLICIES.configure("slim", slack=0, dp_merge=False)
    made, _ = sized(Degrees(shard=2), micro_batches=8, multiple=8, packing=packing)
    few = made.planner(DOCUMENTS).policy.micropacks
    fixed = replace(made, packing=replace(packing, micropacks=few))
    none, full = (
        fullest(peak_memory(one, one.plans(DOCUMENTS, 2))).total
        for one in (replace(fixed, memory=kind) for kind in (NONE, FULL))
    )
    cluster = replace(CLUSTER, memory=(0.7 * full + 0.3 * none) / usable_share(slices=True))
    chosen, same = (simulate(one.on(cluster), one.on(cluster).plans(DOCUMENTS, 2)) for one in (made, fixed))
    assert made.on(cluster).planner(DOCUMENTS).policy.micropacks > few
    assert chosen.seconds.sum() < 0.97 * same.seconds.sum()
