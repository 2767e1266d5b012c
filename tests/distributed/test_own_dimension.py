"""The examples' local SGD, a dimension of parallelism that no file of the package names, does in four
processes what a naive reference does in one. And one that divides nothing."""

import pytest
import torch
from lab import CONFIG, going_on, layout
from trainers import WEIGHTS

COMMON = ("--training.seq_len", "512", "--training.steps", "3", "--checkpoint.interval", "2")
COMMON += ("--wlb.packing.cost_model", "quadratic:1,1000")


def job(lab, name, base, dimension, degree, degrees="", own="", local=1, others=()):
    """A job with a dimension, from a TOML file of its own."""
    file = lab.folder / f"{name}.toml"
    dimension = f'[[wlb.dimensions]]\nname = "{dimension}"\ndegree = {degree}\n{own}'
    file.write_text(f'extends = "{CONFIG}"\n{dimension}')
    words = [*layout(degrees), "--training.local_batch_size", str(local), *others]
    return lab.experiment(name, "--config", str(file), "--base", f"averaging:{base}", *COMMON, *words)


SGD, ADAMW = "every = 2\nouter_rate = 1.0", "every = 2\nouter_rate = 0.7"


@pytest.fixture(scope="module")
def runs(lab):
    def reference(name, base, replicas, every, outer_rate=1.0):
        words = ["--replicas", str(replicas), "--every", str(every), "--outer_rate", str(outer_rate)]
        return lab.experiment(name, "--base", f"averaging:reference_{base}", *COMMON, *words)

    local = "own_policies.local_sgd:LocalSgd"
    four = {
        "every_step": job(lab, "local_4", "sgd", local, 4, own="every = 1\nouter_rate = 1.0"),
        "sharded": job(lab, "local_2_shard_2", "adamw", local, 2, "dp2", ADAMW),
        "pipelined": job(lab, "local_2_pp_2", "sgd", local, 2, "pp2", SGD, local=2),
        "twins": job(lab, "twins_2_cp_2", "sgd", "toys:Twins", 2, "cp2", local=4),
    }
    one = {
        "sgd": reference("one_sgd", "sgd", 2, 2),
        "every_step": lab.experiment("one_alone", "--base", "averaging:sgd", *COMMON),
        "adamw": reference("one_adamw", "adamw", 2, 2, 0.7),
    }
    lab.run(4, list(four.values()))
    lab.run(1, list(one.values()))
    return four, one | {"sharded": one["adamw"], "pipelined": one["sgd"], "twins": one["every_step"]}


@pytest.mark.parametrize("name", ["every_step", "sharded", "pipelined", "twins"])
def test_it_trains_as_one_process_does(runs, name):
    many, one = (group[name] for group in runs)
    assert many.losses() == pytest.approx(one.losses(), rel=1e-5)
    mine, expected = (torch.load(run.folder / WEIGHTS) for run in (many, one))
    assert mine.keys() == expected.keys()
    for parameter, weight in expected.items():
        assert (mine[parameter] - weight).abs().max() < 1e-5 * weight.abs().max(), parameter


def test_it_goes_on_from_a_checkpoint_as_if_nothing_was(lab, runs):
    whole = runs[0]["sharded"]
    goes_on = {"degrees": "dp2", "own": ADAMW, "others": going_on(whole, 2)}
    rest = job(lab, "local_goes_on", "adamw", "own_policies.local_sgd:LocalSgd", 2, **goes_on)
    lab.run(4, [rest])
    assert rest.losses() == whole.losses()[2:]
    found, expected = (torch.load(run.folder / WEIGHTS) for run in (rest, whole))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_to_meet_every_other_step_is_something_else(runs):
    """So that the test above would see a job that meets in every step."""
    every, other = (torch.load(runs[0][name].folder / WEIGHTS) for name in ("every_step", "pipelined"))
    assert any((every[name] - other[name]).abs().max() > 1e-4 * every[name].abs().max() for name in every)
