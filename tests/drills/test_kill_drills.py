"""Jobs of which ranks are killed or hang, or that are starved of disk; none of them waits for the timeout of
a collective, which is longer than `drill_ground.PATIENCE`."""

import signal

import pytest

from wlb_titan.errors import UserError
from wlb_titan.runtime.dump_folder import held

FOREVER = ("--training.steps", "10000")


def test_an_error_of_any_rank_or_of_all_is_printed_once_and_ends_all(ground):
    nowhere = ("--wlb.corpus.path", "/nowhere")
    jobs = ground.start("no-corpus", rank1=nowhere), ground.start("same-error", *nowhere)
    for job in jobs:
        job.ends_in_error()
        assert job.codes[1] == 2 and job.log().count("There is no corpus at /nowhere") == 1
    assert "error: rank 1 on host" in jobs[0].log(1) and "/nowhere" in jobs[0].log(1)


def test_a_rank_that_is_gone_ends_the_others(ground):
    job = ground.start("gone", *FOREVER)
    job.await_step(2)
    job.signal(signal.SIGKILL, 1)
    assert job.wait()[0] != 0


def test_a_rank_that_is_stopped_is_given_up(ground):
    """SIGSTOP, as a machine that hangs: the others end after comm.train_timeout_seconds."""
    job = ground.start("stopped", *FOREVER, "--comm.train_timeout_seconds", "10")
    job.await_step(3)
    job.signal(signal.SIGSTOP, 1)
    job.await_(lambda: "error:" in job.log(0))
    job.signal(signal.SIGCONT, 1)
    assert 0 not in job.wait()


def test_two_runs_do_not_share_a_dump_folder(ground):
    job = ground.start("shared", *FOREVER)
    job.await_step(1)
    with pytest.raises(UserError, match=f"in use by process {job.processes[0]} on host"), held(job.folder):
        pytest.fail("entered")
    job.kill()
    with held(job.folder):
        pass


@pytest.mark.long
def test_a_full_disk_says_so_and_leaves_the_older_checkpoint(ground):
    """The files of step 4 may not be as large as they must."""
    written = ground.cut_off("full", keep=2) / "checkpoint" / "step-2"
    job = ground.run("full", largest_file=max(file.stat().st_size for file in written.iterdir()) // 2)
    assert 0 not in job.codes
    assert "disk is full" in job.log() and "the checkpoint of step 2 is intact" in job.log(), job.log()
    ground.ends_undisturbed("full")


def test_figures_never_end_training(ground):
    """Lines that are none in metrics.jsonl, and a file where the folder of traces should be."""
    folder = ground.cut_off("lines", keep=4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": "three"}\nnonsense\n{"loss": 1}\n')
    (folder / "traces").write_text("a file")
    job = ground.ends_undisturbed("lines", "--wlb.trace_every", "1")
    assert job.log().count("Traces cannot be written") == 1
