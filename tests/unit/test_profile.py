"""`wlb-titan profile`, its file, and the latency model that comes out of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

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
    cluster_latency,
    line,
    measured_cluster,
)
from wlb_titan.cost.workload import Analytic, cost_model
from wlb_titan.errors import PlanError
from wlb_titan.job import Job

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "attention_profile.json"
LINEAR = LinearProfile(
    dtype="bfloat16",
    matrices=((1e9, 1e-5 + 1e9 / 4e14), (1e12, 1e-5 + 1e12 / 4e14)),
    elements=((1e6, 2e-6 + 1e6 / 2e12), (1e9, 2e-6 + 1e9 / 2e12)),
    gathers=((1e6, 2e-5 + 1e6 / 3e11), (1e9, 2e-5 + 1e9 / 3e11)),
    ranks=8,
)


@pytest.fixture
def profile() -> Profile:
    """Of head dims 64, 128 and, for values of another, 192/128."""
    entries = []
    for head_dim, v_head_dim in ((64, None), (128, None), (192, 128)):
        for index, direction in enumerate(("forward", "backward")):
            tiling = (Tiling if direction == "forward" else KeyTiling)(128, 64, 1024, 2)
            cost = KernelCost(tiling, 1e-5, 1e-10, 0.0, 1e-6 * (index + 1), 2e-6, 3e-7)
            points = (Point(128, 256, 8, 32, 1.5e-3), Point(1, 256, 8, 32, 0.5e-3))
            entries.append(Entry(head_dim, 8, "bfloat16", direction, cost, points, "triton", v_head_dim))
    return Profile("Some GPU", 100, "torch 2", tuple(entries))


@pytest.mark.parametrize("linear", [None, LINEAR])
def test_a_profile_is_read_as_it_was_written(profile, tmp_path, linear):
    path = tmp_path / "folder" / "profile.json"
    written = replace(profile, linear=linear)
    written.save(path)
    assert Profile.load(path) == written
    record = json.loads(path.read_text())
    assert record["schema"] == 2
    entry = record["entries"][1]
    assert (entry["pass"], entry["implementation"], entry["tiles_of"]) == ("backward", "triton", "keys")


def test_the_latency_model_takes_its_passes_units_and_heads_from_profile_and_shape(profile):
    latency = profile.latency(AttentionShape(head_dim=64, heads=16, group=8, windows=((128, 0.5),)))
    assert (latency.forward, latency.backward) == tuple(entry.cost for entry in profile.entries[:2])
    assert (latency.units, latency.heads, latency.source) == (100, 16, "profile of Some GPU")
    assert (latency.group, latency.measured_to, latency.windows) == (8, 256, ((128, 0.5),))
    latent = profile.latency(AttentionShape(head_dim=192, v_head_dim=128, group=8))
    assert latent.forward == profile.entries[4].cost


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AttentionShape(head_dim=192, group=8), "head dim 192, GQA group 8, bfloat16; it has head dim 64"),
        (AttentionShape(head_dim=64, group=4), "GQA group 4, .*profile --head-dim 64 --group 4"),
        (AttentionShape(head_dim=64, group=8, dtype="float32"), "float32; .* --dtype float32"),
        (AttentionShape(head_dim=64, v_head_dim=32, group=8), "head dim 64/32.* --head-dim 64/32"),
    ],
)
def test_an_attention_that_was_not_measured_is_named(profile, shape, message):
    with pytest.raises(PlanError, match=f"Some GPU has no attention of .*{message}"):
        profile.latency(shape)
    half = replace(profile, entries=profile.entries[:1])
    with pytest.raises(PlanError, match="no backward pass of the attention of head dim 64"):
        half.latency(AttentionShape(head_dim=64, group=8))


def test_measured_rates_take_the_place_of_the_clusters(profile, tmp_path):
    path = tmp_path / "profile.json"
    replace(profile, linear=LINEAR).save(path)
    assert LINEAR.link.bandwidth == pytest.approx(3e11) and LINEAR.link.latency == pytest.approx(2e-5)
    model = replace(PAPER_MODELS["7B"], kv_heads=4)
    sharding = STRATEGIES.configure("per_sequence", profile=str(path))
    job = Job(window=1024, micro_batches=4, model=model, sharding=sharding)
    device = measured_cluster(job.cluster, job.sharding.profile)
    assert device.linear_flops == pytest.approx(4e14)
    assert device.memory_bandwidth == pytest.approx(2e12)
    measured = cost_model(str(path), job)
    one = np.array([1])
    attention = model.layers * job.latency.work(one, one)[0]
    linear = Analytic(job, device).linear_forward
    assert measured.forward(one) == pytest.approx(linear + attention, rel=1e-4)


def test_a_line_has_no_negative_part():
    fixed, each = line([(1, 1), (2, 3), (4, 9)])
    assert fixed == 0 and 1 < each < 9 / 4
    assert line([(1, 3), (2, 5), (4, 9)]) == (pytest.approx(1), pytest.approx(2))


def test_without_a_profile_the_figures_for_h100_are_taken():
    shape = AttentionShape(head_dim=96, heads=5)
    h100 = load_cluster("h100_roce")
    assert cluster_latency(h100, shape) == hopper(96, 5)
    slower = cluster_latency(replace(h100, attention_flops=h100.attention_flops / 2), shape)
    assert slower.forward.block == 2 * hopper(96, 5).forward.block
    assert slower.backward == hopper(96, 5).backward
    latent = AttentionShape(head_dim=192, v_head_dim=128, heads=16, group=8, windows=((128, 0.5),))
    assert cluster_latency(h100, latent) == replace(hopper(160, 16, group=8), windows=((128, 0.5),))


def test_a_cluster_whose_profile_lacks_an_attention_is_scaled_with_a_warning():
    with pytest.warns(UserWarning, match=r"no attention of head dim 96.* scaled to the attention rates"):
        latency = cluster_latency(load_cluster("cpu"), AttentionShape(head_dim=96, heads=5))
    assert "scaled to CPU" in latency.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: "{", "JSONDecodeError"),
        (lambda record: [], "TypeError"),
        (lambda record: {**record, "schema": 7}, "schema is 7, not 2"),
        (lambda record: record["entries"][0].pop("tile") and record, "KeyError 'tile'"),
        (lambda record: record["entries"][0].update(tile="fast") or record, "ValueError"),
    ],
    ids=["JSON", "a list", "schema", "missing", "text"],
)
def test_files_that_are_no_profile_are_named(profile, tmp_path, change, message):
    path = tmp_path / "profile.json"
    with pytest.raises(PlanError, match=r"profile\.json cannot be read: No such file"):
        Profile.load(path)
    profile.save(path)
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(PlanError, match=rf"profile\.json is not a profile .*{message}.*again"):
        Profile.load(path)


def test_errors_compare_prediction_and_measurement(profile):
    """Measured in twice the time, predictions are half of it."""
    entry = profile.entries[0]
    predicted = [p.seconds * (1 + e) for p, e in zip(entry.points, entry.errors(100), strict=True)]
    for factor, error in ((1, 0), (2, -0.5)):
        points = tuple(p._replace(seconds=factor * s) for p, s in zip(entry.points, predicted, strict=True))
        assert replace(entry, points=points).errors(100) == pytest.approx(error)


def test_grids_have_no_case_twice_and_none_with_fewer_keys_than_queries():
    for grid in (command.CPU_GRID, command.GPU_GRID):
        cases = list(grid.cases(grid.heads))
        assert len(set(cases)) == len(cases)
        assert all(1 <= q_len <= kv_len and segments >= 1 for q_len, kv_len, segments in cases)
        assert all(q * kv * segments * grid.heads <= grid.pairs for q, kv, segments in cases)
        assert {q_len for q_len, _, _ in cases} == set(grid.q_lens)


def test_gathers_between_processes_are_measured():
    points = command.gather_points((1024, 65536), "cpu", 2)
    assert [size for size, _ in points] == [1024, 65536]
    assert all(seconds > 0 for _, seconds in points)


def test_the_command_measures_this_machine_and_writes_what_planning_reads(tmp_path, monkeypatch, request):
    """The reference attention on a smaller grid, so that it takes a second; no time is judged."""
    small = command.CPU_GRID._replace(q_lens=(16, 64), kv_lens=(256,), keys=(256, 512), pairs=2**22)
    monkeypatch.setattr(command, "CPU_GRID", small)
    monkeypatch.setattr(command, "MILLISECONDS", 5.0)
    monkeypatch.setattr(command, "CPU_LINEAR", command.CPU_LINEAR._replace(tokens=(64,), widths=(64, 128)))
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # several on a busy machine wait for each other
    path = tmp_path / "profile.json"
    arguments = ["--device", "cpu", "--head-dim", "16/8", "--group", "1", "--group", "3"]
    arguments += ["--output", str(path)]
    result = CliRunner().invoke(command.profile, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "backward" in result.output and "[gpu] linear_flops = " in result.output
    written = Profile.load(path)
    assert [(e.shape.dims, e.group, e.direction) for e in written.entries] == [
        ("16/8", 1, "forward"), ("16/8", 1, "backward"), ("16/8", 3, "forward"), ("16/8", 3, "backward")
    ]  # fmt: skip
    assert all(point.heads == 6 for point in written.entries[2].points)  # 4 rounded up to a multiple of 3
    assert all(point.seconds > 0 for entry in written.entries for point in entry.points)
    assert written.linear.matrix_flops > 0 and written.linear.element_bandwidth > 0
    assert written.linear.link is None
    shape = AttentionShape(head_dim=16, v_head_dim=8, heads=4, group=1, dtype="float32")
    assert written.latency(shape).measured_to == 256


def test_cuda_is_asked_for_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--device", "cuda", "--output", str(tmp_path / "x")]
    result = CliRunner().invoke(command.profile, arguments)
    assert "no CUDA device" in str(result.exception)


def test_the_recorded_profile_of_a_cpu_predicts_what_it_was_made_from():
    profile = Profile.load(RECORDED)
    assert {entry.direction for entry in profile.entries} == {"forward", "backward"}
    for entry in profile.entries:
        assert len(entry.points) >= 40
        assert np.median(np.abs(entry.errors(profile.units))) < 0.15
