"""`wlb-titan init`: what it writes is a job that can run."""

import os

import pytest
import torch
from commands import invoke

from wlb_titan.commands import dryrun
from wlb_titan.commands.config import experiment
from wlb_titan.runtime.configured import degrees_product
from wlb_titan.runtime.models.load import load_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("gpus", "cores", "processes"), [(0, 1, 1), (0, 64, 4), (1, 64, 1), (6, 64, 4), (8, 64, 8)]
)
def test_the_experiment_is_valid_on_any_machine(tmp_path, gpus, cores, processes):
    file = tmp_path / "job.toml"
    corpus = 'a "corpus" \\ of mine'
    file.write_text(experiment(str(file), corpus, gpus, cores))
    config = load_config(file, world_size=processes).config
    assert config.wlb.corpus.path == corpus
    assert degrees_product(config) == processes
    assert config.training.mixed_precision_param == ("bfloat16" if gpus else "float32")


def test_the_experiment_runs_on_the_cores_of_a_container(tmp_path, monkeypatch):
    """Of the time of two, on a host of more."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(192))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(dryrun, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    file = tmp_path / "job.toml"
    assert invoke("init", file).exit_code == 0
    assert degrees_product(load_config(file, world_size=2).config) == 2


def test_a_file_that_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = invoke("init")
    assert first.exit_code == 0 and "wlb-titan train job.toml" in first.output
    before = (tmp_path / "job.toml").read_text()
    again = invoke("init", "--corpus", "other")
    assert again.exit_code == 2 and "job.toml already exists" in again.output
    assert (tmp_path / "job.toml").read_text() == before
