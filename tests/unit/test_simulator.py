"""Steps by hand: passes of a micro-batch, the slowest replica, communication, memory, timelines."""

from dataclasses import replace

import numpy as np
import pytest
from planning import CLUSTER, LAYER, MODEL, NONE, PAIRS, job, pairs

from wlb_titan.context.layout import per_sequence
from wlb_titan.cost.cluster import Link, load_cluster
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.passes import JobCost, MicroBatches, pass_times
from wlb_titan.cost.profile import AttentionShape, cluster_latency
from wlb_titan.cost.workload import workload
from wlb_titan.errors import PlanError
from wlb_titan.memory.layer import MemorySettings, TokenBytes
from wlb_titan.memory.rank import Passes
from wlb_titan.packing.predicted import passing
from wlb_titan.plan import MicroBatch, Plan
from wlb_titan.simulator.replicas import transfer_seconds
from wlb_titan.simulator.step import simulate
from wlb_titan.simulator.timeline import step_timeline


def plan(replicas, context=1):
    """Micro-batches of whole documents; `replicas` are lists of lists of documents' lengths."""
    micro_batches = []
    for dp_rank, packs in enumerate(replicas):
        for index, lengths in enumerate(packs):
            d = np.array(lengths)
            documents = np.stack([np.arange(len(d)), 0 * d, d, 0 * d], axis=1)
            ranks = per_sequence(d, int(d.sum()), context) if context > 1 else None
            sharding = "per_sequence" if context > 1 else None
            micro_batches.append(
                MicroBatch(
                    *(documents, None, range(0), "FB", int(d.sum()), 0, dp_rank, index, 1.0, sharding, ranks)
                )
            )
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
    token = 2 * LAYER / 1e9
    batch = passing(plan([[[4]]]).micro_batches, job()).in_runs(1)
    attention = 2 * pairs(4) * 1e-6
    expected = {
        "none": 0.0,
        "full": 4 * token + attention,
        "selective": 4 * token * (8 + 8 + 16) / (4 * 8 + 3 * 16),
    }
    plain = pass_times(job(), batch)
    for checkpointing, seconds in expected.items():
        times = pass_times(job(memory=MemorySettings(checkpointing=checkpointing)), batch)
        assert (times.inputs - plain.inputs)[0, 0, 0] == pytest.approx(4 * seconds)
        assert np.array_equal(times.forward, plain.forward)


def test_the_slowest_context_parallel_rank_counts_in_each_pass():
    """Per sequence, a document of 6 and one of 2: rank 0 has tokens 0 1 6 7, rank 1 has tokens 2 to 5."""
    one = plan([[[6, 2]]], context=2)
    batch = passing(one.micro_batches, job(degrees=Degrees(context=2)))
    assert batch.forward[0] == pytest.approx(2 * (3 + 4 + 5 + 6) * 1e-6)
    assert batch.backward[0] == pytest.approx(2 * batch.forward[0])
    prediction = simulate(job(degrees=Degrees(context=2)), [one])
    matrices = 2 * (4 * LAYER + 8 * 32) * 4 / 1e9
    assert prediction.pipeline[0] == pytest.approx(3 * (matrices + 4 * batch.forward[0]))


def imagined_times(of, batch):
    return pass_times(of, MicroBatches.imagined(of, *batch))


def test_tensor_and_context_collectives():
    """7B, TP 4 in a node and CP 2 across: bytes over bandwidth, and a latency a collective."""
    cluster = replace(CLUSTER, gpus_per_node=4, node=Link(1e9, 1e-3), network=Link(1e8, 1e-2))
    degrees = Degrees(tensor=4, context=2)
    batch = np.full((1, 1), 1024.0), np.zeros((1, 1)), np.zeros((1, 1))
    model = PAPER_MODELS["7B"]
    slow = imagined_times(job(model=model, degrees=degrees, cluster=cluster), batch)
    fast = imagined_times(job(model=model, degrees=degrees), batch)
    tensor = 4 * (1024 / 2 * 4096 * 2 * (3 / 4) / 1e9 + 1e-3)
    context = 1024 * 2 * 4096 / 4 * 2 * (1 / 2) / 1e8 + 1e-2
    difference = (slow.forward - fast.forward)[0, 0, 0]
    # A group of two has one rank in each node, and so one card.
    assert difference == pytest.approx(32 * (tensor + context))
    assert (slow.weights == fast.weights).all()


