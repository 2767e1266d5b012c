"""Filling bins: levels, many short documents at once, and what a liquid would do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.bins import REMAINS, Bins, balanced, level

loads_and_rooms = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=8)


@given(loads_and_rooms, st.floats(0, 1))
def test_the_level_takes_exactly_the_work(bins, share):
    loads, rooms = np.array(bins).T
    capacities = loads + rooms
    work = share * float((capacities - loads).sum())
    surface = level(loads, capacities, work)
    if np.isinf(surface):  # by a rounding error more than there is room for
        assert work == pytest.approx((capacities - loads).sum())
    else:
        poured = (np.clip(surface, loads, capacities) - loads).sum()
        assert poured == pytest.approx(work, abs=1e-9)


def one_by_one(lengths, works, count, bound):
    """The bin of each document: of those with room the one with the least load."""
    loads, filled, assigned = [0.0] * count, [0] * count, []
    for length, work in zip(lengths.tolist(), works.tolist(), strict=True):
        choices = sorted(range(count), key=loads.__getitem__)
        roomy = [index for index in choices if filled[index] + length <= bound]
        assigned.append(roomy[0] if roomy else REMAINS)
        if roomy:
            loads[roomy[0]] += work
            filled[roomy[0]] += length
    return assigned, loads, filled


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 6), st.integers(20, 120))
def test_bins_are_filled_as_by_a_search(lengths, count, bound):
    lengths, bins = np.array(lengths), Bins(count, bound)
    works = lengths * (lengths + 30.0)
    assigned = bins.place(lengths, works).tolist()
    assert (assigned, bins.loads, bins.lengths) == one_by_one(lengths, works, count, bound)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(1, 6), st.integers(30, 400))
def test_pour_keeps_to_the_bound_and_leaves_nothing_that_has_ample_room(lengths, count, bound):
    lengths = -np.sort(-np.array(lengths))
    works = lengths * 1.0 + lengths**2 / 50
    bins = Bins(count, bound)
    assigned = bins.pour(lengths, works)
    held = assigned != REMAINS
    assert max(bins.lengths) <= bound
    assert bins.lengths == np.bincount(assigned[held], lengths[held], count).astype(int).tolist()
    assert bins.loads == pytest.approx(np.bincount(assigned[held], works[held], count))
    if lengths.sum() < count * (bound - 60) * 0.6:
        assert held.all()


def test_pour_levels_what_is_uneven_and_a_ceiling_leaves_the_shortest():
    rng = np.random.default_rng(0)
    bins = Bins(16, 10**6)
    long = -np.sort(-rng.integers(5_000, 60_000, 16))
    bins.place(long, long.astype(float))
    lengths = -np.sort(-rng.integers(5, 900, 20_000))
    bins.pour(lengths, lengths.astype(float))
    assert max(bins.loads) / np.mean(bins.loads) < 1.0005
    bins = Bins(2, 10**6)
    lengths = np.array([64] * 50 + [8] * 100)
    assigned = bins.pour(lengths, lengths.astype(float), ceiling=1700.0)
    assert (assigned[:50] != REMAINS).all()
    assert (assigned[50:] == REMAINS).sum() == pytest.approx((4000 - 3400) / 8, abs=3)


def test_portions_see_that_full_bins_lag_behind():
    bins = Bins(2, max_length=100)
    bins.place(np.array([90, 60]), np.array([30.0, 60.0]))
    ceilings, imbalance, left = bins.portions(40.0, 40)  # the long one has room for 10
    assert ceilings[-1] == np.inf
    assert imbalance[-1] == pytest.approx(90 / 65)  # 40 and 90
    assert left[-1] == 0
    assert imbalance[0] == pytest.approx(60 / 50)  # 40 and 60
    assert left[0] == pytest.approx(30)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12), st.integers(1, 4))
def test_ranks_get_equal_counts_and_near_equal_sums(works, ranks):
    works = np.array(works * ranks)
    assigned = balanced(works, ranks)
    assert sorted(pack for packs in assigned for pack in packs) == list(range(len(works)))
    assert {len(packs) for packs in assigned} == {len(works) // ranks}
    sums = [works[packs].sum() for packs in assigned]
    assert max(sums) - min(sums) <= works.max() + 1e-9
