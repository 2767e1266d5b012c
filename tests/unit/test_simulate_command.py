"""`wlb-titan simulate`: table, search, report, timeline and mistakes."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from wlb_titan.commands.main import main


@pytest.fixture
def lengths(tmp_path):
    values = (np.random.default_rng(0).pareto(0.9, 4000) * 200 + 20).clip(20, 16384).astype(int)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, values)) + "\n")
    return path


def run(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


SMALL = ["--model", "550M-64K", "--context-window", 16384, "--steps", 2]


def test_table_report_and_timeline(lengths, tmp_path):
    result = run("--lengths", lengths, *SMALL, "--report", tmp_path / "out", "--trace", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert "TP 2 x CP 2 x PP 4 x DP 2 = 32 GPUs" in result.output
    rows = [line.split() for line in result.output.splitlines() if re.match(r"\s+(plain|fixed|wlb)", line)]
    assert [row[0] for row in rows] == [
        "plain:per_sequence",
        "fixed_greedy:per_sequence",
        "wlb:adaptive",
        "wlb_lazy:hybrid:best",
    ]
    assert rows[0][-2:] == ["1.000x", "1.000x"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"F0", "B0"}


def test_search_ranks_what_fits(lengths):
    policies = "plain,wlb_lazy:adaptive"
    result = run("--lengths", lengths, *SMALL, "--search", "--gpus", 8, "--policies", policies)
    assert result.exit_code == 0, result.output
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%\s*$", result.output, re.M)]
    assert len(shares) > 3
    assert shares == sorted(shares, reverse=True)
    assert "candidates fit" in result.output


def test_predictions_beyond_the_measured_range_say_so(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("131072\n" * 64)
    result = run("--lengths", path, "--steps", 1, "--policies", "plain")
    assert "extrapolated" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name either a TOML file or"),
        (["--lengths", "L", "--policies", "plane"], "no packing is called 'plane'"),
        (["--lengths", "L", "--policies", "wlb:best"], "no sharding is called 'best'"),
        (["--lengths", "L", "--cluster", "tpu"], "cluster file tpu cannot be read"),
        (["--lengths", "L", "--gpus", "100"], "is 64 GPUs, and the job has 100"),
        (["--lengths", "L", "--tensor-parallel", "5"], "32 heads cannot be divided"),
        (["--lengths", "L", "--schedule", "Mine", *map(str, SMALL)], "'Mine'"),
        (["--lengths", "L", "--model", "8B-64K"], "no model '8B-64K'"),
        (["--lengths", "nowhere.txt"], "cannot be read"),
        (["--lengths", "L", "--model", "70B-64K", "--search", "--gpus", "8"], "Nothing fits 8 GPUs"),
    ],
)  # fmt: skip
def test_mistakes(lengths, arguments, message):
    result = run(*(str(lengths) if argument == "L" else argument for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
