"""One rank that fails takes the job down, at once, with its own message; Ctrl-C ends it cleanly."""

import os
import signal
import socket
import time

import pytest
from forking import await_, command, environment
from lab import CONFIG, Cases, Run, layout, make_corpus

from wlb_titan.errors import EXIT_USER_ERROR

LAYOUT = layout("dp2")
WAYS = {
    "torchx": ("torchx.cli.main", "run", "-s", "local_cwd", "wlb.train", "--config", str(CONFIG), "--"),
    "wlb-titan": ("wlb_titan.commands.main", "train", str(CONFIG)),
}
"""Of starting a job on this machine, as a user types them."""


def started(lab, way: str, name: str, *overrides: str):
    """A job in a process group of its own, without our commands on the PATH."""
    experiment = lab.experiment(name, *LAYOUT, *overrides)
    env = {**environment(), "PATH": "/usr/bin:/bin"}
    return command(*WAYS[way], *experiment.words(), env=env, start_new_session=True)


def test_a_failing_rank_ends_the_job_with_its_own_error(lab):
    job = started(lab, "wlb-titan", "failing", "--base", "trainers:failing")
    output, _ = job.communicate(timeout=240)
    assert job.returncode != 0
    assert "rank 1 has met its test" in output
    assert "step 1 of" in output


def test_a_run_that_is_asked_to_stop_in_a_validation_leaves_it_saves_and_goes_on(lab):
    words = (*layout("dp2"), "--training.steps", "3", "--lr_scheduler.total_steps", "3")
    validated = ("--wlb.validation.path", str(lab.corpus), "--base", "trainers:asked")
    asked, whole = lab.experiment("asked", *words, *validated), lab.experiment("whole", *words)
    job = lab.start(2, asked)
    lab.run(2, [whole])
    codes, log = job.wait(120), asked.log.read_text()
    assert 143 in codes and 0 not in codes and not asked.validation(), log
    assert "step 1 cut short" in log and "Stopped after step 1 of 3: all is saved" in log, log
    again = lab.experiment("asked", *words)
    lab.run(2, [again])
    assert again.losses() == whole.losses()


@pytest.mark.parametrize("every", [2, 10**6], ids=["saved", "stopped"])
def test_gradients_that_are_not_finite_on_one_rank_end_all_before_they_are_saved(lab, every):
    """Of the second stage alone, in steps that nobody logs; checkpoints are written meanwhile."""
    words = ("--checkpoint.interval", str(every), "--checkpoint.keep_latest_k", "2", *layout("pp2"))
    words += ("--checkpoint.async_mode", "async", "--metrics.log_freq", "1000000")
    words += ("--training.steps", "100000")
    run = lab.experiment(f"diverging_{every}", *words, "--base", "trainers:diverging")
    codes, log = lab.start(2, run).wait(120), run.log.read_text()
    assert EXIT_USER_ERROR in codes and 0 not in codes and "Traceback" not in log, log
    assert "From step 5 on (this is step " + "6)" * (every == 2) in log and "not finite numbers" in log, log
    saved = {path.name for path in (run.folder / "checkpoint").glob("*")}
    assert saved == ({"step-2", "step-4"} if every == 2 else set())
    assert ("step 4 is intact" if saved else "the run begins anew") in log, log


def test_a_rank_that_aborts_costs_its_own_case(fork_server, tmp_path):
    results = Cases(fork_server, tmp_path)
    results.add("abort", {name: {"aborts": name == "tp2"} for name in ("dp2", "tp2", "cp2")})
    assert (results["dp2"], results["cp2"]) == ("dp2", "cp2")
    with pytest.raises(AssertionError, match=r"tp2: exit codes \[.*, -6\](.|\n)*Fatal Python error: Aborted"):
        results["tp2"]


def test_one_process_whose_port_is_taken_says_so(lab):
    experiment = lab.experiment("taken")
    with socket.socket() as other:
        other.bind(("localhost", 0))
        port = str(other.getsockname()[1])
        assert lab.start(1, experiment, environment={"MASTER_PORT": port}).wait(120) == [1]
    log = experiment.log.read_text()
    assert "EADDRINUSE" in log.splitlines()[-1] and port in log and "Traceback" in log
    assert "other ranks" not in log


def ends(job, experiment, *words):
    """That a job of two ranks ends with the same error of both, which has these words."""
    codes = job.wait(120)
    log = experiment.log.read_text()
    assert EXIT_USER_ERROR in codes and 0 not in codes, log
    (error,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert all(word in error for word in ("Rank 1 (host ", "would not train what rank 0", *words)), error
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("wlb.corpus.path", ("corpus is ", " of 40 documents, not ", " of 400 documents")),
        ("wlb.policy", ("packing is WlbLazy.Config(", ", not Plain.Config(")),
    ],
)
def test_a_rank_with_other_settings_ends_the_job_before_a_step(lab, tmp_path, key, told):
    make_corpus(tmp_path / "other.jsonl", tmp_path / "other", [50] * 40)
    other = {"wlb.corpus.path": str(tmp_path / "other"), "wlb.policy": "wlb_lazy"}[key]
    experiment = lab.experiment(f"another_{key}", *LAYOUT)
    ends(lab.start(2, experiment, of_last=(f"--{key}", other)), experiment, *told)
    assert not experiment.metrics()


def test_a_rank_that_plans_otherwise_ends_the_job_at_the_next_report(lab):
    """One step, which is not reported; the next ones are the same again."""
    words = ("--wlb.policy", "toys:ByRank", "--metrics.log_freq", "3", "--training.steps", "9")
    experiment = lab.experiment("by_rank", *LAYOUT, *words)
    ends(lab.start(2, experiment), experiment, "the digest of its steps")
    assert [record["step"] for record in experiment.metrics()] == [1]


@pytest.mark.parametrize("degrees", ["tp2", pytest.param("cp2", marks=pytest.mark.long)])
def test_ranks_that_divide_a_micro_batch_otherwise_end_the_job_at_the_next_report(lab, degrees):
    experiment = lab.experiment(f"apart_{degrees}", *layout(degrees), "--base", "trainers:apart")
    ends(lab.start(2, experiment), experiment, "how its steps up to this one are divided or recomputed")
    assert experiment.metrics()


@pytest.mark.long
def test_ctrl_c_ends_all_processes_after_their_step(lab):
    """`wlb-titan train` is our agent alone; TorchX is one more program that Ctrl-C reaches."""
    job = started(lab, "torchx", "interrupted", "--training.steps", "10000")
    run = Run(lab.folder / "interrupted")
    await_(lambda: job.poll() is not None or run.metrics(), lambda: "the job did not start", 200)
    os.killpg(job.pid, signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 130, output
    assert "Stopped by Ctrl-C; the job has ended." in output
    # TorchX removes its folder while a thread of its own may still read there, and then prints its traceback.
    assert "/wlb_titan/" not in "".join(line for line in output.splitlines() if 'File "' in line)
    steps = len(run.metrics())
    time.sleep(2)
    assert len(run.metrics()) == steps > 0, "ranks go on training after Ctrl-C"
