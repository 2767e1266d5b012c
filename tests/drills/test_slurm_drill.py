"""A real Slurm tells a job on two nodes that its time is up: it saves, goes back into the queue, and on."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from drill_ground import Run, await_
from slurm_here import slurm

from wlb_titan.commands.main import main

STARTS = 300  # seconds for two agents and two ranks that import everything, on a busy machine


@pytest.mark.timeout(900)
def test_a_job_whose_time_is_up_goes_back_into_the_queue_and_on(ground, request):
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder)) as here:
        undisturbed = request.getfixturevalue("undisturbed")  # not where there is no Slurm
        run = Run(ground.folder / "slurm")
        words = ["slurm", str(ground.config), "--gpus", "1", "--wlb.device", "cpu", "-o", "output=job.log"]
        words += ["--dump_folder", str(run.dump), "--checkpoint.interval", "1000"]
        script = CliRunner().invoke(main, [*words, "--parallelism.data_parallel_shard_degree", "2"])
        assert script.exit_code == 0, script.output
        (here.folder / "job.sbatch").write_text(script.stdout)

        def log() -> str:
            job = here.folder / "job.log"
            return (job.read_text() if job.exists() else "") + here.logs()

        job = here.call("sbatch", "--parsable", "job.sbatch")
        await_(lambda: bool(run.steps()), log, STARTS)
        (second,) = here.processes("RANK=1")
        os.kill(second, signal.SIGSTOP)  # so that the job does not end before it hears
        here.call("scancel", "--signal=USR1", job)
        await_(lambda: "the run ends after the step under way" in log(), log)
        os.kill(second, signal.SIGCONT)
        await_(lambda: here.job(job)["Restarts"] == "1", log)
        text = (here.folder / "job.log").read_text()
        assert "all is saved" in text and text.count("Exited with exit code") == text.count("code 75") > 0, (
            text
        )
        assert max(run.losses()) < 8
        await_(lambda: here.job(job)["JobState"] != "COMPLETING", log)
        # Slurm waits two minutes, and refuses to start a job in the very second in which its last run ended.
        if here.job(job)["JobState"] == "PENDING":
            here.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        await_(lambda: here.job(job)["JobState"] == "COMPLETED", log, STARTS)
        assert here.job(job)["ExitCode"] == "0:0"
        assert run.losses() == undisturbed.losses()
