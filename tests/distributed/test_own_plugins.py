"""Policies, a strategy and mesh axes that the project does not know train as one process does; and `auto`."""

import re

import pytest
import torch
from lab import layout
from trainers import GRADIENTS

COMMON = (
    *("--base", "trainers:probed"),
    *("--training.seq_len", "512", "--training.steps", "2"),
    *("--wlb.packing.cost_model", "quadratic:1,1000"),  # not by the degrees, which differ
)
OWN = ("--wlb.packing.policy", "toys:Reversed", "--wlb.packing.every", "2")
AUTO = ("--wlb.packing.policy", "auto", "--wlb.sharding.policy", "auto")


def chosen(experiment):
    """The packing and the sharding policy that `auto` stood for, as the log says."""
    log = experiment.log.read_text()
    return re.search(r"auto is (\w+)(?::(\w+))?, by predicted MFU", log).groups()


@pytest.fixture(scope="module")
def runs(lab):
    two = {
        "own": lab.experiment(
            "own_cp2", *COMMON, *OWN, *layout("cp2"), "--wlb.sharding.policy", "toys:Contiguous"
        ),
        "auto": lab.experiment("auto_cp2", *COMMON, *AUTO, *layout("cp2"), "--checkpoint.interval", "1"),
    }
    strategy = ("--wlb.sharding.policy", "own_policies.ulysses_gather:UlyssesGather")
    four = {"axes": lab.experiment("own_axes_cp4", *COMMON, *OWN, *layout("cp4"), *strategy)}
    lab.run(2, list(two.values()))
    lab.run(4, list(four.values()))
    packing, _ = chosen(two["auto"])
    one = {
        "own": lab.experiment("own_one", *COMMON, *OWN),
        "auto": lab.experiment("auto_one", *COMMON, "--wlb.packing.policy", packing),
    }
    lab.run(1, list(one.values()))
    return two | four, one | {"axes": one["own"]}


@pytest.mark.parametrize("name", ["own", "axes", "auto"])
def test_losses_and_gradients_equal_one_process(runs, name):
    two, one = (group[name] for group in runs)
    assert two.losses() == pytest.approx(one.losses(), rel=1e-4)
    mine, expected = (torch.load(run.folder / GRADIENTS) for run in (two, one))
    assert mine.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0 and (mine[parameter] - gradient).abs().max() < 1e-5 * scale, parameter


def test_metrics_and_log_name_what_was_chosen(runs):
    two, _ = runs
    assert all(set(record["sharding"]) == {"contiguous"} for record in two["own"].metrics())
    log, own = two["auto"].log.read_text(), ":".join(chosen(two["auto"]))
    for policy in (own, "plain:per_sequence", "wlb_lazy:hybrid", "fixed_greedy:ulysses"):
        assert f"policy {policy}, step, s" in log


def test_auto_goes_on_with_what_it_chose_or_with_another(runs, lab):
    """It chooses the same for the same job; where it chooses otherwise, that packs what is left."""
    two, _ = runs
    packing, sharding = chosen(two["auto"])
    words = [*COMMON, *layout("cp2"), "--training.steps", "3"]
    words += ["--checkpoint.initial_load_path", str(two["auto"].folder / "checkpoint" / "step-1")]
    words += ["--checkpoint.initial_load_model_only", "false"]
    another = "plain" if packing != "plain" else "wlb_lazy"
    again = lab.experiment("auto_again", *words, *AUTO)
    other = lab.experiment("auto_other", *words, "--wlb.packing.policy", another)
    lab.run(2, [again, other])
    assert chosen(again) == (packing, sharding)
    assert again.losses()[0] == pytest.approx(two["auto"].losses()[1], rel=1e-6)
    assert len(other.losses()) == 2
