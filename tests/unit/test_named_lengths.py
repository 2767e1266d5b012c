"""Named distributions of lengths: what their sources state of them holds."""

import numpy as np
import pytest

from wlb_titan.documents.lengths import MINIMUM, NAMED, named_or_read
from wlb_titan.errors import PlanError

MANY = 1 << 21


def test_web_has_the_mean_and_the_tail_of_its_source():
    lengths = NAMED["web"].draw(MANY)
    assert lengths.mean() == pytest.approx(20.5e12 / 14.5e9, rel=0.02)
    assert (lengths >= 65536).mean() == pytest.approx(6_661_465 / 14.5e9, rel=0.1)


def test_code_has_the_quantiles_of_its_files():
    found = np.quantile(NAMED["code"].draw(MANY), (0.5, 0.9, 0.95, 0.99))
    assert found == pytest.approx([1580, 8888, 15100, 39048], rel=0.03)


def test_paper_meets_what_is_stated_of_a_window_of_128k():
    """Windows are filled in order, and what is cut off begins the next one."""
    window, places = 131072, 32
    ends = np.cumsum(NAMED["paper"].draw())
    pieces = np.diff(np.union1d(ends, np.arange(window, ends[-1], window)), prepend=0)
    at = (np.arange(ends[-1] // window * places) + 0.5) * (window / places)
    profile = pieces[np.searchsorted(np.cumsum(pieces), at, side="right")].reshape(-1, places).mean(axis=0)
    assert profile.max() / profile.min() == pytest.approx(1.4, abs=0.05)
    assert places // 3 <= profile.argmax() < 2 * places // 3
    assert pieces[pieces < window // 2].sum() > 0.75 * pieces.sum()
    assert pieces.max() == window


@pytest.mark.parametrize(
    ("name", "median", "long", "longest"), [("wlbllm", 3227, 0.13, 124913), ("prolong", 1914, 0.03, 340149)]
)
def test_histograms_have_the_median_and_the_tail_of_the_files_that_were_counted(name, median, long, longest):
    for seed in (1, 2):
        lengths = NAMED[name].draw(seed=seed)
        assert np.median(lengths) == pytest.approx(median, rel=0.03)
        assert lengths[lengths >= 65536].sum() / lengths.sum() == pytest.approx(long, abs=0.005)
        assert lengths.min() >= 1 and 0.99 * longest < lengths.max() <= longest
        assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.01, "in an order of lengths"


def test_lengths_are_drawn_the_same_each_time():
    first, name = named_or_read("code")
    assert np.array_equal(first, named_or_read("code")[0]) and "Python files" in name
    assert first.min() >= MINIMUM


def test_a_name_that_is_neither_is_refused():
    with pytest.raises(
        PlanError, match=r"called 'wbe', .* one of web, code, chat, paper, wlbllm, prolong, nor a file"
    ):
        named_or_read("wbe")
