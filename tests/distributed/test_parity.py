"""Five steps, with optimizer and validation, are those of one process under all kinds of parallelism."""

import pytest
from lab import layout

LAYOUTS = {
    "dp2_tp2": {"dp": 2, "tp": 2},
    "pp2_cp2_v": {"pp": 2, "cp": 2},
}
WORDS = {
    # Its last stage is on the first rank. A layer a stage, and the ends without one.
    "pp2_cp2_v": (
        *("--parallelism.pipeline_parallel_schedule", "dualpipev"),
        *("--parallelism.pipeline_parallel_layers_per_stage", "1"),
    ),
}


VALIDATION = ("--wlb.validation.hold_out", "0.1", "--wlb.validation.every", "5")
"""After steps 1 and 5, the last."""


@pytest.fixture(scope="module")
def runs(lab):
    experiments = {
        name: lab.experiment(name, *layout(**degrees), *VALIDATION, *WORDS.get(name, ()))
        for name, degrees in LAYOUTS.items()
    }
    lab.run(4, list(experiments.values()))
    experiments["one_process"] = lab.experiment("one_process", *VALIDATION)
    lab.run(1, [experiments["one_process"]])
    return experiments


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_process(runs, name):
    assert runs[name].losses() == pytest.approx(runs["one_process"].losses(), rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_norms_equal_one_process(runs, name):
    norms = [[record["grad_norm"] for record in runs[n].metrics()] for n in (name, "one_process")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_validation_losses_equal_one_process(runs):
    losses = {name: [record["loss"] for record in run.validation()] for name, run in runs.items()}
    assert [record["step"] for record in runs["one_process"].validation()] == [1, 5]
    assert losses["one_process"][1] < losses["one_process"][0]
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["one_process"], rel=1e-4)


def test_a_validation_between_two_reports_is_no_time_of_steps(lab):
    experiment = lab.experiment(
        "clocked",
        *("--base", "clocked:config", "--training.steps", "6", "--metrics.log_freq", "2"),
        *("--wlb.validation.hold_out", "0.1", "--wlb.validation.every", "3"),
    )
    lab.run(1, [experiment])
    assert [record["step"] for record in experiment.validation()] == [1, 3, 6]
    records = experiment.metrics()
    assert [(record["step"], record["seconds"]) for record in records] == [(s, 1.0) for s in (1, 2, 4, 6)]


def test_something_is_learned(runs):
    losses = runs["one_process"].losses()
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.3


def test_the_resolved_configuration_is_saved(runs):
    assert "pipeline_parallel_degree = 2" in (runs["pp2_cp2_v"].folder / "config.toml").read_text()


def test_metrics_have_the_plan_s_figures(runs):
    for record in runs["pp2_cp2_v"].metrics():
        assert record["tokens"] + record["padding"] == 4 * 256
        assert record["imbalance"] >= 1.0
        assert record["delay_max"] == 0
