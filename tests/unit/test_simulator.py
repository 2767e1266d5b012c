"""Predicted steps: one by hand; of others passes, the slowest replica, communication, memory, timelines."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planning import CLUSTER, LAYER, MODEL, PAIRS, job, pairs

from wlb_titan.context.layout import per_sequence
from wlb_titan.cost.cluster import Link
from wlb_titan.cost.workload import workload
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.layers.passes import JobCost, Loads, pass_times
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.memory.layer import TokenBytes
from wlb_titan.packing.predicted import passing, regrouped_times
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.simulator.replicas import rank_memory, step_timeline, transfer_seconds
from wlb_titan.simulator.step import simulate


def plan(replicas, context=1):
    """Micro-batches of whole documents; `replicas` are lists of lists of documents' lengths."""
    micro_batches = []
    for dp_rank, packs in enumerate(replicas):
        for index, lengths in enumerate(packs):
            d, total = np.array(lengths), sum(lengths)
            documents = np.stack([np.arange(len(d)), 0 * d, d, 0 * d], axis=1)
            pack = MicroBatch(documents, length=total, dp_rank=dp_rank, index=index, workload=1.0)
            if context > 1:
                pack = replace(pack, sharding="per_sequence", ranks=per_sequence(d, total, context))
            micro_batches.append(pack)
    return Plan(0, tuple(micro_batches), 0.0)


def test_one_gpu_by_hand():
    """Documents of 3 and 5 tokens: matrices three times, attention once forward and twice backward."""
    prediction = simulate(job(), [plan([[[3, 5]]])])
    matrices = 2 * (4 * LAYER + 8 * 32) * 8 / 1e9
    attention = 4 * 2 * (pairs(3) + pairs(5)) * 1e-6
    assert prediction.pipeline[0] == pytest.approx(3 * matrices + 3 * attention)
    assert prediction.bubble == pytest.approx(0, abs=1e-12)
    assert prediction.tokens.tolist() == [8]
    assert prediction.flops[0] == pytest.approx(3 * (matrices * 1e9 + 2 * 8 * 4 * (9 + 25)))
    assert prediction.mfu == pytest.approx(prediction.flops[0] / prediction.seconds[0] / 1e12)


def test_checkpointing_repeats_the_forward_pass():
    """All of it, or of its matrix products those of keys, of attention's output and the MLP's second."""
    token = 2 * LAYER / 1e9
    some = token * (8 + 8 + 16) / (4 * 8 + 3 * 16)
    batch = passing(plan([[[4]]]).micro_batches, job()).in_runs(1)
    plain = pass_times(job(), batch)
    for checkpointing, seconds in (("full", 4 * token + 2 * pairs(4) * 1e-6), ("selective", 4 * some)):
        times = pass_times(job(memory=MemorySettings(checkpointing=checkpointing)), batch)
        assert (times.inputs - plain.inputs)[0, 0, 0] == pytest.approx(4 * seconds)
        assert np.array_equal(times.forward, plain.forward)


def test_the_slowest_context_parallel_rank_counts_in_each_pass():
    """Per sequence, a document of 6 and one of 2: rank 0 has tokens 0 1 6 7, rank 1 has tokens 2 to 5."""
    one = plan([[[6, 2]]], context=2)
    batch = passing(one.micro_batches, job(degrees=Degrees(context=2)))
    assert batch.forward[0, 0] == pytest.approx(2 * (3 + 4 + 5 + 6) * 1e-6)
    assert batch.backward[0] == pytest.approx(2 * batch.forward[0])


def test_each_stage_takes_what_its_own_layers_attend():
    """A document of 12 tokens, whose 12 x 13 / 2 pairs a window of 3 cuts to 3 x 12 - 3; one layer of each
    stage has it, and of the last stage none."""
    own = replace(MODEL, layers=5, windows=(3, None, None, 3, None))
    one = job(model=own, degrees=Degrees(pipeline=3))
    found = passing(plan([[[12]]]).micro_batches, one)
    assert found.forward[:, 0] == pytest.approx([(78 + 33) / 2 * 2e-6] * 2 + [78 * 2e-6])
    whole = replace(PAIRS, windows=own.window_shares(0, 5)).seconds([np.array([[0, 0, 12]])])
    assert np.dot(one.layers, found.forward[:, 0]) == pytest.approx(5 * whole[0, 0])


