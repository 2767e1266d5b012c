"""The planner as a library: what must hold of any assignment, and how near the best it comes."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wlb_titan
from wlb_titan.cost.workload import Quadratic
from wlb_titan.errors import PlanError


def cannot_fit(sizes, ranks, limit):
    """Whether there is no way into most micro-batches: of their units the smallest have to share."""
    if len(sizes) < ranks or max(sizes) > limit:
        return True
    sizes, sharing = sorted(sizes), len(sizes) % ranks
    pairs = zip(sizes[:sharing], reversed(sizes[sharing : 2 * sharing]), strict=True)
    return any(one + other > limit for one, other in pairs)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_everything_is_there_once_and_fits_into_as_few_as_can_be(data):
    ranks = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=80))
    labels = st.lists(st.integers(0, 30), min_size=len(lengths), max_size=len(lengths))
    groups = data.draw(st.none() | labels)
    limit = data.draw(st.none() | st.integers(400, 4000))
    arguments = {"ranks": ranks, "tokens_per_rank": limit, "groups": groups}
    owners = np.unique(groups or np.arange(len(lengths)), return_inverse=True)[1]
    sizes = np.bincount(owners, lengths)
    if cannot_fit(sizes.tolist(), ranks, limit or np.inf):
        with pytest.raises(PlanError):
            wlb_titan.balance(lengths, **arguments)
        return
    plan = wlb_titan.balance(lengths, **arguments)
    assert wlb_titan.balance(np.array(lengths), **arguments).micro_batches == plan.micro_batches
    batches = [batch for own in plan.micro_batches for batch in own]
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert len({len(own) for own in plan.micro_batches}) == 1 and all(batches)
    assert plan.tokens.ravel().tolist() == [sum(lengths[i] for i in batch) for batch in batches]
    assert limit is None or plan.tokens.max() <= limit
    assert np.allclose(plan.work.ravel(), [wlb_titan.causal()(np.array(lengths)[b]).sum() for b in batches])
    held = [set(owners[batch]) for batch in batches]
    assert sum(map(len, held)) == len(sizes), "groups stay together"
    count = plan.work.shape[1]
    if count > 1:
        with pytest.raises(PlanError, match="do not fit into"):
            wlb_titan.balance(lengths, micro_batches=count - 1, **arguments)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=3, max_size=8), ranks=st.integers(2, 3))
def test_it_is_near_the_best_of_all(lengths, ranks):
    plan = wlb_titan.balance(lengths, ranks=ranks, cost=lambda tokens: tokens.astype(float))
    best = min(
        np.bincount(owners, lengths, ranks).max()
        for owners in itertools.product(range(ranks), repeat=len(lengths))
        if len(set(owners)) == ranks
    )
    assert plan.work.max() <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # Graham's bound of the first deal


def test_a_shared_prompt_is_computed_once():
    costs = {"tokens": lambda tokens: tokens.astype(float), "model": Quadratic(1.0, 0.0)}
    for name, expected in (("tokens", 100 + 10 + 20), ("model", 100**2 + 110**2 - 100**2 + 120**2 - 100**2)):
        plan = wlb_titan.balance(
            [10, 20, 30], ranks=2, groups=["a", "a", "b"], prompts=[100, 100, 50], cost=costs[name]
        )
        place = next((r, 0) for r, own in enumerate(plan.micro_batches) if own == [[0, 1]])
        assert plan.work[place] == pytest.approx(expected)
        assert plan.tokens[place] == 130


def test_a_measured_cost_goes_through_its_points_and_grows_as_the_square():
    cost = wlb_titan.measured([100, 200], [1.0, 3.0])
    assert cost(np.array([50, 100, 150, 200, 400])).tolist() == [0.5, 1.0, 2.0, 3.0, 12.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": [5, 0], "ranks": 1}, "lengths has 0"),
        ({"lengths": [5], "ranks": 2}, "1 sequences cannot be shared by 2 ranks"),
        ({"lengths": [5, 9], "ranks": 1, "tokens_per_rank": 8}, "9 tokens does not fit"),
        ({"lengths": [5] * 3, "ranks": 1, "tokens_per_rank": 9, "micro_batches": 1}, "do not fit into 1"),
        ({"lengths": [5] * 3, "ranks": 2, "micro_batches": 2}, "from 1 to 1"),
        ({"lengths": [5] * 3, "ranks": 1, "groups": [1]}, "groups has 1 values"),
        ({"lengths": [5] * 2, "ranks": 1, "groups": [1, 1], "prompts": [3, 4]}, "share their prompt"),
        ({"lengths": [0.5], "ranks": 1}, "whole numbers"),
        ({"lengths": [5], "ranks": 1, "cost": lambda tokens: tokens * 0.0}, "positive work"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_said(arguments, said):
    with pytest.raises(PlanError, match=said):
        wlb_titan.balance(**arguments)


@pytest.mark.slow
def test_examples_of_the_page_run_and_import_neither_torch_nor_datasets():
    """In a Python of their own, which has imported nothing yet."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    examples = re.findall(r"\n\n```python\n(.*?)```", page, re.DOTALL)  # without those that are "not run"
    assert ["balance(" in examples[0], "Job(" in examples[1]] == [True, True]
    program = "".join([*examples, "import sys; print(*sys.modules)"])
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "torchtitan", "datasets", "pyarrow"} & set(loaded.split())
