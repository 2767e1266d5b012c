"""The benchmark's cases and counts, and that the script runs from end to end (on the CPU, with the
reference).
"""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest
import torch
from oracle import packed, visible
from wlb_titan.kernels.segments import Shape, check_segments

from wlb_titan.commands.profile import GPU_GRID, time_attention
from wlb_titan.cost.attention_kernels import Point, predict, tilings
from wlb_titan.cost.attention_latency import AttentionLatency, KernelCost
from wlb_titan.cost.profile import Profile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention

    return attention


def test_cases_are_valid(benchmark):
    import attention_cases

    found = attention_cases.cases()
    assert {case.group for case in found} == set("abcdef")
    for case in found:
        q_tokens = int((case.segments[:, 0] + case.segments[:, 1]).max())
        check_segments(
            case.segments.numpy(), q_tokens, max(sum(case.documents), int(case.segments[:, 3].max()))
        )
        assert int(case.segments[:, 1].sum()) == q_tokens, "no padding"


@pytest.mark.parametrize("heads", [(32, 4), (32, 32), (16, 8), (12, 12)], ids=str)
def test_divisions_that_are_timed_can_run_and_differ_in_speed_only(benchmark, heads):
    import attention_divisions
    from wlb_titan.kernels import gluon_launch

    group = heads[0] // heads[1]
    found = list(attention_divisions.others(group, heads[1]))
    assert len(found) == len(set(found)) > 1
    for one in found:
        assert isinstance(one, gluon_launch.Division)
        assert group % (one.split * one.pack) == 0 and 1 <= one.section <= heads[1]


def test_shards_add_up(benchmark):
    from attention_cases import pairs, shard, whole

    documents = [3000, 7, 640, 1]
    shards = [shard(documents, 4, rank) for rank in range(4)]
    assert sum(pairs(s) for s in shards) == pairs(whole(documents))
    assert sum(int(s[:, 1].sum()) for s in shards) == sum(documents)


def test_flops_count_the_real_mask(benchmark):
    from attention_cases import flops, pairs

    segments = torch.tensor([[0, 5, 0, 5], [5, 3, 2, 9], [8, 1, 11, 1]], dtype=torch.int32)
    assert pairs(segments) == int(visible(segments, 9, 12).sum())
    assert flops(segments, Shape(4, 2, 16, 8)) == 2 * pairs(segments) * 4 * (16 + 8)


def test_time_attention():
    forward, backward = time_attention(packed([20, 30]), Shape(2, 1, 16, 16), device="cpu", milliseconds=1)
    assert forward > 0 and backward > 0


