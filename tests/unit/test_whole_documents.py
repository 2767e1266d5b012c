"""What a plan says of whole documents: tokens in pieces cut at their begin, keys that a token attends to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import make_planner

from wlb_titan.packing import POLICIES
from wlb_titan.plan import LENGTH


def test_by_hand():
    """Windows of 8 tokens: 5 + 3 and 3 + 5. Of the second document 3 tokens do not see the others."""
    plan = make_planner([5, 6, 5] * 4, window=8, micro_batches=2, seed=None).next()
    assert plan.cut_share(8) == 3 / 16
    assert plan.keys_per_token == (2 * 15 + 2 * 6) / 16


def test_pieces_of_a_window_each_do_not_count():
    """A document of 20 tokens is cut at 8 and at 16 whatever is done: nothing of it is called cut."""
    plan = make_planner([20, 4] * 4, window=8, micro_batches=3, seed=None).next()
    assert plan.cut_share(8) == 0
    assert plan.keys_per_token == (2 * 36 + 10 + 10) / 24


@given(
    lengths=st.lists(st.integers(2, 300), min_size=60, max_size=60),
    policy=st.sampled_from(["plain", "wlb_lazy", "slim"]),
)
def test_keys_are_those_that_the_micro_batches_show(lengths, policy):
    """Token by token: its place in its slice, and what lies before the slice."""
    packing = POLICIES.configure(policy, **({"micropacks": 6} if policy == "slim" else {}))
    memory = {"memory_unknown": "a test"}
    plan = make_planner(lengths, window=128, micro_batches=2, packing=packing, **memory).next()
    keys = []
    for m in plan.micro_batches:
        before = np.zeros(len(m.documents), int) if m.prefix is None else m.prefix
        for length, first in zip(m.documents[:, LENGTH].tolist(), before.tolist(), strict=True):
            keys += range(first + 1, first + length + 1)
    assert len(keys) == plan.tokens
    assert plan.keys_per_token == pytest.approx(np.mean(keys))
    assert 0 <= plan.cut_share(128) < 1
