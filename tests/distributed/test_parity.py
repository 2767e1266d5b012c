"""The same data and weights give the same losses under every combination of parallelism."""

import json

import pytest
from lab import layout

LAYOUTS = {
    "pp2_cp2": {"pp": 2, "cp": 2},
    "pp2_dp2": {"pp": 2, "dp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2},
}


VALIDATED = {"pp2_cp2": 2, "cp2_tp2": 8, "one_process": 8}
"""Steps of 4 sequences or of one; data-parallel ranks would each pack other documents."""


def validation(folder, name):
    """Overrides for torchtitan's validation pass, after steps 1 and 5, over the same 8 sequences."""
    if name not in VALIDATED:
        return ()
    return (
        *("--validator.enable", "true", "--validator.freq", "5", "--validator.steps", str(VALIDATED[name])),
        *("--validator.dataloader.dataset", "c4_test", "--validator.dataloader.dataset_path", str(folder)),
    )


@pytest.fixture(scope="module")
def runs(lab):
    folder = lab.folder / "validation"
    folder.mkdir()
    words = (f"w{i % 200:03d}" for i in range(7000))
    texts = (" ".join(next(words) for _ in range(20 + 7 * i)) for i in range(40))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    experiments = {
        name: lab.experiment(name, *layout(**degrees), *validation(folder, name))
        for name, degrees in LAYOUTS.items()
    }
    lab.run(4, list(experiments.values()))
    experiments["one_process"] = lab.experiment("one_process", *validation(folder, "one_process"))
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
    losses = {}
    for name in VALIDATED:
        lines = (runs[name].folder / "validation.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == [1, 5]
        losses[name] = [record["loss"] for record in records]
    assert losses["one_process"][1] < losses["one_process"][0]
    assert losses["pp2_cp2"] == pytest.approx(losses["one_process"], rel=1e-4)
    assert losses["cp2_tp2"] == pytest.approx(losses["one_process"], rel=1e-4)


def test_something_is_learned(runs):
    losses = runs["one_process"].losses()
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.3


def test_the_resolved_configuration_is_saved(runs):
    assert "pipeline_parallel_degree = 2" in (runs["pp2_cp2"].folder / "config.toml").read_text()


def test_metrics_have_the_plan_s_figures(runs):
    for record in runs["pp2_cp2"].metrics():
        assert record["tokens"] + record["padding"] == 4 * 256
        assert record["imbalance"] >= 1.0
        assert record["delay_max"] == 0
