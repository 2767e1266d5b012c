"""Dimensions of one's own in plans and predictions; set they are in test_config_torchtitan.py, trained in
tests/distributed."""

from dataclasses import replace

import numpy as np
import pytest
from toys import Apart, Twins

from wlb_titan.cost.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.packing import POLICIES
from wlb_titan.simulator.search import degrees_of
from wlb_titan.simulator.step import meetings, own_weights, seconds_with_meetings, simulate

JOB = Job(window=8192, micro_batches=8, degrees=Degrees(tensor=8, shard=2))


def with_own(*own, **degrees):
    return replace(JOB, degrees=replace(JOB.degrees, own=own, **degrees))


def predicted(job, steps=6):
    lengths = np.random.default_rng(0).integers(100, 9000, 4000)
    return simulate(job, job.plans(Documents(lengths=lengths), steps))


def test_what_divides_data_gets_micro_batches_and_what_does_not_gets_the_same():
    both = with_own(Apart.Config(degree=2), Twins.Config(degree=4))
    assert (both.degrees.ranks, both.degrees.data) == (8 * 2 * 2 * 4, 4)
    assert both.replica_micro_batches == 2
    assert "APART 2" in str(both.degrees) and "TWINS 4" in str(both.degrees)
    assert both.degrees.strides["twins"] == 8 and both.degrees.strides["dp_shard"] == 32


def test_ranks_wait_for_each_other_when_they_meet():
    """Of two ranks that are slow in turn, one waits in every step, or neither if they meet in every other."""
    job, seconds = with_own(Apart.Config(degree=2), shard=1), np.array([[1.0, 3.0], [3.0, 1.0]] * 2)
    numbers = np.arange(1, 5)
    assert seconds_with_meetings(JOB, seconds, numbers).sum() == 12
    assert seconds_with_meetings(job, seconds, numbers) == pytest.approx([3, 1, 3, 1])


def test_a_meeting_is_in_the_steps_that_have_one():
    job = with_own(Apart.Config(degree=2))
    (met,) = meetings(job)
    link = job.cluster.link(2, 16)
    assert met.seconds == pytest.approx(2 * link.collective(4 * own_weights(job), 2))
    steps = predicted(job)
    extra = steps.communication[1::2].min() - steps.communication[::2].max()
    assert extra == pytest.approx(met.seconds, rel=0.05)


def test_it_changes_the_times_of_passes():
    """Forward passes twice as long, in a job whose ranks do the same as without."""
    alone, twins = predicted(JOB), predicted(with_own(Twins.Config(degree=2)))
    assert 1.2 < (twins.pipeline / alone.pipeline).mean() < 1.5


def test_a_search_leaves_it_as_it_is():
    found = list(degrees_of(with_own(Apart.Config(degree=2)), 32))
    assert found and all(degrees.ranks == 32 and degrees.own for degrees in found)
    assert not list(degrees_of(with_own(Apart.Config(degree=2)), 33))


def test_its_ranks_share_no_micro_batch():
    slim = POLICIES.configure("slim", dp_merge=True)
    with pytest.raises(PlanError, match="weights of their own"):
        _ = replace(with_own(Apart.Config(degree=2)), packing=slim).by_sharers
