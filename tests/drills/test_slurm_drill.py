"""A real Slurm tells a job on two nodes that its time is up: it saves, goes back into the queue, and on."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from commands import said
from forking import await_
from lab import Run
from slurm_here import slurm

STARTS = 300  # seconds for two agents and two ranks that import everything, on a busy machine


@pytest.mark.timeout(900)
def test_a_job_whose_time_is_up_goes_back_into_the_queue_and_on(ground):
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder)) as here:
        run = Run(ground.folder / "slurm")
        own = "--nproc-per-node 1 --wlb.device cpu -o output=job.log"
        words = ["slurm", str(ground.config), *own.split()]
        words += ["--dump_folder", str(run.folder), "--checkpoint.interval", "1000"]
        script = said(*words, "--parallelism.data_parallel_shard_degree", 2)
        (here.folder / "job.sbatch").write_text(script)

        job = here.call("sbatch", "--parsable", "job.sbatch")
        await_(run.metrics, here.logs, STARTS)
        (second,) = here.processes("RANK=1")
        os.kill(second, signal.SIGSTOP)  # so that the job does not end before it hears
        here.call("scancel", "--signal=USR1", job)
        await_(lambda: "the run ends after the current step" in here.logs(), here.logs)
        os.kill(second, signal.SIGCONT)
        await_(lambda: here.job(job)["Restarts"] == "1", here.logs)
        text = (here.folder / "job.log").read_text()
        assert "all is saved" in text, text
        assert text.count("Exited with exit code") == text.count("code 75") > 0, text
        assert len(run.metrics()) < 8
        await_(lambda: here.job(job)["JobState"] != "COMPLETING", here.logs)
        # Slurm waits two minutes, and refuses to start a job in the very second in which its last run ended.
        if here.job(job)["JobState"] == "PENDING":
            here.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        await_(lambda: here.job(job)["JobState"] == "COMPLETED", here.logs, STARTS)
        assert here.job(job)["ExitCode"] == "0:0"
        assert run.losses() == ground.undisturbed.losses()
