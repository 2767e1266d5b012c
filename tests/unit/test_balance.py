"""The planner as a library: what must hold of any assignment and epoch, and how near the best it comes."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import annotated_types
import numpy as np
import pytest
from commands import ROOT
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
    every = itertools.product(range(ranks), repeat=len(lengths))
    every = (owners for owners in every if len(set(owners)) == ranks)
    best = min(np.bincount(owners, lengths, ranks).max() for owners in every)
    assert plan.work.max() <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # Graham's bound of the first deal


@given(
    lengths=st.lists(st.integers(1, 500), min_size=12, max_size=80),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    limit=st.integers(500, 3000),
    equal=st.booleans(),
)
def test_what_finds_no_room_waits_and_the_earliest_do_not(lengths, ranks, micro_batches, limit, equal):
    words = {"tokens_per_rank": limit, "may_wait": True, "equal_counts": equal}
    plan = wlb_titan.balance(lengths, ranks=ranks, micro_batches=micro_batches, **words)
    batches = list(itertools.chain(*plan.micro_batches))
    dealt = sorted(itertools.chain(*batches))
    assert dealt == list(range(len(dealt))) and plan.waiting == list(range(len(dealt), len(lengths)))
    assert len(batches) == ranks * micro_batches and plan.tokens.max() <= limit
    assert not equal or len({len(batch) for batch in batches}) == 1
    if plan.waiting and not equal:  # one more would not have fitted
        with pytest.raises(PlanError, match="do not fit into"):
            bound = {"micro_batches": micro_batches, "tokens_per_rank": limit}
            wlb_titan.balance(lengths[: len(dealt) + 1], ranks=ranks, **bound)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_epoch_has_every_sequence_once(data):
    ranks, micro_batches, pool = (data.draw(st.integers(1, most)) for most in (4, 3, 3))
    sequences = ranks * micro_batches * data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=ranks, max_size=5 * sequences))
    limit = data.draw(st.none() | st.integers(300, 1500))
    words = {"ranks": ranks, "micro_batches": micro_batches, "sequences": sequences, "pool": pool}
    sampler = wlb_titan.BalancedBatchSampler(lengths, tokens_per_rank=limit, **words)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(sampler) == len(batches) and len(batches) % ranks == 0 and all(batches)
        assert sorted([*itertools.chain(*batches), *sampler.left_out]) == list(range(len(lengths)))
        assert limit is None or max(sum(lengths[i] for i in batch) for batch in batches) <= limit
        assert not sampler.left_out or (limit and len(sampler.left_out) < ranks)
        epochs.append(batches)
    assert epochs[0] == epochs[2]


def test_a_step_has_the_sequences_of_the_shuffle_and_a_pool_evens_out_more():
    lengths = np.random.default_rng(0).lognormal(6, 1, 4000).astype(int) + 1
    words = {"ranks": 4, "micro_batches": 2, "sequences": 40}
    sampler, pooled = (wlb_titan.BalancedBatchSampler(lengths, pool=pool, **words) for pool in (1, 10))
    order = np.random.default_rng([0, 0]).permutation(4000)
    batches = list(sampler)
    for number, step in enumerate(np.split(order, 100)):
        assert sorted(itertools.chain(*batches[8 * number : 8 * number + 8])) == sorted(step.tolist())
    assert len(pooled) == len(sampler) == 800
    assert 1 <= pooled.imbalance < sampler.imbalance


def test_a_shared_prompt_is_computed_once():
    costs = {"tokens": lambda tokens: tokens.astype(float), "model": Quadratic(1.0, 0.0)}
    for name, expected in (("tokens", 100 + 10 + 20), ("model", 100**2 + 110**2 - 100**2 + 120**2 - 100**2)):
        words = {"groups": ["a", "a", "b"], "prompts": [100, 100, 50], "cost": costs[name]}
        plan = wlb_titan.balance([10, 20, 30], ranks=2, **words)
        place = next((r, 0) for r, own in enumerate(plan.micro_batches) if own == [[0, 1]])
        assert plan.work[place] == pytest.approx(expected)
        assert plan.tokens[place] == 130


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": [5, 0], "ranks": 1}, r"lengths\[1\] is 0"),
        ({"lengths": [5, 9], "ranks": "2"}, "ranks is '2'"),
        ({"lengths": [5, 9], "ranks": 1, "tokens_per_rank": 8.5}, "tokens_per_rank is 8.5"),
        ({"lengths": [5, 9], "ranks": 1, "micro_batches": "many"}, 'from 1 to 2, or "auto"'),
        ({"lengths": [5], "ranks": 2}, "1 sequences cannot be shared by 2 ranks"),
        ({"lengths": [5, 9], "ranks": 1, "tokens_per_rank": 8}, "9 tokens does not fit"),
        ({"lengths": [5] * 3, "ranks": 1, "tokens_per_rank": 9, "micro_batches": 1}, "do not fit into 1"),
        ({"lengths": [5] * 3, "ranks": 2, "micro_batches": 2}, "from 1 to 1"),
        ({"lengths": [5] * 3, "ranks": 1, "groups": [1]}, "groups has 1 values"),
        ({"lengths": [5] * 2, "ranks": 1, "groups": [1, 1], "prompts": [3, 4]}, "share their prompt"),
        ({"lengths": [0.5], "ranks": 1}, "whole numbers"),
        ({"lengths": [5] * 3, "ranks": 2, "equal_counts": True}, "3 sequences cannot be divided into 2"),
        ({"lengths": [5] * 3, "ranks": 1, "may_wait": True}, "must be a number"),
        ({"lengths": [5] * 3, "ranks": 1, "cost": np.ones(2)}, "one number for each sequence"),
        ({"lengths": [5], "ranks": 1, "cost": lambda tokens: tokens * 0.0}, "positive for every sequence"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_said(arguments, said):
    with pytest.raises(PlanError, match=said):
        wlb_titan.balance(**arguments)


@pytest.mark.parametrize("wrong", [{"micro_batches": "auto"}, {"pool": 0}, {"sequences": None}])
def test_a_sampler_takes_whole_numbers(wrong):
    with pytest.raises(PlanError, match=f"{min(wrong)} is .*; it must be a whole number"):
        wlb_titan.BalancedBatchSampler([9] * 64, **{"ranks": 2, "micro_batches": 2, "sequences": 9, **wrong})


@pytest.mark.slow
def test_examples_of_the_page_run_where_nothing_is_but_numpy_and_annotated_types(tmp_path):
    """In a Python of their own, which finds nothing else."""
    libraries = [Path(module.__file__).parent for module in (np, annotated_types)]
    for folder in (*libraries, libraries[0].with_name("numpy.libs")):
        (tmp_path / folder.name).symlink_to(folder)
    package = tmp_path / "wlb_titan"  # as it is installed
    package.mkdir()
    for part in (*(ROOT / "wlb_titan").iterdir(), ROOT / "kernels", ROOT / "launch"):
        (package / part.name).symlink_to(part)
    page = (ROOT / "docs" / "python.md").read_text()
    examples = re.findall(r"\n\n```python\n(.*?)```", page, re.DOTALL)
    for name, example in zip(("balance(", "Sampler(", "Job("), examples, strict=True):
        assert name in example
    program = "".join([f"import sys; sys.path.append({str(tmp_path)!r})\n", *examples])
    run = [sys.executable, "-I", "-S", "-c", program]
    assert re.fullmatch(r"(1\.\d{3}\n){3}", subprocess.check_output(run, text=True))
