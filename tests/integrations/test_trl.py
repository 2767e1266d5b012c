"""examples/trl with the real TRL on two processes: the losses of steps stay, and nobody waits."""

import numpy as np
import pytest
from commands import ROOT, on_processes


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the example prints, by the sampler's name."""
    program = ROOT / "examples" / "trl" / "train.py"
    return on_processes(2, program, cwd=tmp_path_factory.mktemp("trl"))


def test_every_example_is_trained_once_an_epoch_with_the_losses_of_those_in_order(trained):
    for found in trained.values():
        assert found["trained"] == sorted(2 * found["lengths"])
    ordinary, balanced = (trained[name]["losses"] for name in ("InOrder", "BalancedBatchSampler"))
    assert len(balanced) == 16 and balanced == pytest.approx(ordinary, rel=1e-5)
    assert np.ptp(balanced) > 0.01, "it learns"


def test_work_is_equal(trained):
    print({name: found["imbalance"] for name, found in trained.items()})
    assert trained["BalancedBatchSampler"]["imbalance"] < 1.05 < 1.2 < trained["InOrder"]["imbalance"]
