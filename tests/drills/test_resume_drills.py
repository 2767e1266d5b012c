"""Jobs that go on from a checkpoint with other settings, or from one that is broken."""

import pytest


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("wlb.corpus.seed", "7", "seed is 0, and this job's is 7"),
        ("training.seq_len", "256", "context window is 128, and this job's is 256"),
    ],
)
def test_what_changes_the_tokens_is_refused_and_changes_nothing(ground, key, value, told):
    folder = ground.cut_off(f"refused-{value}", keep=4)
    (folder / "config.toml").write_text("# mine\n")
    job = ground.start(folder.name, f"--{key}", value)
    before = job.snapshot()
    job.ends_in_error(told)
    assert job.snapshot() == before


def test_what_does_not_change_the_tokens_is_taken_on_resume(ground):
    ground.cut_off("taken", keep=4)
    words = ("--wlb.packing.cost_model", "quadratic:1,100", "--checkpoint.interval", "3")
    ground.ends_undisturbed("taken", *words, "--wlb.trace_every", "3")


def test_a_broken_checkpoint_is_named_and_the_one_before_taken(ground):
    checkpoints = ground.cut_off("broken", keep=6) / "checkpoint"
    piece = max((checkpoints / "step-6").glob("*.distcp"), key=lambda file: file.stat().st_size)
    with piece.open("r+b") as file:
        file.truncate(1000)
    log = ground.ends_undisturbed("broken").log()
    assert f"step-6 is broken: its file {piece.name} has 1,000 bytes instead of" in log
    assert "goes on from step 4" in log
    assert (checkpoints / "broken-6" / piece.name).exists()


def test_no_whole_checkpoint_is_an_error(ground):
    folder = ground.cut_off("none-whole", keep=2)
    (folder / "checkpoint" / "step-2" / ".metadata").write_bytes(b"rubbish")
    ground.start("none-whole").ends_in_error("is whole: step 2: its .metadata is damaged")


def test_figures_of_a_former_run_are_kept(ground):
    folder = ground.cut_off("former", keep=0)
    former, traces = folder / "former-1", folder / "traces"
    lines = (folder / "metrics.jsonl").read_text()
    traces.mkdir()
    (traces / "step-8.json").write_text("of the former run")
    job = ground.run("former", "--training.steps", "2", "--wlb.trace_every", "2")
    assert job.codes == [0, 0], job.log()
    assert (former / "metrics.jsonl").read_text() == lines
    assert "steps = 8" in (former / "config.toml").read_text()
    assert [path.name for path in (former / "traces").iterdir()] == ["step-8.json"]
    assert [path.name for path in traces.iterdir()] == ["step-2.json"], "and nothing half written"
    assert [record["step"] for record in job.metrics()] == [1, 2]