def imagined_times(of, times=pass_times):
    """Of 1,024 tokens without attention."""
    none = np.zeros((1, 1))
    return times(of, Loads.imagined(of, none + 1024, none, none))


def test_tensor_collectives_hide_behind_matrix_products():
    """As far as they may, and as long as these take: of their bytes' time, and of their latency."""

    def waited(overlap, node, matrices=1e9):
        cluster = replace(CLUSTER, node=node, linear_flops=matrices)
        one = job(degrees=Degrees(tensor=2), cluster=cluster, tensor_overlap=overlap)
        bare = one.on(replace(cluster, node=CLUSTER.node))
        times, without = imagined_times(one), imagined_times(bare)
        assert (times.weights == without.weights).all()
        forward = (times.forward - without.forward)[0, 0, 0]
        assert (times.inputs - without.inputs)[0, 0, 0] == pytest.approx(forward)
        return forward

    exposed = waited(0.0, Link(1e6, 1e-3))
    assert exposed == pytest.approx(4 * 4 * (1024 * 8 * 2 / 2 / 1e6 + 1e-3))
    assert waited(0.25, Link(1e6, 1e-3), 1e6) == pytest.approx(0.75 * exposed)
    assert waited(1.0, Link(1e6, 1e-3), 1e6) == pytest.approx(0, abs=1e-9)
    products = 1024 * 2 * LAYER / 2 / 1e12
    assert waited(1.0, Link(1e6, 0.0), 1e12) == pytest.approx(exposed - 4 * 4 * 1e-3 - 4 * products)


EXPERTS = replace(MODEL, feed_forward=16, experts=8, routed_width=12, visits=2.0, unvisited_weights=900)


def test_experts_exchange_tokens():
    """EP 4 in nodes of 2: of two copies of 1024 / 2 tokens, a quarter goes to the neighbour and half away."""
    cluster = replace(CLUSTER, gpus_per_node=2, node=Link(1e6, 1e-3), network=Link(1e5, 1e-2))
    degrees = Degrees(context=2, shard=2, expert=4)
    spread = job(model=EXPERTS, degrees=degrees, cluster=cluster)
    alone = replace(spread, degrees=replace(degrees, expert=1))
    times, without = imagined_times(spread), imagined_times(alone)
    copies = 2 * 1024 / 2 * 8 * 2  # bytes of one rank
    exchange = 2 * (max(copies / 4 / 1e6, copies / 2 / 1e5) + 1e-2)
    assert (times.forward - without.forward)[0, 0, 0] == pytest.approx(4 * exchange)
    assert (times.weights == without.weights).all()


def communication(degrees, micro_batches=1, bandwidth=1e8, latency=0.0, **changes):
    """Exposed seconds of a step of equal micro-batches."""
    made = job(degrees=degrees, cluster=replace(CLUSTER, node=Link(bandwidth, latency)), **changes)
    return simulate(made, [plan([[[64]] * micro_batches] * degrees.data)]).communication[0]


WEIGHTS = 4 * (LAYER + 2 * 8) + 2 * 8 * 32 + 8
GATHER, REDUCE = WEIGHTS * 2 / 2 / 1e8, WEIGHTS * 4 / 2 / 1e8  # seconds, by two ranks


def test_gradient_reduction_hides_or_not():
    bare = communication(Degrees(shard=2), overlap=False)
    assert bare == pytest.approx(2 * GATHER + REDUCE)  # gathered for both passes
    assert communication(Degrees(shard=2)) == pytest.approx((GATHER + REDUCE) / 4)  # of one of four layers
    assert 0.5 < communication(Degrees(shard=2), bandwidth=1e3) / (1e5 * bare) < 1  # more than passes hide


