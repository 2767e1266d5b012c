"""Products in float8, emulated: losses near those of the same model without, on all degrees."""

import pytest
from lab import layout, rows

STEPS = ("--training.steps", "3", "--optimizer.param_groups.0.optimizer_kwargs.lr", "0.0002")
LAYOUTS = ("tp2", "cp2", "dp2", "pp2", "pp2 slim4", "cp2 wlb_lazy hybrid")
LONG = LAYOUTS[2:]


@pytest.mark.parametrize("name", rows(LAYOUTS, LONG))
def test_losses_are_near_those_of_the_model_without(lab, name):
    """By weights that both load."""
    with_, without = (lab.experiment(f"{one}{name}", *layout(f"{name}{one}"), *STEPS) for one in (" float8", ""))
    lab.run(2, [with_, without])
    print(with_.losses(), without.losses())
    assert with_.losses() == pytest.approx(without.losses(), rel=1e-3)
    assert with_.losses() != pytest.approx(without.losses(), rel=1e-6), "nothing is in float8"
