"""Products in float8, emulated: losses near those of the same model without, on all degrees."""

import pytest
from lab import layout, rows

STEPS = ("--training.steps", "3", "--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0002")
LAYOUTS = ("tp2", "cp2", "dp2", "pp2", "pp2 slim4", "cp2 wlb_lazy hybrid")
LONG = LAYOUTS[2:]


@pytest.mark.parametrize("name", rows(LAYOUTS, LONG))
def test_losses_are_near_those_of_the_model_without(lab, name):
    """By weights that both load."""
    texts = (f"{name} float8", name)
    runs = [lab.experiment(text, *layout(text), *STEPS) for text in texts]
    lab.run(2, runs)
    found, expected = (run.losses() for run in runs)
    assert found == pytest.approx(expected, rel=1e-3) and len(found) == 3
    assert found != pytest.approx(expected, rel=1e-6), "nothing is in float8"
