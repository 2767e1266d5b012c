"""Jobs, planners and strategies for tests, by the few arguments that a test is about."""

from dataclasses import replace

import numpy as np

from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost, Tiling
from wlb_titan.cost.cluster import Cluster, Link, load_cluster
from wlb_titan.cost.models import ModelShape
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.job import Job, Policy
from wlb_titan.layers.recompute import MemorySettings
from wlb_titan.packing import POLICIES
from wlb_titan.summary import Summary

_COSTS = {"launch": 2.5e-5, "key": 0.0, "segment": 0.0, "tile": 2e-7, "block": 1.6e-6, "masked": 3e-7}
_OWN_TILES = KernelCost(Tiling(128, 128), **_COSTS)
UNMERGED = AttentionLatency(_OWN_TILES, replace(_OWN_TILES, block=4.7e-6), 132, 32, "own tiles")
"""A kernel that does not merge short segments, about as fast as FlashAttention-3."""

MODEL = ModelShape(layers=4, hidden=8, heads=2, kv_heads=2, head_dim=4, feed_forward=16, vocabulary=32)
LAYER = 4 * 8 * 8 + 3 * 8 * 16  # weights in matrix products
CLUSTER = Cluster(
    name="test",
    memory=1e9,
    peak_flops=1e12,
    linear_flops=1e9,
    attention_flops=1e9,
    attention_backward_flops=1e9,
    memory_bandwidth=float("inf"),
    gpus_per_node=8,
    node=Link(float("inf"), 0.0),
    network=Link(float("inf"), 0.0),
)
# One query a tile, one key a block: forward 1 microsecond a pair of tokens and head, backward 2.
_PAIR = KernelCost(Tiling(1, 1), launch=0, key=0, segment=0, tile=0, block=1e-6, masked=0)
PAIRS = AttentionLatency(_PAIR, replace(_PAIR, block=2e-6), units=1, heads=2, source="test")
NONE, FULL = MemorySettings(checkpointing="none"), MemorySettings(checkpointing="full")

WINDOW = 4096
SKEWED = np.random.default_rng(0).lognormal(6.5, 1.4, 600).astype(int).clip(2, 2 * WINDOW)
DOCUMENTS = Documents(lengths=SKEWED, name="test", seed=0)
LARGER = ModelShape(layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, feed_forward=128, vocabulary=512)
ZERO_BUBBLE = {"schedule": "ZBVZeroBubble", "chunks": 2, "memory": NONE}
JOBS = {  # of every kind that passes are measured of
    "pipeline": (Degrees(pipeline=4), Policy("plain"), {}),
    "interleaved": (Degrees(pipeline=2), Policy("wlb_lazy"), {"schedule": "Interleaved1F1B", "chunks": 2}),
    "zero bubble": (Degrees(pipeline=2), Policy("plain"), ZERO_BUBBLE),
    "context": (Degrees(context=2), Policy("wlb_lazy", "hybrid"), {}),
    "data": (Degrees(shard=2), Policy("wlb_lazy"), {}),
    "runs": (Degrees(pipeline=2, shard=2), Policy("plain"), {"per_run": 2}),
    "tensor": (Degrees(tensor=2, pipeline=2, context=2), Policy("plain", "per_document"), {}),
    "slices": (Degrees(pipeline=2, context=2), Policy("slim", "hybrid"), {}),
    "shared": (Degrees(shard=2), Policy("slim"), {"packing": {"dp_merge": True}}),
    "asymmetric": (Degrees(pipeline=2), Policy("slim"), {"packing": {"asymmetric": True}, "memory": FULL}),
}


def job_of(name):
    degrees, policy, changes = JOBS[name]
    changes = {"window": WINDOW, "micro_batches": 4 * degrees.data, **changes}
    packing = POLICIES.configure(policy.packing, **changes.pop("packing", {}))
    cluster = replace(load_cluster("h100_roce"), gpus_per_node=2)
    job = Job(model=LARGER, degrees=degrees, cluster=cluster, **changes)
    return replace(job.under(policy), packing=packing)


def job(**changes):
    """A job of round numbers, whose steps can be worked out by hand: nothing travels, nothing is repeated."""
    facts = {"model": MODEL, "cluster": CLUSTER, "attention": PAIRS, "memory": NONE}
    return Job(**{"window": 64, "micro_batches": 8, **facts, **changes})


def pairs(length):
    """Pairs of a token and one that it sees, of a document."""
    return length * (length + 1) / 2


def make_planner(
    lengths,
    *,
    packing="plain",
    cost="quadratic:1,40",
    sharding="per_sequence",
    data_parallel=1,
    context_parallel=1,
    pipeline_parallel=1,
    seed=0,
    sources=(),
    fingerprint="",
    **job,
):
    """A planner of a job with these policies, by name or with their settings."""
    packing = POLICIES.configure(packing) if isinstance(packing, str) else packing
    policies = {"packing": replace(packing, cost_model=cost), "context": STRATEGIES.configure(sharding)}
    degrees = Degrees(shard=data_parallel, context=context_parallel, pipeline=pipeline_parallel)
    corpus = {"seed": seed, "sources": tuple(sources), "fingerprint": fingerprint}
    documents = Documents(lengths=np.asarray(lengths), **corpus)
    return Job(degrees=degrees, **policies, **job).planner(documents)


def figures(lengths, steps, **arguments):
    """The summary of steps of a planner as of `make_planner`, after some in which queues fill."""
    planner = make_planner(lengths, **arguments)
    for _ in range(8):
        planner.next()
    return Summary.of((planner.next() for _ in range(steps)), arguments["window"]).figures()


def shard(policy, lengths, total, ranks, latency, **settings):
    """How a policy divides a micro-batch: its name in the end, and the sharding."""
    return STRATEGIES.configure(policy, **settings).make(ranks, latency).shard(lengths, total)