@pytest.fixture
def rehearse(benchmark, tmp_path, monkeypatch, capsys):
    """Runs the program on the CPU with interpreted kernels, one tiny case; its rows and what it printed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(benchmark, "TINY", {"shapes": [[2, 1, 16, 16]], "groups": "d", "scale": 256})

    def run(*arguments: str) -> tuple[list[dict], str]:
        benchmark.main(["--device", "cpu", "--output", str(tmp_path), *arguments])
        lines = (tmp_path / "attention.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], capsys.readouterr().out

    return run


def test_a_run_loses_nothing_and_resumes(rehearse, benchmark, tmp_path):
    """Killed, tried again, and complete; then a further call has nothing to do."""
    rows, text = rehearse("--stages", "check", "--limit", "0.3")
    assert len(rows) == 3 and all(row["error"].startswith("killed after") for row in rows)
    assert "WRONG triton [2, 1, 16, 16] : killed after" in text
    rows, text = rehearse("--stages", "check", "turns", "time", "--retry", "--limit", "600")
    assert not [row for row in rows if "error" in row]
    assert [row["kind"] for row in rows if "seconds" in row] == ["ceiling", "ends", "check", "turns", "time"]
    checks = [row for row in rows if row["kind"] == "check" and "case" in row]
    assert len(checks) == 4 and not any(row["wrong"] for row in checks)
    assert all(0 < row["largest"] < 1e-2 for row in checks)
    (timed,) = [row for row in rows if row["kind"] == "time" and "case" in row]
    assert timed["forward_tflops"] > 0 and timed["backward_ms"] > 0
    (turns,) = [row["times"]["triton"] for row in rows if "times" in row]
    assert len(turns) == 2 and min(turns[0] + turns[1]) > 0 and "Noise: equal work timed twice" in text
    assert "checks: 4 cases, 0 bad" in text and "128 documents of 512; heads 2:1" in text
    again, _ = rehearse("--stages", "check", "turns", "time")
    assert again == rows
    with (tmp_path / "attention.jsonl").open("a") as file:
        file.write('{"kind": "time", "implem')  # stopped while it wrote
    for _ in range(2):
        results = benchmark.Results(tmp_path / "attention.jsonl")
        assert results.rows == rows
        results.add(rows[0], {"case": "the next"})
        rows = results.rows


def test_only_what_is_right_is_timed(benchmark, tmp_path):
    results = benchmark.Results(tmp_path / "attention.jsonl")
    job = {"kind": "check", "implementation": "gluon", "shape": [8, 1, 64, 64]}
    assert not results.right("gluon", [64, 64])
    results.add(job, {"case": "ragged", "wrong": []})
    assert results.right("gluon", [64, 64])
    results.add(job, {"case": "a million tokens", "error": "OutOfMemoryError: ..."})
    assert results.right("gluon", [64, 64])
    results.add(job | {"shape": [4, 4, 64, 64]}, {"case": "ragged", "wrong": ["dq"]})
    assert not results.right("gluon", [64, 64])


def test_jobs(benchmark):
    jobs = list(benchmark.jobs(["warm", "check", "turns", "time", "grid"], "cuda"))
    kinds = [kind for kind, _ in groupby(job["kind"] for job in jobs)]
    assert kinds == ["ceiling", "warm", "ends", "check", "turns", "time", *["grid", "packs"] * 4]
    names = [json.dumps(job) for job in jobs]
    assert len(set(names)) == len(names)


def test_the_grid_is_measured_and_fitted(rehearse, tmp_path):
    shown = {
        "kind": "check",
        "implementation": "triton",
        "shape": [2, 1, 16, 16],
        "case": "ragged",
        "wrong": [],
    }
    (tmp_path / "attention.jsonl").write_text(json.dumps(shown) + "\n")
    rows, text = rehearse("--stages", "grid", "--limit", "600")
    assert not [row for row in rows if "error" in row]
    assert [row["kind"] for row in rows if "seconds" in row] == ["ceiling", "grid", "packs"]
    assert "gluon                 [2, 1, 16, 16] left out" not in text  # head dim 16 is none of its own
    (model,) = re.findall(r"latency model of triton, (.*)", text)
    profile = Profile.load(Path(model))
    measured = {tuple(row["cut"]) for row in rows if "cut" in row}
    assert {(p.q_len, p.kv_len, p.segments) for p in profile.entries[0].points} == measured
    assert "4 packs, heads 2:1: " in text


def test_a_fit_to_the_grid_predicts_the_packs(benchmark, tmp_path):
    """Of times that a latency model made: the packs are met as far as its own coefficients come back."""
    import attention_grid

    shape, units = [4, 1, 128, 128], 16
    cost = KernelCost(
        tilings("triton", 4)[1], launch=2e-5, key=1e-10, segment=0.0, tile=2e-6, block=1e-6, masked=2e-7
    )
    cases = list(GPU_GRID._replace(q_lens=(1, 64, 65, 257, 2048), keys=(1, 2**16)).cases(4))
    seconds = predict(cost, [Point(*case, 4, 0.0) for case in cases], units)
    common = {"implementation": "triton", "shape": shape}
    rows = [{"kind": "ceiling", "device": "none", "units": units, "dtype": "bfloat16", "versions": {}}]
    rows += [
        common
        | {"kind": "grid", "part": part, "cut": case, "forward_ms": 1e3 * time, "backward_ms": 2e3 * time}
        for part in range(2)
        for case, time in zip(cases, seconds, strict=True)
    ]
    latency = AttentionLatency(cost, cost, units, heads=4, source="")
    for pack in attention_grid.packs():
        forward, backward = latency.seconds(pack.shards)[pack.rank]
        times = {"forward_ms": 1e3 * forward, "backward_ms": 2e3 * backward}
        rows.append(common | {"kind": "packs", "case": pack.name, "scale": 1} | times)
    text = "\n".join(attention_grid.report(rows, tmp_path))
    assert "20 packs, heads 4:1: 20 predicted within 5%" in text
    for row in rows[-5:]:
        row["forward_ms"] *= 1.5
    assert "20 packs, heads 4:1: 15 predicted within 5%" in "\n".join(attention_grid.report(rows, tmp_path))
