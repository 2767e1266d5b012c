"""Five steps, with optimizer and validation, are those of one process under all kinds of parallelism."""

import pytest
from lab import layout

# The last stage of a V is on the first rank. A layer a stage, and the ends without one.
V = "pp2 cp2 DualPipeV"
LAYOUTS = {"dp2 tp2": (), V: ("--parallelism.pipeline_parallel_layers_per_stage", "1")}
VALIDATION = ("--wlb.validation.hold_out", "0.1", "--wlb.validation.every", "5")
"""After steps 1 and 5, the last."""


@pytest.fixture(scope="module")
def runs(lab):
    experiments = {
        name: lab.experiment(name, *layout(name), *VALIDATION, *words) for name, words in LAYOUTS.items()
    }
    lab.run(4, list(experiments.values()))
    experiments["one_process"] = lab.experiment("one_process", *VALIDATION)
    lab.run(1, [experiments["one_process"]])
    return experiments


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("key", "tolerance"), [("loss", 1e-4), ("grad_norm", 1e-3)])
def test_each_step_is_that_of_one_process(runs, name, key, tolerance):
    mine, expected = ([record[key] for record in runs[run].metrics()] for run in (name, "one_process"))
    assert len(mine) == 5 and mine == pytest.approx(expected, rel=tolerance)


def test_validation_losses_equal_one_process(runs):
    losses = {name: [record["loss"] for record in run.validation()] for name, run in runs.items()}
    assert [record["step"] for record in runs["one_process"].validation()] == [1, 5]
    assert losses["one_process"][1] < losses["one_process"][0]
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["one_process"], rel=1e-4)


def test_a_validation_between_two_reports_is_no_time_of_steps(lab):
    experiment = lab.experiment(
        "clocked",
        *("--base", "trainers:clocked", "--training.steps", "6", "--metrics.log_freq", "2"),
        *("--wlb.validation.hold_out", "0.1", "--wlb.validation.every", "3"),
    )
    lab.run(1, [experiment])
    assert [record["step"] for record in experiment.validation()] == [1, 3, 6]
    records = experiment.metrics()
    assert [(record["step"], record["seconds"]) for record in records] == [(s, 1.0) for s in (1, 2, 4, 6)]


def test_something_is_learned_and_the_resolved_configuration_saved(runs):
    losses = runs["one_process"].losses()
    assert losses[-1] < losses[0] - 0.3
    assert "pipeline_parallel_degree = 2" in (runs[V].folder / "config.toml").read_text()
