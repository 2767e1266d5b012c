"""The benchmark's cases and counts, and that the script runs from end to end (on the CPU, with the
reference).
"""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from oracle import packed, visible
from wlb_titan.kernels.segments import Shape, check_segments

from wlb_titan.commands.profile import time_attention

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention

    return attention


def test_cases_are_valid(benchmark):
    import attention_cases

    found = attention_cases.cases()
    assert {case.group for case in found} == set("abcde")
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
    rows, text = rehearse("--stages", "turns", "--limit", "0.3")
    assert len(rows) == 2 and all(row["error"].startswith("killed after") for row in rows)
    assert "BAD turns    triton                [2, 1, 16, 16] : killed after" in text
    rows, text = rehearse("--stages", "warm", "turns", "time", "--retry", "--limit", "600")
    of_triton = [row for row in rows if row["implementation"] != "gluon"]  # which a CPU does not run
    assert not [row for row in of_triton if "error" in row]
    ended = [row["kind"] for row in of_triton if "seconds" in row]
    assert ended == ["ceiling", "warm", "turns", "time"]
    (timed,) = [row for row in of_triton if row["kind"] == "time" and "case" in row]
    assert timed["forward_tflops"] > 0 and timed["backward_ms"] > 0
    (turns,) = [row["times"]["triton"] for row in rows if "times" in row]
    assert len(turns) == 2 and min(turns[0] + turns[1]) > 0 and "Noise: equal work timed twice" in text
    assert "128 documents of 512; heads 2:1" in text
    again, _ = rehearse("--stages", "warm", "turns", "time")
    assert again == rows
    with (tmp_path / "attention.jsonl").open("a") as file:
        file.write('{"kind": "time", "implem')  # stopped while it wrote
    for _ in range(2):
        results = benchmark.Results(tmp_path / "attention.jsonl")
        assert results.rows == rows
        results.add(rows[0], {"case": "the next"})
        rows = results.rows


def test_jobs(benchmark):
    jobs = list(benchmark.jobs(["warm", "turns", "time", "grid"], "cuda"))
    kinds = [kind for kind, _ in groupby(job["kind"] for job in jobs)]
    assert kinds == ["ceiling", "warm", "turns", "time", *["grid", "packs"] * 4]
    names = [json.dumps(job) for job in jobs]
    assert len(set(names)) == len(names)


def test_the_grid_and_the_packs_are_measured(rehearse):
    rows, _ = rehearse("--stages", "grid", "--limit", "600")
    assert not [row for row in rows if "error" in row]
    assert [row["kind"] for row in rows if "seconds" in row] == ["ceiling", "grid", "packs"]
    assert all(row["forward_ms"] > 0 for row in rows if "cut" in row)
    assert sum("forward_ms" in row for row in rows if row["kind"] == "packs") == 4
