"""Balance and delay on lengths as unbalanced as the paper's; benchmarks/packing_*.py measure in full."""

import numpy as np
import pytest
from planning import figures

from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.packing.wlb import drains, tune

WINDOW = 131072
WORK = "quadratic:917504,3.96e10"  # LLaMA2-7B in FLOPs


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
    job = {"window": WINDOW, "cost": WORK, "memory_unknown": "a GPU without bounds"}
    return figures(lengths, steps, packing=packing, micro_batches=micro_batches, **job)


def test_plain_is_as_unbalanced_as_in_the_paper(lengths):
    assert run(lengths, 4, 400, policy="plain")["imbalance_mean"] == pytest.approx(1.44, abs=0.03)


def test_wlb_lazy_is_balanced_with_less_delay_than_wlb(lengths):
    wlb, lazy = (run(lengths, 4, 600, policy=policy) for policy in ("wlb", "wlb_lazy"))
    assert wlb["imbalance_mean"] <= 1.05
    assert lazy["imbalance_mean"] <= 1.02
    assert lazy["delay_mean"] <= 0.32 and lazy["delay_mean"] < 0.8 * wlb["delay_mean"]
    assert lazy["delay_max"] <= 16


def test_wlb_lazy_at_64_micro_batches(lengths):
    lazy = run(lengths, 64, 60, policy="wlb_lazy")
    assert lazy["imbalance_mean"] <= 1.02 and lazy["imbalance_p95"] <= 1.06
    assert lazy["delay_mean"] <= 0.42


def test_a_larger_packing_window_balances_better_and_delays(lengths):
    """The paper's Figure 6, in small."""
    rows = [run(lengths, 4, 160, policy="fixed_greedy", global_batches=batches) for batches in (1, 4, 8)]
    imbalance = [row["imbalance_mean"] for row in rows]
    assert imbalance[0] > imbalance[1] > imbalance[2]
    assert [row["delay_mean"] for row in rows] == pytest.approx([0, 1.5, 3.5], abs=0.05)


@pytest.mark.parametrize("queues", [1, 2, 3])
def test_automatic_thresholds_are_found_again_drain_and_are_among_the_best(lengths, queues):
    """As Algorithm 1 itself has it: no other candidates cost much less in delay and imbalance."""
    packing = POLICIES.configure("wlb", queues=queues, cost_model=WORK)
    job = Job(window=WINDOW, micro_batches=4, packing=packing)
    found, again = (tune(packing, lengths[:50_000], WINDOW, 2 * WINDOW, job) for _ in range(2))
    assert found == again == sorted(set(found)) and len(found) == queues
    assert drains(lengths, found, WINDOW)

    def cost(thresholds):
        found = run(lengths, 4, 300, policy="wlb", thresholds=thresholds)
        return found["delay_mean"] + ((found["imbalance_mean"] - 1) / 0.065) ** 2

    lowest = [WINDOW * (1 + number) // 8 for number in range(queues)]
    highest = [WINDOW * (8 - number) // 8 for number in reversed(range(queues))]
    assert cost(found) < min(cost(lowest), cost(highest))
