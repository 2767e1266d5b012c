"""Clusters, what a group of ranks communicates over, and the work of documents by every cost model."""

import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from wlb_titan.cost.cluster import Link, cluster_of_device, cluster_of_gpu, load_cluster, shipped
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.profile import AttentionShape, configured_latency
from wlb_titan.cost.workload import Quadratic, cost_model, workload
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import PlanError
from wlb_titan.job import Job

GOOD = """
name = "test"
node = { gpus = 8, bandwidth = 400e9, latency = 1e-5 }
network = { bandwidth = 25e9, latency = 2e-5 }
[gpu]
memory = 80e9
peak_flops = 1e15
linear_flops = 6e14
attention_flops = 6e14
attention_backward_flops = 5e14
memory_bandwidth = 2e12
"""
SHAPE = PAPER_MODELS["7B"]
JOB = Job(window=4096, micro_batches=1, model=SHAPE)
EIGHT_BY_TWO = Degrees(tensor=8, context=2)


def loaded(folder, old="", new=""):
    """A good cluster's file, but for this."""
    (folder / "cluster.toml").write_text(GOOD.replace(old, new) if old else GOOD)
    return load_cluster(str(folder / "cluster.toml"))


def test_shipped_clusters_are_found_by_their_gpus_name_and_have_no_more_memory_than_these():
    assert all(load_cluster(name) is load_cluster(name) for name in shipped())
    assert cluster_of_device("NVIDIA H100 80GB HBM3") == "h100_roce"
    assert cluster_of_device("NVIDIA GH200 480GB") is None  # 96 GB, not the 141 of an H200
    for name, cluster in (("A100-SXM4-80GB", "a100"), ("B200", "b200"), ("L40S", "l40s"), ("L40", None)):
        assert cluster_of_device(f"NVIDIA {name}") == cluster
    assert cluster_of_gpu("NVIDIA H200", 2**37) == replace(load_cluster("h200"), memory=2**37)
    assert cluster_of_gpu("NVIDIA H200", 2**38) == load_cluster("h200")
    unknown = cluster_of_gpu("NVIDIA RTX A6000", 48e9)
    assert (unknown.memory, unknown.peak_flops) == (48e9, load_cluster("h100_roce").peak_flops)
    assert "RTX A6000" in unknown.name
    with pytest.raises(PlanError, match=r"there\.toml cannot be read.*h100_roce"):
        load_cluster("not/there.toml")


def test_what_may_be_left_out_has_a_default_and_a_profile_lies_beside_its_cluster(tmp_path):
    cluster = loaded(tmp_path)
    assert (cluster.units, cluster.attention_profile) == (132, "")
    cluster = loaded(tmp_path, "[gpu]", '[gpu]\nunits = 66\nattention_profile = "attention.json"')
    assert (cluster.units, cluster.attention_profile) == (66, str(tmp_path / "attention.json"))


def test_a_gpu_of_half_the_multiprocessors_and_rate_takes_twice_as_long():
    shape = AttentionShape(heads=8)
    h100 = load_cluster("h100_roce")
    rates = {name: getattr(h100, name) / 2 for name in ("attention_flops", "attention_backward_flops")}
    half = replace(h100, units=66, **rates)
    lengths = np.array([1000, 30000])
    work = configured_latency(half, shape).work(lengths, lengths)
    assert work == pytest.approx(2 * configured_latency(h100, shape).work(lengths, lengths))


