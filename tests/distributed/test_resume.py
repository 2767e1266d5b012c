"""A job that is killed and started again sees the token stream, and the losses, of one that was not."""

from __future__ import annotations

import pytest
from lab import TESTS, Experiment
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

STEPS = 7
ENTRIES = TESTS / "checkpoint_entries.txt"
OVERRIDES = (
    *("--training.steps", str(STEPS)),
    *("--checkpoint.interval", "2"),
    *("--parallelism.pipeline_parallel_degree", "2"),
)


@pytest.fixture(scope="module")
def uninterrupted(lab) -> Experiment:
    experiment = lab.experiment("uninterrupted", *OVERRIDES)
    lab.run(2, [experiment])
    return experiment


def test_killed_and_started_again(lab, uninterrupted):
    """SIGKILL to all ranks as soon as step 3 is reported."""
    experiment = lab.experiment("killed", *OVERRIDES)
    reported = lab.start_and_kill(2, experiment, 3)
    lab.run(2, [experiment])
    assert reported < STEPS
    assert [record["step"] for record in experiment.metrics()] == list(range(1, STEPS + 1))
    assert experiment.losses() == uninterrupted.losses()


def test_started_again_on_another_degree(lab, uninterrupted):
    """From the checkpoint of step 4 with PP 2 to one process: the plan's state belongs to no rank."""
    experiment = lab.experiment(
        "other_degree",
        *("--training.steps", str(STEPS)),
        *("--checkpoint.initial_load_path", str(uninterrupted.folder / "checkpoint" / "step-4")),
        *("--checkpoint.initial_load_model_only", "false"),
    )
    lab.run(1, [experiment])
    assert experiment.losses() == pytest.approx(uninterrupted.losses()[4:], rel=1e-4)


def test_another_seed_cannot_continue(lab, uninterrupted):
    experiment = lab.experiment(
        "other_seed",
        *("--wlb.corpus.seed", "1"),
        *("--checkpoint.initial_load_path", str(uninterrupted.folder / "checkpoint" / "step-4")),
        *("--checkpoint.initial_load_model_only", "false"),
    )
    with pytest.raises(AssertionError, match="seed is 0, and this job's is 1"):
        lab.run(1, [experiment])


def test_a_checkpoint_has_the_entries_that_it_always_had(uninterrupted):
    """So that a job goes on from a checkpoint of an earlier version: entries are found by name and shape."""
    folder = uninterrupted.folder / "checkpoint" / "step-4"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    lines = sorted(f"{name} {description(entry)}" for name, entry in entries.items())
    assert lines == ENTRIES.read_text().splitlines()


def description(entry) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"{list(entry.size)} {entry.properties.dtype}"
    return "bytes"
