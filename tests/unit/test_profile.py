"""`wlb-titan profile`, its file, and the latency model that comes out of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.context import STRATEGIES
from wlb_titan.cost.analytic import Analytic
from wlb_titan.cost.attention_choice import cluster_latency, measured_cluster
from wlb_titan.cost.attention_fit import Point
from wlb_titan.cost.attention_hopper import hopper
from wlb_titan.cost.attention_latency import KernelCost, KeyTiling, Tiling
from wlb_titan.cost.attention_profile import AttentionShape, Entry, Profile
from wlb_titan.cost.cluster import load_cluster
from wlb_titan.cost.linear_profile import LinearProfile, line
from wlb_titan.cost.models import PAPER_MODELS
from wlb_titan.cost.workload import cost_model
from wlb_titan.errors import PlanError
from wlb_titan.job import Job

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "attention_profile.json"


@pytest.fixture
def profile() -> Profile:
    entries = []
    for head_dim in (64, 128):
        for index, direction in enumerate(("forward", "backward")):
            tiling = (Tiling if direction == "forward" else KeyTiling)(128, 64, 1024, 2)
            cost = KernelCost(tiling, 1e-5, 1e-10, 0.0, 1e-6 * (index + 1), 2e-6, 3e-7)
            points = (Point(128, 256, 8, 32, 1.5e-3), Point(1, 256, 8, 32, 0.5e-3))
            entries.append(Entry(head_dim, 8, "bfloat16", direction, cost, points, "triton"))
    return Profile("Some GPU", 100, "torch 2", tuple(entries))


def test_a_profile_is_read_as_it_was_written(profile, tmp_path):
    path = tmp_path / "folder" / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    record = json.loads(path.read_text())
    assert record["schema"] == 2
    assert record["entries"][1]["pass"] == "backward"
    assert record["entries"][1]["implementation"] == "triton"


def test_the_latency_model_takes_its_passes_units_and_heads_from_profile_and_shape(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    latency = Profile.load(path).latency(AttentionShape(head_dim=64, heads=16, group=8))
    assert latency.forward == profile.entries[0].cost
    assert latency.backward == profile.entries[1].cost
    assert (latency.units, latency.heads, latency.source) == (100, 16, "profile of Some GPU")


LINEAR = LinearProfile(
    dtype="bfloat16",
    matrices=((1e9, 1e-5 + 1e9 / 4e14), (1e12, 1e-5 + 1e12 / 4e14)),
    elements=((1e6, 2e-6 + 1e6 / 2e12), (1e9, 2e-6 + 1e9 / 2e12)),
    gathers=((1e6, 2e-5 + 1e6 / 3e11), (1e9, 2e-5 + 1e9 / 3e11)),
    ranks=8,
)


def test_measured_rates_take_the_place_of_the_clusters(profile, tmp_path):
    path = tmp_path / "profile.json"
    replace(profile, linear=LINEAR).save(path)
    assert Profile.load(path).linear == LINEAR
    assert LINEAR.link.bandwidth == pytest.approx(3e11) and LINEAR.link.latency == pytest.approx(2e-5)
    model = replace(PAPER_MODELS["7B"], kv_heads=4)
    sharding = STRATEGIES.configure("per_sequence", profile=str(path))
    job = Job(window=1024, micro_batches=4, model=model, sharding=sharding)
    device = measured_cluster(job.cluster, job.sharding.profile)
    assert device.linear_flops == pytest.approx(4e14)
    assert device.memory_bandwidth == pytest.approx(2e12)
    cluster = replace(load_cluster("h100_roce"), linear_flops=4e14, memory_bandwidth=2e12)
    measured = cost_model(str(path), job)
    by_hand = Analytic(model, cluster)
    one = np.array([1])
    attention = model.layers * job.latency.work(one, one)[0]
    assert measured.forward(one) == pytest.approx(by_hand.linear_forward + attention, rel=1e-4)


def test_a_line_has_no_negative_part():
    assert line([(1, 1), (2, 3), (4, 9)]) == (0.0, pytest.approx((19 / 9) / (1 + 4 / 9 + 16 / 81)))
    assert line([(1, 3), (2, 5), (4, 9)]) == (pytest.approx(1), pytest.approx(2))


def test_gathers_between_processes_are_measured():
    linear = pytest.importorskip("wlb_titan.commands.profile_linear")
    points = linear.gather_points(linear.LinearGrid((), (), (1024, 65536)), "cpu", 2)
    assert [size for size, _ in points] == [1024, 65536]
    assert all(seconds > 0 for _, seconds in points)


def test_values_of_another_head_dim_and_windows(profile, tmp_path):
    latent = [replace(entry, head_dim=192, v_head_dim=128) for entry in profile.entries[:2]]
    path = tmp_path / "profile.json"
    replace(profile, entries=(*profile.entries, *latent)).save(path)
    shape = AttentionShape(head_dim=192, v_head_dim=128, heads=16, group=8, windows=((128, 0.5),))
    assert Profile.load(path).entries[-1] == latent[1]
    assert Profile.load(path).latency(shape).windows == ((128, 0.5),)
    with pytest.raises(PlanError, match=r"head dim 192/128, only of 64, 128\..*profile --head-dim 192/128"):
        profile.latency(shape)
    assert cluster_latency(load_cluster("h100_roce"), shape) == replace(
        hopper(160, 16, group=8), windows=((128, 0.5),)
    )


def test_without_a_profile_the_figures_for_h100_are_taken():
    shape = AttentionShape(head_dim=96, heads=5)
    h100 = load_cluster("h100_roce")
    assert cluster_latency(h100, shape) == hopper(96, 5)
    slower = cluster_latency(replace(h100, attention_flops=h100.attention_flops / 2), shape)
    assert slower.forward.block == 2 * hopper(96, 5).forward.block
    assert slower.backward == hopper(96, 5).backward


def test_a_cluster_whose_profile_lacks_an_attention_is_scaled_with_a_warning():
    with pytest.warns(UserWarning, match=r"no attention of head dim 96.* scaled to the attention rates"):
        latency = cluster_latency(load_cluster("cpu"), AttentionShape(head_dim=96, heads=5))
    assert "scaled to CPU" in latency.source


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            AttentionShape(head_dim=192, group=8),
            r"Some GPU has no .* of head dim 192, only of 64, 128\.",
        ),
        (AttentionShape(head_dim=64, group=4), r"no attention of GQA group 4, only of 8 \(for head dim 64\)"),
        (
            AttentionShape(head_dim=64, group=8, dtype="float32"),
            r"of dtype float32, only of bfloat16 .*profile --head-dim 64 --group 8 --dtype float32",
        ),
    ],
)
def test_an_attention_that_was_not_measured_is_named(profile, shape, message):
    with pytest.raises(PlanError, match=message):
        profile.latency(shape)


def test_a_profile_without_a_backward_is_refused(profile):
    half = Profile("Some GPU", 100, "", profile.entries[:1])
    with pytest.raises(PlanError, match="no backward pass for head dim 64"):
        half.latency(AttentionShape(head_dim=64, group=8))


def test_files_that_are_no_profile_are_named(tmp_path, profile):
    path = tmp_path / "profile.json"
    with pytest.raises(PlanError, match=r"profile\.json cannot be read: No such file"):
        Profile.load(path)
    path.write_text("{")
    with pytest.raises(PlanError, match=r"profile\.json is not JSON"):
        Profile.load(path)
    for text in ('{"schema": 7}', "[]"):
        path.write_text(text)
        with pytest.raises(PlanError, match="reads schema 2"):
            Profile.load(path)
    profile.save(path)
    record = json.loads(path.read_text())
    del record["entries"][0]["tile"]
    path.write_text(json.dumps(record))
    with pytest.raises(PlanError, match="damaged: KeyError 'tile'"):
        Profile.load(path)
    record["entries"][0]["tile"] = "fast"
    path.write_text(json.dumps(record))
    with pytest.raises(PlanError, match="damaged: ValueError"):
        Profile.load(path)


def test_errors_compare_prediction_and_measurement(profile):
    first = profile.entries[0]
    cost = first.cost
    tiles, blocks, masked = cost.tiling.count(np.array([128]), np.array([256]))[:, 0]
    work = tiles * cost.tile + blocks * cost.block + masked * cost.masked + 256 * cost.key
    predicted = cost.launch + 8 * 32 * work / 100
    assert first.errors(100)[0] == pytest.approx(predicted / 1.5e-3 - 1)


def test_grids_have_no_case_twice_and_none_with_fewer_keys_than_queries():
    pytest.importorskip("wlb_titan.kernels")
    from wlb_titan.commands.profile_attention import CPU_GRID, GPU_GRID

    for grid in (CPU_GRID, GPU_GRID):
        cases = list(grid.cases(grid.heads))
        assert len(set(cases)) == len(cases)
        assert all(1 <= q_len <= kv_len and segments >= 1 for q_len, kv_len, segments in cases)
        assert all(q * kv * segments * grid.heads <= grid.pairs for q, kv, segments in cases)
        assert {q_len for q_len, _, _ in cases} == set(grid.q_lens)


def test_the_command_measures_this_machine_and_writes_what_planning_reads(tmp_path, monkeypatch, request):
    """Real timings of the reference attention, on a smaller grid so that it takes a second."""
    command = pytest.importorskip("wlb_titan.commands.profile")
    small = command.grid.CPU_GRID._replace(q_lens=(16, 64), kv_lens=(256,), keys=(256, 512), pairs=2**22)
    monkeypatch.setattr(command.grid, "CPU_GRID", small)
    monkeypatch.setattr(command.grid, "MILLISECONDS", 5.0)
    few = command.linear.CPU_GRID._replace(tokens=(64,), widths=(64, 128))
    monkeypatch.setattr(command.linear, "CPU_GRID", few)
    threads = command.torch.get_num_threads()
    request.addfinalizer(lambda: command.torch.set_num_threads(threads))
    command.torch.set_num_threads(1)  # several on a busy machine wait for each other
    path = tmp_path / "profile.json"
    arguments = ["--device", "cpu", "--head-dim", "16/8", "--group", "1", "--group", "3"]
    arguments += ["--output", str(path)]
    result = CliRunner().invoke(command.profile, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "backward" in result.output
    written = Profile.load(path)
    assert [(e.dims, e.group, e.direction) for e in written.entries] == [
        ("16/8", 1, "forward"), ("16/8", 1, "backward"), ("16/8", 3, "forward"), ("16/8", 3, "backward")
    ]  # fmt: skip
    assert all(point.heads == 6 for point in written.entries[2].points)  # 4 rounded up to a multiple of 3
    assert all(point.seconds > 0 for entry in written.entries for point in entry.points)
    assert 1e7 < written.linear.matrix_flops < 1e14 and 1e7 < written.linear.element_bandwidth < 1e14
    assert written.linear.link is None and "[gpu] linear_flops = " in result.output
    latency = written.latency(AttentionShape(head_dim=16, v_head_dim=8, heads=4, group=1, dtype="float32"))
    long, short = (latency.seconds([np.array([[0, 0, n]])]).sum() for n in (8192, 512))
    assert long > 4 * short > 0


def test_cuda_is_asked_for_where_there_is_none(tmp_path, monkeypatch):
    command = pytest.importorskip("wlb_titan.commands.profile")
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    arguments = ["--device", "cuda", "--output", str(tmp_path / "x")]
    result = CliRunner().invoke(command.profile, arguments)
    assert "no CUDA device" in str(result.exception)


def test_the_recorded_profile_of_a_cpu_predicts_what_it_was_made_from():
    profile = Profile.load(RECORDED)
    assert {entry.direction for entry in profile.entries} == {"forward", "backward"}
    for entry in profile.entries:
        assert len(entry.points) >= 40
        assert np.median(np.abs(entry.errors(profile.units))) < 0.15
