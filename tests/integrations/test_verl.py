"""examples/verl with the real verl: found by its entry point, of verl's contract, nearer to equal work."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, on_processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes of verl find, with our plug-in and without."""
    site = tmp_path_factory.mktemp("verl")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, *install, "--target", site, ROOT / "examples" / "verl"], check=True)
    program = Path(__file__).with_name("verl_program.py")
    return [on_processes(2, program, site, VERL_USE_EXTERNAL_PLUGINS=wish) for wish in ("auto", "none")]


def test_verl_loads_it_unless_told_not_to(found):
    ours, theirs = found
    assert ours["module"] == "wlb_verl" and theirs["module"].startswith("verl.")


@pytest.mark.parametrize("number", [0, 1], ids=["ours", "verl's own"])
def test_the_contract(found, number):
    for one in found[number]["partitions"]:
        assert one["once"] and one["parts"] == 8 and (len(one["sizes"]) == 1 or not one["equal"])
    for one in found[number]["micro_batches"]:
        assert one["once"] and one["content"] and one["whole"] and one["most_tokens"] <= 16_384
        count = one["counts"][0]
        assert len(set(one["counts"])) == 1 and count >= one["least"]
        assert count % one["asked"].get("num_batches_divided_by", 1) == 0
        assert count >= one["asked"].get("min_num_micro_batch", 1)
    assert "8192" in found[number]["refused"] or "16384" in found[number]["refused"]


def test_work_is_equal_in_no_more_micro_batches(found):
    ours, theirs = found
    parts = [[one["imbalance"] for one in each["partitions"]] for each in found]
    print("parts:", *parts)
    assert max(parts[0]) < 1.002 and np.mean(parts[0]) < np.mean(parts[1])
    for one, other in zip(ours["micro_batches"], theirs["micro_batches"], strict=True):
        print(one["asked"], *((each["counts"][0], each["imbalance"]) for each in (one, other)))
        assert one["counts"][0] <= other["counts"][0]
    assert np.mean([one["imbalance"] for one in ours["micro_batches"]]) < 1.05
