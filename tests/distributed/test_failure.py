"""One rank that fails takes the job down, at once, with its own message; Ctrl-C ends it cleanly."""

import os
import signal
import subprocess
import sys
import time

import pytest
from forking import environment
from lab import CONFIG

LAYOUT = ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "2")


def torchx_run(lab, name: str, *overrides: str) -> subprocess.Popen:
    """`torchx run wlb.train` as a user types it, in a process group of its own."""
    experiment = lab.experiment(name, *LAYOUT, *overrides)
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_cwd"),
            *("wlb.train", "--config", str(CONFIG), "--", *experiment.words()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "PATH": path},
        start_new_session=True,
    )


@pytest.mark.timeout(300)
def test_a_failing_rank_ends_the_job_with_its_own_error(lab):
    job = torchx_run(lab, "failing", "--base", "failing:config")
    output, _ = job.communicate(timeout=240)
    assert job.returncode != 0
    assert "rank 1 has met its test" in output
    assert "step  1 of" in output


@pytest.mark.timeout(300)
def test_interrupt_ends_all_processes(lab):
    job = torchx_run(lab, "interrupted", "--training.steps", "10000")
    metrics = lab.folder / "interrupted" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists():
        assert job.poll() is None and time.monotonic() < deadline, "the job did not start"
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert "Stopped by Ctrl-C; the job has ended." in output
    assert "Traceback" not in output
    steps = len(metrics.read_text().splitlines())
    time.sleep(2)
    assert len(metrics.read_text().splitlines()) == steps, "ranks go on training after Ctrl-C"
