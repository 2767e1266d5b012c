"""`wlb-titan profile`, its file, and the latency model that comes out of it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT
from wlb_titan.kernels import torch_cpu

from wlb_titan.commands import profile as command
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.attention_kernels import Point, hopper
from wlb_titan.cost.attention_latency import KernelCost, KeyTiling, Tiling
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.profile import (
    AttentionShape,
    Entry,
    LinearProfile,
    Profile,
    configured_latency,
    measured_cluster,
    rate,
)
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.layers.token import TokenSeconds

pytestmark = pytest.mark.slow

RECORDED = ROOT / "benchmarks" / "results" / "cpu" / "attention_profile.json"
LINEAR = LinearProfile("bfloat16", 4e14, 2e12)


@pytest.fixture
def profile() -> Profile:
    """Of head dims 64, 128 and, for values of another, 192/128."""
    entries = []
    for head_dim, v_head_dim in ((64, None), (128, None), (192, 128)):
        for direction, tiling, tile in (("forward", Tiling, 1e-6), ("backward", KeyTiling, 2e-6)):
            cost = KernelCost(tiling(128, 64, 1024, 2), 1e-5, 1e-10, 0.0, tile, 2e-6, 3e-7)
            points = (Point(128, 256, 8, 32, 1.5e-3), Point(1, 256, 8, 32, 0.5e-3))
            entries.append(Entry(head_dim, 8, "bfloat16", direction, cost, points, "triton", v_head_dim))
    return Profile("Some GPU", 100, "torch 2", tuple(entries))


@pytest.mark.parametrize("linear", [None, LINEAR])
def test_a_profile_is_read_as_it_was_written(profile, tmp_path, linear):
    written = replace(profile, linear=linear)
    written.save(tmp_path / "folder" / "profile.json")
    assert Profile.load(tmp_path / "folder" / "profile.json") == written


def test_the_latency_model_takes_its_passes_units_and_heads_from_profile_and_shape(profile):
    latency = profile.latency(AttentionShape(head_dim=64, heads=16, group=8, windows=((128, 0.5),)))
    assert (latency.forward, latency.backward) == tuple(entry.cost for entry in profile.entries[:2])
    assert (latency.units, latency.heads, latency.source) == (100, 16, "profile of Some GPU")
    assert (latency.group, latency.measured_to, latency.windows) == (8, 256, ((128, 0.5),))
    latent = profile.latency(AttentionShape(head_dim=192, v_head_dim=128, group=8))
    assert latent.forward == profile.entries[4].cost


def test_an_attention_that_was_not_measured_is_named(profile):
    for shape, kind in (
        (AttentionShape(head_dim=192, group=8), "head dim 192, GQA group 8, bfloat16; it has head dim 64"),
        (AttentionShape(head_dim=64, group=4), "GQA group 4"),
        (AttentionShape(head_dim=64, group=8, dtype="float32"), "float32"),
        (AttentionShape(head_dim=64, v_head_dim=32, group=8), "head dim 64/32"),
    ):
        with pytest.raises(PlanError, match=f"Some GPU has no attention of .*{kind}.*wlb-titan profile FILE"):
            profile.latency(shape)


def test_measured_rates_take_the_place_of_the_clusters(profile, tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    replace(profile, linear=LINEAR).save(path)
    monkeypatch.setattr(np.linalg, "lstsq", None)  # whose last bits differ between the hosts of a job
    model = replace(PAPER_MODELS["7B"], kv_heads=4)
    sharding = STRATEGIES.configure("per_sequence", profile=str(path))
    job = Job(window=1024, micro_batches=4, model=model, context=sharding)
    device = measured_cluster(job.cluster, job.context.profile)
    assert device.linear_flops == 4e14
    assert device.memory_bandwidth == pytest.approx(2e12)
    assert job.token == TokenSeconds.of(job, device)
    assert job.latency.source == "profile of Some GPU"


def test_a_clusters_profile_that_cannot_be_read_is_an_error_for_all_its_times(tmp_path):
    cluster = replace(load_cluster("cpu"), attention_profile=str(tmp_path / "lost.json"))
    for read, what in ((measured_cluster, ""), (configured_latency, AttentionShape())):
        with pytest.raises(PlanError, match=r"lost\.json is not a profile") as error:
            read(cluster, what)
        assert error.value.setting == "wlb.cluster"


def test_a_rate_leaves_the_fixed_part_out_which_is_not_negative():
    assert rate([(1, 3), (2, 5), (4, 9)]) == pytest.approx(1 / 2)
    assert 4 / 9 < rate([(1, 1), (2, 3), (4, 9)]) < 1
    assert rate([(100, 5), (400, 4)]) == 100, "of a busy machine, whose times do not grow with the size"


def test_without_a_profile_the_figures_for_h100_are_taken():
    shape = AttentionShape(head_dim=96, heads=5)
    h100, own = load_cluster("h100_roce"), hopper(96, 5)
    gluon = configured_latency(h100, shape, "gluon")
    assert replace(gluon, source=own.source) == own and "Gluon's forward and Gluon's backward" in gluon.source
    slower = configured_latency(replace(h100, attention_flops=h100.attention_flops / 2), shape, "gluon")
    assert (slower.forward.block, slower.backward) == (2 * own.forward.block, own.backward)
    latent = AttentionShape(head_dim=192, v_head_dim=128, heads=16, group=8, windows=((128, 0.5),))
    found = configured_latency(h100, latent, "gluon")
    assert replace(found, source=own.source) == replace(hopper(160, 16, group=8), windows=((128, 0.5),))


def test_times_are_those_of_the_backward_that_a_gpu_takes():
    """Of one document of 64K, as timed on an H100 (benchmarks/results/nvidia_h100), forward and backward."""
    h100, dims = load_cluster("h100_roce"), AttentionShape(head_dim=128, heads=32, group=8)
    b200 = load_cluster("b200")
    fa4 = replace(b200, attention_flops=1418e12, attention_backward_flops=1208e12)
    for which in ("forward", "backward"):
        by_name, published = configured_latency(b200, dims, "fa4"), configured_latency(fa4, dims, "torch")
        assert getattr(by_name, which).block == pytest.approx(getattr(published, which).block, rel=0.03)
    document = [np.array([[0, 0, 65536]])]
    seconds = {}
    for kernels in ("auto", "triton"):
        seconds[kernels] = configured_latency(h100, dims, kernels).seconds(document)[0]
    assert seconds["auto"] == pytest.approx([0.0555, 0.2467], rel=0.03)
    assert seconds["triton"] == pytest.approx([0.0784, 0.2467], rel=0.03)
    assert configured_latency(h100, dims).source.endswith("Gluon's forward and Triton's backward pass")
    job = Job(window=65536, micro_batches=4, cluster=h100, model=replace(Job.model, heads=32))
    gluon = replace(job, implementation="gluon").latency
    longer = job.latency.seconds(document)[0, 1] / gluon.seconds(document)[0, 1]
    assert longer == pytest.approx(1.53, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "Extra data"),
        ('"schema": 3', '"schema": 2', "schema is 2, not 3"),
        ('"tile"', '"tiles"', "entries.0.cost.tile is missing"),
        ('"tiles_of"', '"tile_of"', "an entry lacks tiles_of"),
        ('"layer": [0.0, 0.0]', '"layer": ["a", "b"]', 'layer.0 is "a", but should be a valid number'),
        ('"layer": [0.0, 0.0]', '"layer": [-1.0, 0.0]', "layer.0 is -1.0, but should be"),
        ('"linear_flops": ', '"linear_flops": -', "linear_flops is -4.*, but should be greater"),
    ],
)
def test_files_that_are_no_profile_are_named(profile, tmp_path, old, new, message):
    path = tmp_path / "profile.json"
    with pytest.raises(PlanError, match=r"profile\.json is not .*: No such file"):
        Profile.load(path)
    replace(profile, linear=LINEAR).save(path)
    text = path.read_text()
    for spoilt, said in ((text.replace(old, new, 1), message), ("[]", "it is .*should be a table")):
        assert spoilt != text
        path.write_text(spoilt)
        with pytest.raises(PlanError, match=rf"profile\.json is not a profile .*{said}.*again"):
            Profile.load(path)


def test_grids_have_no_case_twice_and_none_with_fewer_keys_than_queries():
    for grid in (command.CPU_GRID, command.GPU_GRID):
        cases = list(grid.cases(grid.heads))
        assert len(set(cases)) == len(cases)
        assert all(1 <= q_len <= kv_len and segments >= 1 for q_len, kv_len, segments in cases)
        assert all(q * kv * segments * grid.heads <= grid.pairs for q, kv, segments in cases)
        assert {q_len for q_len, _, _ in cases} == set(grid.q_lens)


def test_the_command_writes_what_planning_reads(tmp_path, monkeypatch, request, on_terminal):
    """The reference attention of two files' models on a smaller grid; no time is judged."""
    small = command.CPU_GRID._replace(q_lens=(16, 64), kv_lens=(256,), keys=(256, 512), pairs=2**22)
    monkeypatch.setattr(command, "CPU_GRID", small)
    monkeypatch.setattr(command, "MILLISECONDS", 5.0)
    monkeypatch.setitem(command.LINEAR_SIZES, "cpu", ((64,), (64, 128)))
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # several on a busy machine wait for each other
    files = [str(tmp_path / f"{name}.toml") for name in ("llama", "same", "latent")]
    bases = ["llama3_debug"] * 2 + ["torchtitan.models.deepseek_v3.config_registry:deepseek_v3_debugmodel"]
    for file, base in zip(files, bases, strict=True):
        settings = 'wlb.device = "cpu"\ntraining.mixed_precision_param = "float32"\n'
        Path(file).write_text(f'base = "{base}"\n{settings}')
    path = tmp_path / "profile.json"
    said, shown = on_terminal("profile", *files, "--output", path)
    assert "backward" in said and "[gpu] linear_flops = " in said
    assert any(line.endswith(", round 1") for line in shown)
    written = Profile.load(path)
    kinds = ["head dim 32, GQA group 2, float32"] * 2 + ["head dim 192/128, GQA group 1, float32"] * 2
    assert [entry.shape.kind for entry in written.entries] == kinds
    assert [entry.direction for entry in written.entries] == ["forward", "backward"] * 2
    assert all(point.seconds > 0 for entry in written.entries for point in entry.points)
    assert 0 < written.linear.linear_flops < np.inf and 0 < written.linear.memory_bandwidth < np.inf


def test_the_command_says_how_wrong_kernels_are(tmp_path, monkeypatch, on_terminal):
    file = tmp_path / "job.toml"
    file.write_text('base = "llama3_debug"\nwlb.device = "cpu"\ntraining.mixed_precision_param = "float32"\n')
    forward = torch_cpu.forward

    def wrong(*inputs):
        out, lse = forward(*inputs)
        return out * 1.1, lse

    def errors():
        said, _ = on_terminal("profile", file, "--check")
        (row,) = re.findall(r"torch_cpu" + r"\s+(\S+)" * 5, said)
        return [float(error) for error in row]

    assert max(errors()) < 1e-4
    monkeypatch.setattr(torch_cpu, "forward", wrong)
    out, lse, *_ = errors()
    assert out == pytest.approx(0.1, rel=0.01) and lse < 1e-4


def test_the_recorded_profile_of_a_cpu_predicts_what_it_was_made_from():
    profile = Profile.load(RECORDED)
    assert {entry.direction for entry in profile.entries} == {"forward", "backward"}
    for entry in profile.entries:
        assert len(entry.points) >= 40
        assert np.median(np.abs(entry.errors(profile.units))) < 0.15
