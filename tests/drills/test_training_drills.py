"""Jobs that are killed, stopped, starved of disk, given broken files or other settings."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time

import pytest

SOON = 12  # seconds in which every rank has ended after one has failed; the machine may be busy


def copy_of(undisturbed, ground, name: str, keep: int):
    """The dump folder of a run that was cut off after the checkpoint of step `keep`."""
    shutil.copytree(undisturbed.dump, ground.folder / name)
    for step in (2, 4, 6, 8):
        if step > keep:
            shutil.rmtree(ground.folder / name / "checkpoint" / f"step-{step}")
    return ground.folder / name


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_moment_and_started_again(ground, undisturbed, seed):
    random_ = random.Random(seed)
    name = f"killed-{seed}"
    job = ground.start(name)
    job.await_(lambda: (ground.folder / name / "metrics.jsonl").exists())
    time.sleep(random_.uniform(0, 2))
    job.kill()
    again = ground.run(name)
    assert again.codes == [0, 0], again.log()
    assert again.losses() == undisturbed.losses()


def test_an_error_of_any_rank_is_printed_by_it_and_ends_all(ground):
    job = ground.run("no-corpus", rank1={"words": ["--wlb.corpus.path", "/nowhere"]})
    assert job.codes[1] == 2 and job.codes[0] != 0
    assert "error: rank 1 on host" in job.log(1) and "There is no corpus at /nowhere" in job.log(1)
    assert "Traceback" not in job.log()
    assert job.seconds[0] - job.seconds[1] < SOON


def test_the_same_error_on_all_ranks_is_printed_once(ground):
    job = ground.run("same-error", "--wlb.corpus.path", "/nowhere")
    assert 2 in job.codes and 0 not in job.codes
    assert job.log().count("There is no corpus at /nowhere") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_rank_that_is_gone_ends_the_others(ground, number):
    job = ground.start(f"gone-{number}", "--training.steps", "10000")
    job.await_(lambda: len(job.steps()) > 1)
    begin = time.monotonic()
    job.signal(number, [1])
    job.wait()
    assert job.codes[0] != 0
    assert time.monotonic() - begin < SOON


def test_a_rank_that_is_stopped_is_given_up(ground):
    """SIGSTOP, as a machine that hangs: the others end after comm.train_timeout_seconds."""
    job = ground.start("stopped", "--training.steps", "10000", "--comm.train_timeout_seconds", "5")
    job.await_(lambda: len(job.steps()) > 2)
    begin = time.monotonic()
    job.signal(signal.SIGSTOP, [1])
    job.await_(lambda: "error:" in job.log(0))
    assert time.monotonic() - begin < 5 + SOON
    job.signal(signal.SIGCONT, [1])
    assert 0 not in job.wait()


def test_two_runs_do_not_share_a_dump_folder(ground, tmp_path):
    from wlb_titan.errors import UserError
    from wlb_titan.runtime.dump_folder import held

    job = ground.start("shared", "--training.steps", "10000")
    job.await_(lambda: len(job.steps()) > 0)
    with pytest.raises(UserError, match=f"in use by process {job.processes[0]} on host"), held(job.dump, 0.1):
        pytest.fail("entered")
    job.kill()
    with held(job.dump, 5):
        pass


def test_a_refused_run_changes_nothing(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "refused", keep=4)
    (copy / "config.toml").write_text("# mine\n")
    job = ground.start("refused", "--wlb.corpus.seed", "7")
    before = job.snapshot()
    job.wait()
    assert 2 in job.codes, job.log()
    assert "seed is 1, and this job's is 7" in job.log() or "seed is 0, and this job's is 7" in job.log()
    assert "Traceback" not in job.log()
    assert job.snapshot() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--wlb.packing.tail", "drop"), "tail is 'carry', and this job's is 'drop'"),
        (("--training.seq_len", "256"), "context window is 128, and this job's is 256"),
        (("--wlb.packing.policy", "wlb_lazy"), "packing policy is 'plain', and this job's is 'wlb_lazy'"),
    ],
    ids=["tail", "seq_len", "policy"],
)
def test_what_changes_the_tokens_is_refused_on_resume(ground, undisturbed, words, said):
    name = f"altered-{words[0].split('.')[-1]}"
    copy_of(undisturbed, ground, name, keep=4)
    job = ground.run(name, *words)
    assert 2 in job.codes and said in job.log(), job.log()


def test_what_does_not_change_the_tokens_is_taken_on_resume(ground, undisturbed):
    copy_of(undisturbed, ground, "taken", keep=4)
    job = ground.run(
        *("taken", "--wlb.packing.cost_model", "quadratic:1,100", "--checkpoint.interval", "3"),
        *("--wlb.trace_every", "3"),
    )
    assert job.codes == [0, 0], job.log()
    assert job.losses() == undisturbed.losses()


def test_a_broken_checkpoint_is_named_and_the_one_before_taken(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "broken", keep=6)
    piece = max((copy / "checkpoint" / "step-6").glob("*.distcp"), key=lambda file: file.stat().st_size)
    with piece.open("r+b") as file:
        file.truncate(1000)
    job = ground.run("broken")
    assert job.codes == [0, 0], job.log()
    assert f"step-6 is broken: its file {piece.name} has 1,000 bytes instead of" in job.log()
    assert "goes on from step 4" in job.log()
    assert job.losses() == undisturbed.losses()
    assert (copy / "checkpoint" / "broken-6" / piece.name).exists()


def test_no_whole_checkpoint(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "none-whole", keep=2)
    (copy / "checkpoint" / "step-2" / ".metadata").write_bytes(b"rubbish")
    job = ground.run("none-whole")
    assert 2 in job.codes and "is whole: step 2: its .metadata is damaged" in job.log()
    assert "Traceback" not in job.log()


def test_a_full_disk_says_so_and_leaves_the_older_checkpoint(ground, undisturbed):
    """The files of step 4 may not be as large as they must."""
    copy = copy_of(undisturbed, ground, "full", keep=2)
    size = max(file.stat().st_size for file in (copy / "checkpoint" / "step-2").iterdir())
    starved = {"largest_file": size // 2}
    job = ground.run("full", rank0=starved, rank1=starved)
    assert 0 not in job.codes
    assert "disk is full" in job.log() and "the checkpoint of step 2 is whole" in job.log(), job.log()
    again = ground.run("full")
    assert again.codes == [0, 0], again.log()
    assert again.losses() == undisturbed.losses()


def test_figures_never_end_training(ground, undisturbed):
    """Lines that are none in metrics.jsonl, and a folder in its place."""
    copy = copy_of(undisturbed, ground, "lines", keep=4)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": "three"}\nnonsense\n{"loss": 1}\n')
    job = ground.run("lines")
    assert job.codes == [0, 0], job.log()
    assert job.losses() == undisturbed.losses()
    (ground.folder / "no-lines" / "metrics.jsonl.d").mkdir(parents=True)
    (ground.folder / "no-lines" / "traces").write_text("a file")
    job = ground.run("no-lines", "--wlb.trace_every", "1", rank0={"largest_file": 200_000_000})
    assert job.codes == [0, 0], job.log()
    assert job.log().count("Traces cannot be written") == 1


def test_figures_of_a_former_run_are_kept(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "former", keep=0)
    lines = (copy / "metrics.jsonl").read_text()
    job = ground.run("former", "--training.steps", "2")
    assert job.codes == [0, 0], job.log()
    assert (copy / "former-1" / "metrics.jsonl").read_text() == lines
    assert "steps = 8" in (copy / "former-1" / "config.toml").read_text()
    assert [json.loads(line)["step"] for line in (copy / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_in_the_documents_is_named(ground, undisturbed, seed):
    damaged = ground.folder / f"damaged-corpus-{seed}"
    shutil.copytree(ground.corpus, damaged)
    content = bytearray((damaged / "documents.arrow").read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 4
    (damaged / "documents.arrow").write_bytes(content)
    job = ground.run(f"flipped-{seed}", "--wlb.corpus.path", str(damaged))
    assert 2 in job.codes and f"corpus {damaged} is damaged: documents.arrow" in job.log().replace("The ", "")
    assert "Traceback" not in job.log()