def test_groups_communicate_over_the_links_that_they_share(tmp_path):
    cluster = loaded(tmp_path)
    assert cluster.link(8) == cluster.node
    assert cluster.link(2, stride=4) == cluster.node
    # Two ranks in two nodes have one network card each; 16 that fill two nodes have eight a node.
    assert cluster.link(2, stride=8) == Link(25e9, 2e-5)
    assert cluster.link(16) == Link(200e9, 2e-5)
    assert cluster.link(8, stride=2) == Link(100e9, 2e-5)
    # An all-gather of 8 GB over 4 ranks: each receives three quarters.
    assert cluster.node.collective(8e9, 4) == pytest.approx(8e9 * 0.75 / 400e9 + 1e-5)
    assert cluster.node.collective(8e9, 1) == 0


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
def test_twice_a_rate_halves_what_it_is_the_rate_of(tmp_path, changes, parts):
    cluster = loaded(tmp_path)
    clusters = cluster, replace(cluster, **changes)
    job = replace(JOB, degrees=EIGHT_BY_TWO, model=replace(SHAPE, routed_width=8192))
    before, after = (asdict(job.on(one).token) for one in clusters)
    assert before.pop("layer") == after.pop("layer") == (0.0, 0.0)
    assert all(before.values())
    assert after == pytest.approx({part: time / (1 + (part in parts)) for part, time in before.items()})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("peak_flops = 1e15\n", "", "gpu.peak_flops is missing"),
        ("= 1e15", "= 989", "gpu.peak_flops is 989, but should be greater than or equal to 100000000"),
        ("latency = 2e-5", "latency = -1", "network.latency is -1, but should be greater than or equal to 0"),
        ("memory = 80e9", "memory = inf", "gpu.memory is Infinity, but should be a finite number"),
        ('name = "test"', 'kind = "tpu"', 'kind is "tpu", but should be '),
        ("gpus = 8", "gpus = 8.5", "node.gpus is 8.5, but should be a valid integer"),
        ("memory = 80e9", "memory = 80e9\nmemry = 1", "gpu.memry is not known"),
        ("[gpu]", "[gpu", "(at line 5, column 5)"),
    ],
)
def test_mistakes_are_named(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(PlanError, match=re.escape(message)):
        loaded(tmp_path, old, new)


def test_multiprocessors_that_are_left_to_others_compute_no_attention():
    job = Job(window=65536, micro_batches=1)
    assert replace(job, sm_margin=16).latency == replace(job.latency, units=116)


def test_quadratic():
    lengths, model = np.array([1, 10]), Quadratic(2.0, 3.0)
    assert workload(model, lengths).tolist() == [5.0, 230.0]
    assert model.backward(lengths) / model.forward(lengths) == pytest.approx([2.0] * 2)


def test_the_operations_of_llama2_7b():
    assert SHAPE.linear_weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    attention = 2 * 1000**2 * 4096 * 32
    linear = 2 * SHAPE.linear_weights * 1000
    assert SHAPE.flops(np.array([1000])) == 3 * (attention + linear)


def test_a_window_makes_the_work_of_its_layers_linear():
    """Counted pair by pair: d^2 is twice the lower triangle but for half of its diagonal."""
    shape = replace(SHAPE, windows=(*[7] * 30, 100, *[None] * (SHAPE.layers - 31)))
    lengths = np.array([1, 5, 7, 8, 60])
    for d, squares in zip(lengths, shape.squares(lengths), strict=True):
        pairs = [sum(min(row + 1, w) for row in range(d)) for w in (7, 100, d)]
        exact = 30 * pairs[0] + pairs[1] + pairs[2]
        assert squares == 2 * exact - (30 * min(7, d) + 2 * d)
    d = np.array([100_000])
    assert shape.squares(d)[0] == pytest.approx(SHAPE.squares(d)[0] / 32, rel=0.01)


def test_values_may_have_another_head_dim():
    latent = replace(SHAPE, head_dim=192, v_head_dim=128, projections=0)
    assert latent.linear_weights == 32 * 3 * 4096 * 11008 + 4096 * 32000
    d = np.array([1000])
    assert latent.flops(d) == 3 * (2 * latent.linear_weights * 1000 + 1000**2 * 32 * 32 * (192 + 128))


def test_work_is_superlinear_and_more_so_in_the_backward_pass_and_divided_by_parallelism():
    alone, divided = (cost_model("simulated", replace(JOB, degrees=of)) for of in (Degrees(), EIGHT_BY_TWO))
    lengths = np.array([1024, 131072])
    per_token = [seconds(lengths) / lengths for seconds in (divided.forward, divided.backward)]
    forward, backward = (long / short for short, long in per_token)
    assert 1.1 < forward < backward
    # Communication comes on top of a sixteenth.
    assert (alone.forward(lengths) / 16 < divided.forward(lengths)).all()
    assert (divided.forward(lengths) < alone.forward(lengths)).all()
