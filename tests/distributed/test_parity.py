"""Five steps, with optimizer and validation, are those of one process under all kinds of parallelism."""

import inspect
import json
import re

import pytest
from lab import layout
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components import metrics as titan

from wlb_titan.runtime.metrics import IN_TORCHTITAN

# The last stage of a V is on the first rank. A layer a stage, and the ends without one.
V = "pp2 cp2 DualPipeV"
LAYOUTS = {"dp2 tp2": (), V: ("--parallelism.pipeline_parallel_layers_per_stage", "1")}
VALIDATION = ("--wlb.validation.hold_out", "0.1", "--wlb.validation.every", "5")
"""After steps 1 and 5, the last."""


@pytest.fixture(scope="module")
def runs(lab):
    experiments = {}
    for name, words in LAYOUTS.items():
        experiments[name] = lab.experiment(name, *layout(name), *VALIDATION, *words)
    lab.run(4, list(experiments.values()))
    experiments["one_process"] = lab.experiment("one_process", *VALIDATION)
    lab.run(1, [experiments["one_process"]])
    return experiments


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_and_validation_are_those_of_one_process(runs, name):
    mine, alone = runs[name], runs["one_process"]
    for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3)):
        found, expected = ([record[key] for record in run.metrics()] for run in (mine, alone))
        assert len(found) == 5 and found == pytest.approx(expected, rel=tolerance), key
    (before, after), expected = ([record["loss"] for record in run.validation()] for run in (mine, alone))
    assert [before, after] == pytest.approx(expected, rel=1e-4) and after < before
    assert [record["step"] for record in mine.validation()] == [1, 5]


@pytest.fixture(scope="module")
def clocked(lab):
    experiment = lab.experiment(
        "clocked",
        *("--base", "trainers:clocked", "--training.steps", "6", "--metrics.log_freq", "2"),
        *("--wlb.validation.hold_out", "0.1", "--wlb.validation.every", "3"),
        *("--metrics.enable_tensorboard", "true"),
        *("--debug.print_config", "true", "--debug.save_config_file", "all.json"),
    )
    lab.run(1, [experiment])
    return experiment


@pytest.mark.long
def test_a_validation_between_two_reports_is_no_time_of_steps(clocked):
    assert [record["step"] for record in clocked.validation()] == [1, 3, 6]
    records = clocked.metrics()
    assert [(record["step"], record["seconds"]) for record in records] == [(s, 1.0) for s in (1, 2, 4, 6)]


def test_torchtitan_s_copy_of_the_configuration_and_its_dashboards_are_written(clocked):
    written = json.loads((clocked.folder / "all.json").read_text())
    assert written["wlb"]["validation"]["hold_out"] == 0.1 and written["optimizer"]["param_groups"]
    events = EventAccumulator(str(next(clocked.folder.rglob("events.*")))).Reload()
    theirs = set(re.findall('"(.+?)": ', inspect.getsource(titan.MetricsProcessor.log)))
    assert set(events.Tags()["scalars"]) >= {*IN_TORCHTITAN.values(), "throughput(tps)"} <= theirs
    ours = [record["loss"] for record in clocked.metrics()]
    assert [event.value for event in events.Scalars("loss_metrics/global_avg_loss")] == pytest.approx(ours)


def test_something_is_learned_and_the_resolved_configuration_saved(runs):
    losses = runs["one_process"].losses()
    assert losses[-1] < losses[0] - 0.3
    assert "pipeline_parallel_degree = 2" in (runs[V].folder / "config.toml").read_text()
