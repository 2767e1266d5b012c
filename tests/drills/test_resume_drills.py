"""Jobs that go on from a checkpoint with other settings, or from one that is broken."""

from __future__ import annotations

import json

import pytest
from drill_ground import copy_of


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--wlb.corpus.seed", "7"), "seed is 0, and this job's is 7"),
        (("--training.seq_len", "256"), "context window is 128, and this job's is 256"),
    ],
    ids=["seed", "window"],
)
def test_what_changes_the_tokens_is_refused_and_changes_nothing(ground, undisturbed, words, told):
    name = f"refused-{words[1]}"
    copy = copy_of(undisturbed, ground, name, keep=4)
    (copy / "config.toml").write_text("# mine\n")
    job = ground.start(name, *words)
    before = job.snapshot()
    job.wait()
    assert 2 in job.codes and told in job.log() and "Traceback" not in job.log(), job.log()
    assert job.snapshot() == before


def test_what_does_not_change_the_tokens_is_taken_on_resume(ground, undisturbed):
    copy_of(undisturbed, ground, "taken", keep=4)
    words = ("--wlb.packing.cost_model", "quadratic:1,100", "--checkpoint.interval", "3")
    ground.ends_like(undisturbed, "taken", *words, "--wlb.trace_every", "3")


def test_a_broken_checkpoint_is_named_and_the_one_before_taken(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "broken", keep=6)
    piece = max((copy / "checkpoint" / "step-6").glob("*.distcp"), key=lambda file: file.stat().st_size)
    with piece.open("r+b") as file:
        file.truncate(1000)
    job = ground.ends_like(undisturbed, "broken")
    assert f"step-6 is broken: its file {piece.name} has 1,000 bytes instead of" in job.log()
    assert "goes on from step 4" in job.log()
    assert (copy / "checkpoint" / "broken-6" / piece.name).exists()


def test_no_whole_checkpoint(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "none-whole", keep=2)
    (copy / "checkpoint" / "step-2" / ".metadata").write_bytes(b"rubbish")
    job = ground.run("none-whole")
    assert 2 in job.codes and "is whole: step 2: its .metadata is damaged" in job.log()
    assert "Traceback" not in job.log()


def test_figures_of_a_former_run_are_kept(ground, undisturbed):
    copy = copy_of(undisturbed, ground, "former", keep=0)
    lines = (copy / "metrics.jsonl").read_text()
    (copy / "traces").mkdir()
    (copy / "traces" / "step-8.json").write_text("of the former run")
    job = ground.run("former", "--training.steps", "2", "--wlb.trace_every", "2")
    assert job.codes == [0, 0], job.log()
    assert (copy / "former-1" / "metrics.jsonl").read_text() == lines
    assert "steps = 8" in (copy / "former-1" / "config.toml").read_text()
    assert [path.name for path in (copy / "former-1" / "traces").iterdir()] == ["step-8.json"]
    assert [path.name for path in (copy / "traces").iterdir()] == ["step-2.json"], "and nothing half written"
    assert [json.loads(line)["step"] for line in (copy / "metrics.jsonl").read_text().splitlines()] == [1, 2]
