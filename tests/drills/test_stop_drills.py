"""Jobs that are asked to stop: all ranks finish the same step, save, and go on later as if nothing was."""

import signal
import time
from pathlib import Path

import pytest

from wlb_titan.runtime.checkpoints import newest_whole
from wlb_titan.runtime.ends import ONE_REQUEST

UNSAVED = ("--checkpoint.interval", "1000")  # so that what is found later was saved as the run stopped


def stopped(job, status: int) -> int:
    """The step after which a job has stopped, as it says itself; that was saved, and no step is lost."""
    assert job.wait() == [status, status], job.log()
    (line,) = [line for line in job.log().splitlines() if "Stopped after step" in line]
    assert "all is saved" in line and "Traceback" not in job.log(), job.log()
    step = int(line.split("after step ")[1].split()[0])
    assert newest_whole(job.folder / "checkpoint").step == step == job.metrics()[-1]["step"], job.log()
    return step


@pytest.mark.parametrize(
    ("number", "ranks", "status"),
    [(signal.SIGTERM, [1], 143), (signal.SIGUSR1, [0, 0], 75)],
    ids=["SIGTERM-to-one-rank", "SIGUSR1-by-scheduler-and-launcher"],
)
def test_a_signal_stops_all_ranks_after_the_same_step(ground, number, ranks, status):
    job = ground.start(number.name, *UNSAVED)
    job.await_step(1)
    job.signal(number, *ranks)
    assert stopped(job, status) < 8
    ground.ends_undisturbed(number.name, *UNSAVED)


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.long
def test_asked_while_a_checkpoint_is_written(ground, mode):
    """What is being written is finished; a step that it holds is not saved twice."""
    name, words = f"asked-saving-{mode}", ("--checkpoint.interval", "1", "--checkpoint.async_mode", mode)
    job = ground.start(name, *words)
    steps = job.folder / "checkpoint"
    job.await_(lambda: any(not (step / ".metadata").exists() for step in steps.glob("step-*")))
    job.signal(signal.SIGTERM, 0, 1)
    stopped(job, 143)
    ground.ends_undisturbed(name, *words)


def test_asked_while_ranks_wait_in_a_collective(ground):
    """Rank 1 hangs and the signal reaches rank 0, which waits for it: they agree when rank 1 goes on."""
    job = ground.start("asked-waiting", *UNSAVED)
    job.await_step(1)
    job.signal(signal.SIGSTOP, 1)
    time.sleep(1)  # rank 0 ends its step as far as it can alone
    job.signal(signal.SIGTERM, 0)
    job.await_(lambda: "the run ends after the current step" in job.log())
    job.signal(signal.SIGCONT, 1)
    stopped(job, 143)
    ground.ends_undisturbed("asked-waiting", *UNSAVED)


@pytest.mark.long
def test_a_second_signal_ends_at_once(ground):
    """Rank 1 hangs, so that no step ends any more; the first signal alone would wait for it."""
    job = ground.start("asked-twice", *UNSAVED)
    job.await_step(1)
    job.signal(signal.SIGSTOP, 1)
    job.signal(signal.SIGTERM, 0)
    time.sleep(ONE_REQUEST + 0.5)
    job.signal(signal.SIGTERM, 0)
    command = Path("/proc") / str(job.processes[0]) / "cmdline"
    job.await_(lambda: not command.exists() or not command.read_bytes())
    job.signal(signal.SIGCONT, 1)
    assert job.wait() == [143, 1], job.log()
    assert "Stopped after step" not in job.log() and not (job.folder / "checkpoint").exists()


def test_a_run_stops_when_its_time_is_up(ground):
    words = ("--training.steps", "100000", "--wlb.stop_after", "00:00:08", *UNSAVED)
    step = stopped(ground.start("time-up", *words), 75)
    again = ground.run("time-up", "--training.steps", str(step + 1))
    assert again.codes == [0, 0] and again.metrics()[-1]["step"] == step + 1, again.log()
