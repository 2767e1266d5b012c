"""Jobs that go on from a checkpoint with other settings, or from one that is broken."""

import json
import shutil

import pytest

from wlb_titan.errors import UserError
from wlb_titan.runtime.checkpoints import beginning, damage
from wlb_titan.runtime.models.load import load_config


def test_what_changes_the_tokens_is_refused_and_changes_nothing(ground):
    folder = ground.cut_off("refused", keep=4)
    (folder / "config.toml").write_text("# mine\n")
    job = ground.start(folder.name, "--wlb.corpus.seed", "7")
    before = job.snapshot()
    job.ends_in_error("seed is 0, and this job's is 7")
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
    assert "continues from step 4" in log
    assert (checkpoints / "broken-6" / piece.name).exists()


def test_a_run_that_diverges_keeps_its_good_checkpoint_and_goes_on_with_a_lower_rate(ground):
    """It diverges between two steps that are logged."""
    checkpoints = ground.cut_off("diverged", keep=4) / "checkpoint"
    rate = ("--optimizer.param_groups.0.optimizer_kwargs.lr", "1e30")
    words = ("--metrics.log_freq", "100", "--checkpoint.keep_latest_k", "2", *rate)
    ground.start("diverged", *words).ends_in_error("From step 6 on (this is step 6)", "step 4 is intact")
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-4"}
    ground.ends_undisturbed("diverged")


def test_no_whole_checkpoint_is_an_error(ground):
    folder = ground.cut_off("none-whole", keep=2)
    (folder / "checkpoint" / "step-2" / ".metadata").write_bytes(b"rubbish")
    told = ("cannot continue from any checkpoint", "step-2 is broken: its .metadata is damaged")
    ground.start("none-whole").ends_in_error(*told)


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


@pytest.mark.long
def test_a_run_that_begins_at_an_older_step_leaves_the_former_ones_and_goes_on_from_its_own(ground):
    """And a checkpoint that it cannot finish is no checkpoint: nothing is overwritten."""
    checkpoints = ground.cut_off("branch", keep=8) / "checkpoint"
    former = {file.name: file.read_bytes() for file in (checkpoints / "step-6").iterdir()}
    other_norm = ("--training.max_norm", "0.001")
    words = ("--checkpoint.load_step", "4", *other_norm)
    job = ground.run("branch", *words, largest_file=200_000)
    assert 0 not in job.codes and "its disk is full" in job.log(), job.log()
    assert "continues from step 4" in job.log()
    assert "step-8 is of a later step, and becomes former-8" in job.log()
    assert not damage(checkpoints / "former-6") and not damage(checkpoints / "former-8")
    assert former == {file.name: file.read_bytes() for file in (checkpoints / "former-6").iterdir()}
    assert "has no .metadata" in damage(checkpoints / "step-6")
    branch = ground.run("branch", *words, "--training.steps", "7", "--lr_scheduler.total_steps", "8")
    assert branch.codes == [0, 0], branch.log()
    first = branch.losses()
    (again := ground.start("branch", *other_norm)).wait()
    assert again.codes == [0, 0] and "checkpoint/step-7" in again.log(), again.log()
    losses = again.losses()
    assert losses[:4] == ground.undisturbed.losses()[:4] and losses[:7] == first
    assert losses[5] != ground.undisturbed.losses()[5]


@pytest.mark.long
def test_a_run_ends_without_its_corpus_and_is_extended_after_its_export(ground):
    """It validates and exports after the corpus was deleted; more steps begin where there is an optimizer."""
    shutil.copytree(ground.corpus, ground.folder / "deleted")
    words = ("--wlb.validation.hold_out", "0.05", "--lr_scheduler.total_steps", "6")
    words += ("--checkpoint.last_save_in_hf", "true", "--checkpoint.last_save_model_only", "true")
    short = ("--training.steps", "4", "--wlb.corpus.path", str(ground.folder / "deleted"))
    job = ground.start("extended", *words, *short)
    job.await_step(1)
    shutil.rmtree(ground.folder / "deleted")
    assert job.wait() == [0, 0], job.log()
    checkpoints = job.folder / "checkpoint"
    assert [line["step"] for line in job.validation()] == [1, 4]
    exported = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert exported < {file.name for file in (checkpoints / "step-4").iterdir()}
    ground.start("extended", *words, "--training.steps", "4").ends_in_error("has completed its 4 steps; set")
    job = ground.run("extended", *words, "--training.steps", "6")
    assert job.codes == [0, 0] and "Traceback" not in job.log(), job.log()
    assert "continues from step 2" in job.log() and "step-4 has weights alone" in job.log()
    assert [record["step"] for record in job.metrics()] == [1, 2, 3, 4, 5, 6]
    assert exported < {file.name for file in (checkpoints / "former-4").iterdir()}
    assert json.loads((checkpoints / "step-6" / "config.json").read_text())["model_type"] == "llama"


def test_a_seed_checkpoint_replaces_no_other(ground):
    words = ("--dump_folder", str(ground.cut_off("seed", keep=2)), "--checkpoint.create_seed_checkpoint")
    with pytest.raises(UserError, match="has a checkpoint of step 2 already"):
        beginning(load_config(ground.config, (*words, "true")).config)