def test_tensor_collectives_hide_behind_matrix_products():
    """As far as they may, and as long as these take: of their bytes' time, and of their latency."""
    tokens = np.full((1, 1), 1024.0), np.zeros((1, 1)), np.zeros((1, 1))

    def waited(overlap, node, matrices=1e9):
        cluster = replace(CLUSTER, node=node, linear_flops=matrices)
        one = job(degrees=Degrees(tensor=2), cluster=cluster, tensor_overlap=overlap)
        bare = one.on(replace(cluster, node=CLUSTER.node))
        times, without = imagined_times(one, tokens), imagined_times(bare, tokens)
        assert (times.weights == without.weights).all()
        forward = (times.forward - without.forward)[0, 0, 0]
        assert (times.inputs - without.inputs)[0, 0, 0] == pytest.approx(forward)
        return forward

    exposed = waited(0.0, Link(1e6, 1e-3))
    assert exposed == pytest.approx(4 * 4 * (1024 * 8 * 2 / 2 / 1e6 + 1e-3))
    assert waited(0.0, Link(2e6, 0.5e-3)) == pytest.approx(exposed / 2)
    assert waited(0.0, Link(1e6, 0.0)) + 4 * 4 * 1e-3 == pytest.approx(exposed)
    assert waited(0.25, Link(1e6, 1e-3), 1e6) == pytest.approx(0.75 * exposed)
    assert waited(1.0, Link(1e6, 1e-3), 1e6) == pytest.approx(0, abs=1e-9)
    products = 1024 * 2 * LAYER / 2 / 1e12
    assert waited(1.0, Link(1e6, 0.0), 1e12) == pytest.approx(exposed - 4 * 4 * 1e-3 - 4 * products)


EXPERTS = replace(MODEL, feed_forward=16, experts=8, routed_width=12, visits=2.0, unvisited_weights=900)


def test_experts_exchange_tokens_and_wait_for_the_busiest_rank():
    """EP 4 in nodes of 2: of two copies of 1024 / 2 tokens, a quarter goes to the neighbour and half away."""
    cluster = replace(CLUSTER, gpus_per_node=2, node=Link(1e6, 1e-3), network=Link(1e5, 1e-2))
    degrees = Degrees(context=2, shard=2, expert=4)
    batch = np.full((1, 1), 1024.0), np.zeros((1, 1)), np.zeros((1, 1))
    spread = job(model=EXPERTS, degrees=degrees, cluster=cluster, routing_imbalance=1.5)
    alone = replace(spread, degrees=replace(degrees, expert=1), routing_imbalance=1.0)
    times, without = imagined_times(spread, batch), imagined_times(alone, batch)
    copies = 2 * 1024 / 2 * 8 * 2  # bytes of one rank
    exchange = 2 * (1.5 * max(copies / 4 / 1e6, copies / 2 / 1e5) + 1e-2)
    products = 1024 / 2 * 2 * 3 * 8 * 12 / 1e9
    assert (times.forward - without.forward)[0, 0, 0] == pytest.approx(4 * (exchange + 0.5 * products))
    assert (times.inputs - without.inputs)[0, 0, 0] == pytest.approx(4 * (exchange + 0.5 * products))
    assert (times.weights - without.weights)[0, 0, 0] == pytest.approx(4 * 0.5 * products)


