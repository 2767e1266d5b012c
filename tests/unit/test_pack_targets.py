"""Balance and delay on lengths as unbalanced as the paper's; benchmarks/packing_*.py measure in full."""

import numpy as np
import pytest
from planning import make_planner

from wlb_titan.cost.workload import Quadratic
from wlb_titan.packing import POLICIES, thresholds
from wlb_titan.summary import Summary

WINDOW = 131072
WORK = "quadratic:917504,3.96e10"  # LLaMA2-7B in FLOPs
COST = Quadratic(917504, 3.96e10)


@pytest.fixture(scope="module")
def lengths():
    """Log-normal with a heavy tail cut off at the window."""
    rng = np.random.default_rng(1)
    lengths = np.exp(rng.normal(np.log(460), 1.3, 300_000))
    tail = rng.random(300_000) < 0.006
    low, high = 16384**-0.5, (8 * WINDOW) ** -0.5
    lengths[tail] = (low - rng.random(int(tail.sum())) * (low - high)) ** -2.0
    return np.clip(lengths.astype(np.int64), 16, WINDOW)


def run(lengths, micro_batches, steps, policy, **settings):
    packing = POLICIES.configure(policy, **settings)
    planner = make_planner(
        lengths,
        window=WINDOW,
        micro_batches=micro_batches,
        packing=packing,
        cost=WORK,
        memory_unknown="a GPU without bounds",
    )
    for _ in range(8):
        planner.next()
    return Summary.of((planner.next() for _ in range(steps)), WINDOW).figures()


def test_plain_is_as_unbalanced_as_in_the_paper(lengths):
    assert run(lengths, 4, 400, policy="plain")["imbalance_mean"] == pytest.approx(1.44, abs=0.03)


def test_wlb_with_two_queues_is_balanced(lengths):
    assert run(lengths, 4, 400, policy="wlb", queues=2)["imbalance_mean"] <= 1.05


def test_wlb_lazy_is_balanced_with_less_delay(lengths):
    lazy = run(lengths, 4, 600, policy="wlb_lazy")
    assert lazy["imbalance_mean"] <= 1.02
    assert lazy["delay_mean"] <= 0.32
    assert lazy["delay_max"] <= 16
    assert lazy["delay_mean"] < 0.8 * run(lengths, 4, 600, policy="wlb")["delay_mean"]


def test_wlb_lazy_at_64_micro_batches(lengths):
    lazy = run(lengths, 64, 60, policy="wlb_lazy")
    assert lazy["imbalance_mean"] <= 1.02
    assert lazy["imbalance_p95"] <= 1.06
    assert lazy["delay_mean"] <= 0.42


def test_a_larger_packing_window_balances_better_and_delays(lengths):
    """The paper's Figure 6, in small."""
    rows = [run(lengths, 4, 160, policy="fixed_greedy", global_batches=batches) for batches in (1, 4, 8)]
    imbalance = [row["imbalance_mean"] for row in rows]
    assert imbalance[0] > imbalance[1] > imbalance[2]
    assert [row["delay_mean"] for row in rows] == pytest.approx([0, 1.5, 3.5], abs=0.05)


@pytest.mark.parametrize("queues", [1, 2, 3])
def test_automatic_thresholds_are_found_again_and_drain(lengths, queues):
    def tune():
        return thresholds.tune(
            lengths[:50_000],
            queues=queues,
            window=WINDOW,
            micro_batches=4,
            max_length=2 * WINDOW,
            cost_model=COST,
            tolerance=0.065,
        )

    found = tune()
    assert found == tune()
    assert found == sorted(set(found)) and len(found) == queues
    assert thresholds.drains(lengths, found, WINDOW)
    thresholds.check(found, lengths, WINDOW)
