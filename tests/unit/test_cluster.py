"""Clusters: what ships, what a group of ranks communicates over, and files with mistakes."""

import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from wlb_titan.cost.cluster import Link, cluster_of_device, cluster_of_gpu, load_cluster, shipped
from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.profile import AttentionShape, cluster_latency
from wlb_titan.errors import PlanError
from wlb_titan.job import Job

GOOD = """
name = "test"
[gpu]
memory = 80e9
peak_flops = 1e15
linear_flops = 6e14
attention_flops = 6e14
attention_backward_flops = 5e14
memory_bandwidth = 2e12
[node]
gpus = 8
bandwidth = 400e9
latency = 1e-5
[network]
bandwidth = 25e9
latency = 2e-5
"""


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return str(path)

    return written


def test_shipped_clusters_are_found_by_their_gpus_name_and_have_no_more_memory_than_these():
    assert all(load_cluster(name) is load_cluster(name) for name in shipped())
    assert cluster_of_device("NVIDIA H100 80GB HBM3") == "h100_roce"
    assert cluster_of_device("NVIDIA GH200 480GB") is None  # 96 GB, not the 141 of an H200
    assert cluster_of_gpu("NVIDIA H200", 2**37) == replace(load_cluster("h200"), memory=2**37)
    assert cluster_of_gpu("NVIDIA H200", 2**38) == load_cluster("h200")
    unknown = cluster_of_gpu("NVIDIA RTX A6000", 48e9)
    assert (unknown.memory, unknown.peak_flops) == (48e9, load_cluster("h100_roce").peak_flops)
    assert "RTX A6000" in unknown.name


def test_what_may_be_left_out_has_a_default_and_a_profile_lies_beside_its_cluster(write, tmp_path):
    cluster = load_cluster(write(GOOD))
    assert (cluster.units, cluster.host_bandwidth, cluster.attention_profile) == (132, None, "")
    more = '[gpu]\nunits = 66\nattention_profile = "attention.json"'
    cluster = load_cluster(write(GOOD.replace("[gpu]", more)))
    assert (cluster.units, cluster.attention_profile) == (66, str(tmp_path / "attention.json"))


def test_a_gpu_of_half_the_multiprocessors_and_rate_takes_twice_as_long(write):
    shape = AttentionShape(heads=8)
    h100 = load_cluster("h100_roce")
    rates = {name: getattr(h100, name) / 2 for name in ("attention_flops", "attention_backward_flops")}
    half = replace(h100, units=66, **rates)
    lengths = np.array([1000, 30000])
    work = cluster_latency(half, shape).work(lengths, lengths)
    assert work == pytest.approx(2 * cluster_latency(h100, shape).work(lengths, lengths))


def test_links(write):
    cluster = load_cluster(write(GOOD))
    assert cluster.link(8) == cluster.node
    assert cluster.link(2, stride=4) == cluster.node
    # Two ranks in two nodes have one network card each; 16 that fill two nodes have eight a node.
    assert cluster.link(2, stride=8) == Link(25e9, 2e-5)
    assert cluster.link(16) == Link(200e9, 2e-5)
    assert cluster.link(8, stride=2) == Link(100e9, 2e-5)
    assert cluster.slower_network(2).network == Link(12.5e9, 4e-5)
    # An all-gather of 8 GB over 4 ranks: each receives three quarters.
    assert cluster.node.collective(8e9, 4) == pytest.approx(8e9 * 0.75 / 400e9 + 1e-5)
    assert cluster.node.collective(8e9, 1) == 0


def divided_job(cluster, tensor, context, **changes):
    model = replace(PAPER_MODELS["7B"], **changes)
    return Job(
        window=4096,
        micro_batches=1,
        model=model,
        degrees=Degrees(tensor=tensor, context=context),
        cluster=cluster,
    )


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"linear_flops": 1.2e15}, {"matrices", "experts", "head"}),
        ({"memory_bandwidth": 4e12}, {"elements"}),
        ({"node": Link(800e9, 1e-5)}, {"tensor"}),  # which fills a node
        ({"network": Link(50e9, 2e-5)}, {"context"}),
        ({"node": Link(400e9, 1.0), "network": Link(25e9, 1.0), "attention_flops": 1.0}, set()),
    ],
)
def test_twice_a_rate_halves_what_it_is_the_rate_of(write, changes, parts):
    cluster = load_cluster(write(GOOD))
    clusters = cluster, replace(cluster, **changes)
    before, after = (asdict(divided_job(one, 8, 2, routed_width=8192).token) for one in clusters)
    assert all(before.values())
    assert after == pytest.approx({part: time / (1 + (part in parts)) for part, time in before.items()})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("peak_flops = 1e15\n", "", "[gpu] peak_flops is missing"),
        (
            "peak_flops = 1e15",
            "peak_flops = 989",
            "[gpu] peak_flops is 989; it must be a number of FLOP/s, from 1e+08",
        ),
        ("latency = 2e-5", "latency = -1", "[network] latency is -1; it must be a number of seconds"),
        ("latency = 2e-5", 'latency = "2e-5"', "[network] latency is '2e-5'; it must be a number"),
        ("memory = 80e9", "memory = inf", "[gpu] memory is inf"),
        ("gpus = 8", "gpus = 8.5", "[node] gpus is 8.5; it must be a whole number of GPUs"),
        ("memory = 80e9", "memory = 80e9\nmemry = 1", "[gpu] memry is not known"),
        ('name = "test"', "colour = 3", "colour is not known"),
        ("[node]", "[node", "is not TOML"),
    ],
)
def test_mistakes_are_named(write, old, new, message):
    assert old in GOOD
    with pytest.raises(PlanError, match=r"there\.toml cannot be read.*h100_roce"):
        load_cluster("not/there.toml")
    with pytest.raises(PlanError, match=re.escape(message)):
        load_cluster(write(GOOD.replace(old, new)))


def test_multiprocessors_that_are_left_to_others_compute_no_attention():
    job = Job(window=65536, micro_batches=1)
    assert replace(job, sm_margin=16).latency == replace(job.latency, units=116)