def test_experts_are_gathered_only_by_the_ranks_that_hold_them():
    cluster = replace(CLUSTER, node=Link(1e6, 0.0))
    experts = EXPERTS.expert_weights
    assert experts == 3 * 8 * 12 + 900
    dense = 4 * (EXPERTS.attention_weights + 3 * 8 * 4 + 2 * 8) + 2 * 8 * 32 + 8

    def gathered(expert):
        degrees = Degrees(shard=4, expert=expert)
        one = job(model=EXPERTS, degrees=degrees, cluster=cluster, overlap=False)
        return simulate(one, [plan([[[64]]] * 4)]).communication[0]

    each = 2 + 2 + 4  # bytes gathered twice in bfloat16 and reduced once in float32
    assert gathered(1) == pytest.approx((dense + 4 * experts) * each * 3 / 4 / 1e6)
    assert gathered(4) == pytest.approx(dense * each * 3 / 4 / 1e6)
    assert gathered(2) == pytest.approx(dense * each * 3 / 4 / 1e6 + 4 * experts / 2 * each / 2 / 1e6)


def test_offloaded_activations_travel_while_layers_compute():
    slow = replace(CLUSTER, host_bandwidth=1e3)
    batch = passing(plan([[[4]]]).micro_batches, job()).in_runs(1)
    half = MemorySettings(checkpointing="none", offload=0.5)
    kept = TokenBytes.of(MODEL, Degrees(), NONE).kept
    times = pass_times(job(memory=half, cluster=slow), batch)
    head = 4 * 2 * 8 * 32 / 1e9
    assert times.forward[0, 0, 0] == pytest.approx(4 * 4 * kept / 2 / 1e3 + head)
    fast = pass_times(job(memory=half, cluster=replace(CLUSTER, host_bandwidth=1e12)), batch)
    assert np.array_equal(fast.forward, pass_times(job(), batch).forward)
    stays = [job(memory=memory, cluster=slow).fitting.peak(Passes.of([4000]))[0] for memory in (NONE, half)]
    # Of four layers half of what they keep has gone; of the one at hand and the next it is there too.
    assert stays[0].activations - stays[1].activations == pytest.approx(4 * 4000 * kept / 2)
    assert stays[1].backward - stays[0].backward == pytest.approx(2 * 4000 * kept / 2)


def test_transfer_between_pipeline_ranks():
    cluster = replace(CLUSTER, gpus_per_node=2, network=Link(1e6, 0.5))
    staged = job(degrees=Degrees(pipeline=2, context=2), cluster=cluster)
    assert transfer_seconds(staged, np.array([[10.0]]))[0, 0] == pytest.approx(10 * 8 * 2 / 2 / 1e6 + 0.5)
    assert transfer_seconds(job(), np.array([[10.0]])) == 0


def test_the_slowest_replica_counts():
    alone = simulate(job(), [plan([[[8], [8]]])])
    both = simulate(job(degrees=Degrees(replicate=2)), [plan([[[1], [1]], [[8], [8]]])])
    assert both.pipeline == pytest.approx(alone.pipeline)
    assert 0.4 < both.bubble < 0.5


def test_fsdp_without_a_pipeline_waits_for_each_micro_batch():
    crossed = plan([[[8], [1]], [[1], [8]]])
    replicated = simulate(job(degrees=Degrees(replicate=2)), [crossed])
    sharded = simulate(job(degrees=Degrees(shard=2)), [crossed])
    longest = simulate(job(), [plan([[[8], [8]]])])
    assert sharded.pipeline == pytest.approx(longest.pipeline)
    assert replicated.pipeline == pytest.approx(simulate(job(), [plan([[[8], [1]]])]).pipeline)