def test_without_a_pipeline_every_micro_batch_communicates():
    def bare(degrees, n, latency=0.0, **settings):
        memory = MemorySettings(**settings)
        return communication(degrees, n, latency=latency, overlap=False, memory=memory)

    one = bare(Degrees(shard=2), 1)
    assert bare(Degrees(shard=2), 3) == pytest.approx(3 * one)
    assert bare(Degrees(shard=2), 3, reshard=False) == pytest.approx(3 * (one - GATHER))
    # A collective for each of four layers and one for both ends, in three passes.
    assert bare(Degrees(shard=2), 1, 1e-3) - one == pytest.approx(3 * (4 + 1) * 1e-3)
    staged = Degrees(pipeline=2, shard=2)
    assert bare(staged, 3) == pytest.approx(bare(staged, 2))
    assert bare(staged, 3, reshard=True) > 2 * bare(staged, 3)


def test_interleaved_stages_each_communicate():
    """One layer of each stage is not hidden: of four stages of one layer each as much as without overlap."""

    def exposed(chunks, **changes):
        stages = {"chunks": chunks, "stage_layers": (4 // (2 * chunks),) * (2 * chunks)}
        schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
        return communication(Degrees(pipeline=2, shard=2), 2, schedule=schedule, **stages, **changes)

    assert exposed(2) == pytest.approx(2 * exposed(1))
    assert exposed(2) == pytest.approx(exposed(1, overlap=False)) == pytest.approx(exposed(2, overlap=False))


def test_experts_are_gathered_only_by_the_ranks_that_hold_them():
    """Those of EP 4 by none; of EP 2 each by two ranks, half of the experts, in half of the time of four."""
    how = {"model": EXPERTS, "overlap": False}
    dense, half, all_ = (communication(Degrees(shard=4, expert=n), **how) for n in (4, 2, 1))
    experts = 4 * EXPERTS.expert_weights * (2 + 2 + 4) / 1e8  # gathered twice in bfloat16, reduced in float32
    assert all_ - dense == pytest.approx(experts * 3 / 4)
    assert half - dense == pytest.approx(experts / 2 / 2)


def test_transfer_between_pipeline_ranks():
    cluster = replace(CLUSTER, gpus_per_node=2, network=Link(1e6, 0.5))
    staged = job(degrees=Degrees(pipeline=2, context=2), cluster=cluster)
    assert transfer_seconds(staged, np.array([[10.0]]))[0, 0] == pytest.approx(10 * 8 * 2 / 2 / 1e6 + 0.5)
    assert transfer_seconds(job(), np.array([[10.0]])) == 0


def test_what_moves_has_the_bytes_of_its_type():
    """Where products take no time, all is bytes: of each kind twice as many in float32."""
    slow = Link(1e6, 0.0)
    cluster = replace(CLUSTER, linear_flops=1e30, gpus_per_node=64)
    kinds = {
        "elements": replace(cluster, memory_bandwidth=1e6),
        "collectives": replace(cluster, node=slow),
        "between nodes": replace(cluster, gpus_per_node=1, network=slow),
    }
    degrees = Degrees(pipeline=2, context=2, tensor=2, expert=4)
    for kind, cluster in kinds.items():
        half = job(model=EXPERTS, degrees=degrees, cluster=cluster)
        whole = replace(half, memory=replace(half.memory, compute_bytes=4))
        for times in (pass_times, regrouped_times):
            for name in ("forward", "inputs"):
                once, twice = (getattr(imagined_times(of, times), name) for of in (half, whole))
                assert (once > 0).all() and twice == pytest.approx(2 * once), (kind, name)
    assert transfer_seconds(whole, np.ones(1)) == pytest.approx(2 * transfer_seconds(half, np.ones(1)))


def pipeline(replicas, **degrees):
    return simulate(job(degrees=Degrees(**degrees)), [plan(replicas)]).pipeline


def test_the_slowest_replica_counts_and_under_fsdp_the_slowest_of_each_micro_batch():
    crossed = [[[8], [1]], [[1], [8]]]
    assert pipeline(crossed, replicate=2) == pytest.approx(pipeline([[[8], [1]]]))
    assert pipeline(crossed, shard=2) == pytest.approx(pipeline([[[8], [8]]]))
    uneven = simulate(job(degrees=Degrees(replicate=2)), [plan([[[1], [1]], [[8], [8]]])])
    assert uneven.pipeline == pytest.approx(pipeline([[[8], [8]]]))
    assert 0.4 < uneven.bubble < 0.5


def test_runs_follow_each_other():
    one = simulate(job(degrees=Degrees(pipeline=2)), [plan([[[8], [4]]])])
    two = simulate(job(degrees=Degrees(pipeline=2), per_run=2), [plan([[[8], [4], [8], [4]]])])
    assert two.pipeline == pytest.approx(2 * one.pipeline)
    # The second run has the gradients that the first has reduced, in shards of the weights' size.
    assert [rank.gradients for rank in one.memory] == [0, 0]
    assert [rank.gradients for rank in two.memory] == [rank.weights for rank in two.memory]
    first = simulate(job(degrees=Degrees(pipeline=2), per_run=2), [plan([[[4000], [2000], [8], [4]]])])
    assert [rank.gradients for rank in first.memory] == [0, 0]  # its first run is the fullest


def test_packing_and_simulation_agree_on_work():
    """A document alone in a micro-batch takes what the packing's cost model says, without CP."""
    for checkpointing in ("none", "selective", "full"):
        made = job(memory=MemorySettings(checkpointing=checkpointing))
        prediction = simulate(made, [plan([[[7]]])])
        assert workload(JobCost(made), np.array([7]))[0] == pytest.approx(prediction.pipeline[0])


def test_an_earlier_rank_holds_more_micro_batches():
    """Of micro-batches of 8,000 and 4,000 tokens rank 0 holds both at its fullest, rank 1 the first."""
    staged = job(degrees=Degrees(pipeline=2))
    kept = TokenBytes.of(staged.model, staged.degrees, staged.memory, staged.exchange).kept
    for stage, rank in enumerate(rank_memory(staged, plan([[[8000], [4000]]]), 0)):
        assert rank.tokens == (12000, 8000)[stage]
        assert 1 <= rank.activations / (kept * staged.layers[stage] * rank.tokens) < 1.15  # inputs and ends


@pytest.mark.parametrize("degrees", [Degrees(pipeline=2, replicate=2), Degrees(shard=2)], ids=str)
def test_a_timeline_ends_when_the_pipeline_is_predicted_to(degrees):
    """Of runs one after the other, and of ranks that meet in every micro-batch."""
    made, batches = job(degrees=degrees, per_run=2), plan([[[8], [1], [2], [3]], [[1], [8], [2], [3]]])
    passes = step_timeline(made, batches, "plain")
    assert {one.replica for one in passes} == {"plain"}
    assert {one.rank for one in passes} == {f"pp {rank}" for rank in range(degrees.pipeline)}
    assert {(one.kind, one.micro_batch) for one in passes} == set(product("FB", range(4)))
    assert max(one.end for one in passes) == pytest.approx(simulate(made, [batches]).pipeline[0])


def test_a_prediction_beyond_the_measured_range_says_so():
    measured = job(attention=replace(PAIRS, measured_to=4))
    assert "measured up to 4 keys" in simulate(measured, [plan([[[5]]])]).extrapolated
    assert simulate(measured, [plan([[[4]]])]).extrapolated is None


WRONG = {
    "overlap of tensor parallelism is 1.5": ({"tensor_overlap": 1.5}, {}),
    "expert parallel degree is 2, but a layer has only 0 experts": ({}, {"shard": 2, "expert": 2}),
    "3 does not divide TP 2 x CP 1 x 2 sharding": ({}, {"tensor": 2, "shard": 2, "expert": 3}),
    "2 heads cannot be divided by the tensor parallel degree 4": ({}, {"tensor": 4}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_job_that_cannot_be_is_refused(message):
    settings, degrees = WRONG[message]
    with pytest.raises(PlanError, match=message):
        job(degrees=Degrees(**degrees), **settings)


def test_what_travels_and_the_head_count_in_both_passes():
    """Two stages of two layers: the last has the head, and each layer moves keys and their gradients."""
    batch = Loads(*(np.full((1, 1), value) for value in (4.0, 1.0, 2.0, 0.0, 0.0, 0.0)))
    of = job(degrees=Degrees(pipeline=2))
    times, moved = pass_times(of, batch), pass_times(of, replace(batch, moving=np.full((1, 1), 8.0)))
    for found, more in zip(times[:2], moved[:2], strict=True):
        assert (more - found).ravel() == pytest.approx([2 * 8.0] * 2)
    for found in times:
        assert (found[1] - found[0]).ravel() == pytest.approx([4 * of.token.head])
        assert of.token.head > 0
