"""The table of sharding policies in `wlb-titan plan`."""

import numpy as np
import planning
import pytest

from wlb_titan.commands.sharding import rank_rows, rank_times
from wlb_titan.context import STRATEGIES
from wlb_titan.cost.degrees import Degrees
from wlb_titan.job import Job
from wlb_titan.plan import LENGTH, MicroBatch

JOB = Job(window=4096, micro_batches=6, degrees=Degrees(context=4), attention=planning.UNMERGED)


@pytest.fixture
def times():
    """Micro-batches of one long document and more and more short ones."""
    micro_batches = []
    for index in range(6):
        lengths = [4096] + [128] * (32 * index)
        documents = np.zeros((len(lengths), 4), dtype=np.int64)
        documents[:, LENGTH] = lengths
        micro_batches.append(MicroBatch(documents, length=sum(lengths), index=index))
    return rank_times(micro_batches, JOB)


def test_every_policy_is_predicted_on_every_micro_batch(times):
    assert [one.policy for one in times] == list(STRATEGIES.candidates)
    by_policy = {one.policy: one for one in times}
    assert all(one.seconds.shape == (6, 4, 2) for one in times)
    assert by_policy["per_sequence"].chosen == ["per_sequence"] * 6
    adaptive, hybrid = by_policy["adaptive"], by_policy["hybrid"]
    assert adaptive.layer <= min(by_policy["per_sequence"].layer, by_policy["per_document"].layer)
    assert hybrid.layer < adaptive.layer
    # Keys and values of the long document only, or of all: 3/4 of them, 3 passes, 2 x 32 heads of 128.
    size = 2 * 32 * 128 * 2 * 3 * 3 / 4
    assert by_policy["per_document"].received[3] == pytest.approx((4096 + 96 * 128) * size)
    assert hybrid.received[3] <= 4096 * size
    # One document alone is balanced by both; with many short ones per_sequence is not.
    assert by_policy["per_sequence"].imbalances[0] == pytest.approx(1.0, abs=0.02)
    assert by_policy["per_sequence"].imbalances[3] > 1.2
    assert by_policy["per_document"].imbalances.max() < 1.15


def test_a_row_for_each_policy(times):
    rows = rank_rows(times, JOB)
    assert [row["sharding"] for row in rows] == list(STRATEGIES.candidates)
    assert rows[0]["slowest rank"] == f"{times[0].slowest * 1e3:.3f} ms" and rows[0]["speedup"] == "1.000x"