def test_gradient_reduction_hides_or_not():
    cluster = replace(CLUSTER, network=Link(1e8, 0.0), node=Link(1e8, 0.0))
    degrees = Degrees(shard=2)
    batches = plan([[[64]], [[64]]])
    weights = 4 * (LAYER + 2 * 8) + 2 * 8 * 32 + 8
    gather, reduce = weights * 2 / 2 / 1e8, weights * 4 / 2 / 1e8
    bare = simulate(job(degrees=degrees, cluster=cluster, overlap=False), [batches])
    assert bare.communication[0] == pytest.approx(2 * gather + reduce)  # gathered for both passes
    hidden = simulate(job(degrees=degrees, cluster=cluster), [batches])
    assert hidden.communication[0] == pytest.approx((gather + reduce) / 4)  # of one of four layers
    slow = replace(cluster, node=Link(1e3, 0.0))
    exposed = simulate(job(degrees=degrees, cluster=slow), [batches])
    assert exposed.communication[0] > 0.5 * weights * (2 + 2 + 4) / 2 / 1e3


def test_interleaved_stages_each_communicate():
    """Two ranks, two layers each, one stage a rank or two: one layer of each stage is not hidden."""
    cluster = replace(CLUSTER, node=Link(1e8, 0.0))
    steps = [plan([[[64], [64]], [[64], [64]]])]
    layer = LAYER + 2 * 8
    ends = 8 * 32 + 8  # the head and its norm, which are the larger end

    def exposed(chunks, overlap):
        schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
        degrees = Degrees(pipeline=2, shard=2)
        one = job(degrees=degrees, cluster=cluster, schedule=schedule, chunks=chunks, overlap=overlap)
        one = replace(one, stage_layers=(4 // (2 * chunks),) * (2 * chunks), micro_batches=4)
        return simulate(one, steps).communication[0]

    each = (2 + 4) / 2 / 1e8  # gathered once and reduced once
    assert exposed(1, overlap=False) == pytest.approx((2 * layer + ends) * each)
    assert exposed(2, overlap=False) == pytest.approx((2 * layer + ends) * each)
    assert exposed(1, overlap=True) == pytest.approx((2 * layer + ends) / 2 * each)
    assert exposed(2, overlap=True) == pytest.approx((2 * layer + ends) * each)


def test_without_a_pipeline_every_micro_batch_communicates():
    cluster = replace(CLUSTER, network=Link(1e8, 0.0), node=Link(1e8, 1e-3))
    weights = 4 * (LAYER + 2 * 8) + 2 * 8 * 32 + 8
    collectives = 4 + 1  # the layers, and both ends
    gather, reduce = (weights * size / 2 / 1e8 + collectives * 1e-3 for size in (2, 4))

    def communication(degrees, micro_batches, **settings):
        made = job(degrees=degrees, cluster=cluster, overlap=False, memory=MemorySettings(**settings))
        return simulate(made, [plan([[[64]] * micro_batches] * degrees.data)]).communication[0]

    assert communication(Degrees(shard=2), 3) == pytest.approx(3 * (2 * gather + reduce))
    assert communication(Degrees(shard=2), 3, reshard=False) == pytest.approx(3 * (gather + reduce))
    staged = Degrees(pipeline=2, shard=2)
    assert communication(staged, 3) == pytest.approx(communication(staged, 2))
    assert communication(staged, 3, reshard=True) > 2 * communication(staged, 3)


def test_runs_follow_each_other():
    one = simulate(job(degrees=Degrees(pipeline=2)), [plan([[[8], [4]]])])
    two = simulate(job(degrees=Degrees(pipeline=2), run=2), [plan([[[8], [4], [8], [4]]])])
    assert two.pipeline == pytest.approx(2 * one.pipeline)
    # The second run has the gradients that the first has reduced, in shards of the weights' size.
    assert [rank.gradients for rank in one.memory] == [0, 0]
    assert [rank.gradients for rank in two.memory] == [rank.weights for rank in two.memory]
    first = simulate(job(degrees=Degrees(pipeline=2), run=2), [plan([[[4000], [2000], [8], [4]]])])
    assert [rank.gradients for rank in first.memory] == [0, 0]  # its first run is the fullest
    with pytest.raises(PlanError, match=r"3 micro-batches of a replica.*runs of 2"):
        simulate(job(degrees=Degrees(pipeline=2), run=2), [plan([[[8], [4], [8]]])])


def test_several_steps_are_those_one_by_one():
    staged = job(degrees=Degrees(pipeline=2, replicate=2))
    steps = [plan([[[8], [4]], [[2], [9]]]), plan([[[1], [3]], [[7], [2]]])]
    together = simulate(staged, steps)
    apart = [simulate(staged, [step]) for step in steps]
    assert together.seconds == pytest.approx(np.concatenate([one.seconds for one in apart]))
    assert together.peak_memory.total == max(one.peak_memory.total for one in apart)


def test_packing_and_simulation_agree_on_work():
    """A document alone in a micro-batch takes what the packing's cost model says, without CP."""
    for checkpointing in ("none", "selective", "full"):
        made = job(memory=MemorySettings(checkpointing=checkpointing))
        prediction = simulate(made, [plan([[[7]]])])
        assert workload(JobCost(made), np.array([7]))[0] == pytest.approx(prediction.pipeline[0])


def test_timeline():
    staged = job(degrees=Degrees(pipeline=2, replicate=2))
    batches = plan([[[1], [1]], [[8], [4]]])
    slices, curves = step_timeline(staged, batches, "plain")
    assert {piece.track for piece in slices} == {"pp 0", "pp 1"}
    assert {piece.name for piece in slices} == {"F0", "F1", "B0", "B1"}
    assert max(piece.start + piece.duration for piece in slices) == pytest.approx(
        simulate(staged, [batches]).pipeline[0]
    )
    for curve in curves:
        # The replica that takes longest has micro-batches of 8 and 4 tokens: rank 0 holds both, rank 1 one.
        kept = TokenBytes.of(staged.model, staged.degrees, staged.memory, staged.exchange).kept
        assert curve.bytes_.max() == kept * staged.layers[curve.rank] * (12, 8)[curve.rank]
        assert curve.bytes_[-1] == 0
        assert (np.diff(curve.seconds) >= 0).all()


def test_a_prediction_beyond_the_measured_range_says_so():
    far = simulate(job(attention=replace(PAIRS, measured_to=4)), [plan([[[5]]])])
    assert "measured up to 4 keys" in far.extrapolated
    assert simulate(job(attention=replace(PAIRS, measured_to=4)), [plan([[[4]]])]).extrapolated is None
    hopper = cluster_latency(load_cluster("h100_roce"), AttentionShape.of(PAPER_MODELS["7B"], 8))
    assert hopper.heads == 4
    assert hopper.measured_to == 131072


def test_shares_and_imbalances_out_of_range_are_refused():
    for changes, message in (
        ({"tensor_overlap": 1.5}, "overlap of tensor parallelism is 1.5"),
        ({"routing_imbalance": 2.0}, "routing imbalance is 2.0.* degree of 1"),
        ({"degrees": Degrees(shard=2, expert=2)}, "expert parallel degree is 2, and a layer has 0 experts"),
        ({"memory": MemorySettings(offload=0.5)}, r"offloaded on test: its file has no \[node\] host_bandw"),
    ):
        with pytest.raises(PlanError, match=message):
            job(**changes)
    with pytest.raises(PlanError, match="offload is 2; it is between 0 and 1"):
        MemorySettings(offload=2)
    with pytest.raises(PlanError, match="expert parallel degree 3 does not divide TP 2 x CP 1 x 2 sharding"):
        Degrees(tensor=2, shard=2, expert=3)


def test_refusals():
    with pytest.raises(PlanError, match="2 heads cannot be divided by the tensor parallel degree 4"):
        job(degrees=Degrees(tensor=4))
    with pytest.raises(PlanError, match="plan is for 1 data-parallel ranks, and the job has 2"):
        simulate(job(degrees=Degrees(shard=2)), [plan([[[4]]])])
    with pytest.raises(PlanError, match="plan is for 1 context-parallel ranks, and the job has 2"):
        simulate(job(degrees=Degrees(context=2)), [plan([[[4]]])])
    with pytest.raises(PlanError, match="There is no plan"):
        simulate(job(), [])
