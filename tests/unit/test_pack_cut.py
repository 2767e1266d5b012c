"""Levelling by cutting documents: what it keeps, what it reaches, and `wlb_lazy` against `plain`."""

import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import figures

from wlb_titan.cost.degrees import Degrees
from wlb_titan.cost.workload import Quadratic, workload
from wlb_titan.documents.mixture import Mixture
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.job import Job
from wlb_titan.packing.plain import Plain, for_trial, imbalance_of_plain
from wlb_titan.packing.wlb import Wlb
from wlb_titan.packing.wlb_lazy import level_by_cutting
from wlb_titan.plan import LENGTH, START

EQUAL = Quadratic(0.0, 1.0)


def packed(packs):
    lengths = np.array([length for pack in packs for length in pack])
    documents = np.zeros((len(lengths), 4), dtype=np.int64)
    documents[:, 0] = np.arange(len(lengths))
    documents[:, START] = 100
    documents[:, LENGTH] = lengths
    return documents, np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])


def loads(documents, assigned, cost, count):
    return np.bincount(assigned, workload(cost, documents[:, LENGTH]), count)


def test_the_example():
    documents, assigned = level_by_cutting(*packed([[6, 4], [3, 1]]), 2, 20, EQUAL, 1.0)
    pieces = [(0, 100, 3), (1, 100, 4), (2, 100, 3), (3, 100, 1), (0, 103, 3)]
    assert [tuple(row[:3]) for row in documents.tolist()] == pieces
    assert assigned.tolist() == [0, 0, 1, 1, 1]


packings = st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=6), min_size=1, max_size=6)
costs = st.sampled_from([EQUAL, Quadratic(1.0, 0.0), Quadratic(0.5, 20.0)])


@settings(max_examples=200)
@given(packings, costs, st.floats(1.0, 1.6), st.integers(0, 40))
def test_tokens_stay_and_no_micro_batch_gets_heavier_than_the_heaviest_or_too_long(packs, cost, limit, room):
    before = packed(packs)
    documents = before[0]
    max_length = max(map(sum, packs)) + room
    after = level_by_cutting(*before, len(packs), max_length, cost, limit)
    runs = defaultdict(list)
    for id_, start, length, _ in after[0].tolist():
        assert length >= 1
        runs[id_].append((start, start + length))
    for id_, whole in enumerate(documents[:, LENGTH].tolist()):
        cut = sorted(runs[id_])
        assert cut[0][0] == 100 and cut[-1][1] == 100 + whole
        assert all(a[1] == b[0] for a, b in pairwise(cut))
        assert cut[0][1] - cut[0][0] >= 2, "what is cut keeps a token to predict"
    old, new = loads(*before, cost, len(packs)), loads(*after, cost, len(packs))
    assert new.max() <= old.max() * (1 + 1e-12)
    assert np.bincount(after[1], after[0][:, LENGTH], len(packs)).max() <= max_length
    light = old <= limit * new.mean()
    # One that took may be heavy in a later round, when cutting has lowered the mean, and gives down to that.
    least = np.minimum(old, new.mean())
    assert (new[light] >= least[light] * (1 - 1e-12)).all(), "only heavy micro-batches give"
    if (old <= limit * old.mean()).all():
        assert len(after[0]) == len(documents)


@given(packings.filter(lambda packs: min(map(sum, packs)) >= 30))
def test_where_work_is_tokens_all_are_made_equal(packs):
    after = level_by_cutting(*packed(packs), len(packs), 10_000, EQUAL, 1.0)
    whole = sum(map(sum, packs)) / len(packs)
    givers = sum(sum(pack) > whole for pack in packs)
    # Each giver keeps two tokens of a document, and cuts are between tokens.
    assert loads(*after, EQUAL, len(packs)).max() <= whole + 1 + 2 * givers + max(len(pack) for pack in packs)


def lengths_of(kind):
    rng = np.random.default_rng(0)
    return {
        "log-normal": rng.lognormal(5.5, 1.0, 20_000).astype(np.int64) + 2,
        "heavy": (rng.pareto(1.2, 20_000) * 100).clip(2, 200_000).astype(np.int64),
        "uniform": rng.integers(2, 900, 20_000),
        "equal": np.full(20_000, 300),
        "longer than the window": np.full(2000, 9000),
    }[kind]


def summary(policy, lengths, window):
    cost = "quadratic:917504,3.96e10"
    return figures(lengths, 60, packing=policy, window=window, micro_batches=8, cost=cost)


@pytest.mark.parametrize("window", [512, 4096, 65536])
@pytest.mark.parametrize("kind", ["log-normal", "heavy", "uniform", "equal", "longer than the window"])
def test_wlb_lazy_balances_at_least_as_well_as_plain(kind, window):
    plain, lazy = (summary(policy, lengths_of(kind), window) for policy in ("plain", "wlb_lazy"))
    for figure in ("imbalance_mean", "imbalance_p95"):
        assert lazy[figure] <= plain[figure] + 1e-3


def test_the_imbalance_of_plain_leaves_the_stream_where_it_is():
    stream = DocumentStream(Mixture(lengths_of("heavy"), seed=3), 512)
    job = Job(window=1024, micro_batches=4, packing=Plain.Config(cost_model="quadratic:1,100"))
    stream.fill(1000)
    state = stream.state_dict()
    found = imbalance_of_plain(stream, job)
    assert stream.state_dict() == state
    assert found == imbalance_of_plain(stream.from_start(), job) > 1


def test_a_trial_plans_some_of_many_data_parallel_ranks():
    job = Job(
        window=1024,
        micro_batches=192,
        degrees=Degrees(shard=96),
        packing=Wlb.Config(cost_model="quadratic:1,100"),
    )
    stream = DocumentStream(Mixture(lengths_of("heavy"), seed=3), 512)
    assert for_trial(job).micro_batches == 48
    assert [for_trial(replace(job, degrees=Degrees(shard=n))).micro_batches for n in (1, 2)] == [64, 64]
    assert imbalance_of_plain(stream, job) > 1
    assert len(Wlb(job.packing, stream, job).next().packs) == 192


def test_wlb_says_when_queues_lose_and_not_when_they_win():
    with pytest.warns(UserWarning, match=r"Queues lose on these documents.*`plain` has 1\.0"):
        summary("wlb", lengths_of("log-normal"), 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary("wlb", lengths_of("heavy"), 65536)
