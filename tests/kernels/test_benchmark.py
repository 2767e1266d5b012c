"""The benchmark's cases and counts, and that the script runs from end to end (on the CPU, with the
reference).
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from oracle import packed, visible
from wlb_titan.kernels.measure import Shape, flops, pairs, time_attention
from wlb_titan.kernels.segments import check_segments

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


def test_shards_add_up(benchmark):
    import attention_cases

    documents = [3000, 7, 640, 1]
    shards = [attention_cases.shard(documents, 4, rank) for rank in range(4)]
    assert sum(pairs(s) for s in shards) == pairs(attention_cases.whole(documents))
    assert sum(int(s[:, 1].sum()) for s in shards) == sum(documents)


def test_flops_count_the_real_mask():
    segments = torch.tensor([[0, 5, 0, 5], [5, 3, 2, 9], [8, 1, 11, 1]], dtype=torch.int32)
    assert pairs(segments) == int(visible(segments, 9, 12).sum())
    assert flops(segments, Shape(4, 2, 16, 8)) == 2 * pairs(segments) * 4 * (16 + 8)


def test_time_attention():
    forward, backward = time_attention(packed([20, 30]), Shape(2, 1, 16, 16), device="cpu", milliseconds=1)
    assert forward > 0 and backward > 0


def test_script(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPES", [Shape(2, 1, 16, 16)])
    monkeypatch.setattr(benchmark, "time_call", lambda call, device: call() is None or 1.0)
    benchmark.main(["--device", "cpu", "--output", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert not result["left_out"] and not [row for row in result["rows"] if "error" in row]
    assert len(result["rows"]) == len(sys.modules["attention_cases"].cases())
    assert all(row["forward_tflops"] > 0 for row in result["rows"])
