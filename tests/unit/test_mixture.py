"""The order of a mixture's documents, and the permutation that it is computed by."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import make_planner

from wlb_titan.documents.mixture import UNIT, Mixture, Source
from wlb_titan.documents.permutation import permuted
from wlb_titan.errors import PlanError

ids = np.arange


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_permutation_has_every_number_once(count, seed, epoch):
    found = permuted(ids(count), count, seed, np.full(count, epoch))
    assert sorted(found.tolist()) == list(range(count))


@given(st.integers(1, 10**10), st.integers(0, 9), st.lists(st.integers(0, 10**10), max_size=20), st.data())
def test_a_place_of_a_permutation_does_not_depend_on_what_else_is_asked(count, seed, places, data):
    places = np.array([place % count for place in places], dtype=np.int64)
    epochs = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(places), max_size=len(places))), int)
    together = permuted(places, count, seed, epochs)
    alone = [int(permuted(places[i : i + 1], count, seed, epochs[i : i + 1])[0]) for i in range(len(places))]
    assert together.tolist() == alone
    assert all(0 <= number < count for number in alone)


def test_a_permutation_looks_shuffled():
    """Figures of a random order, within five standard deviations."""
    n = 100_000
    found = permuted(ids(n), n, 0, np.zeros(n, dtype=np.int64))
    other = permuted(ids(n), n, 0, np.ones(n, dtype=np.int64))
    for a, b in [(ids(n), found), (found[:-1], found[1:]), (found[:-2], found[2:]), (found, other)]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n)
    for numbers in (found[: n // 10], np.diff(found) % n):
        counts = np.bincount(numbers * 100 // n, minlength=100)
        expected = len(numbers) / 100
        assert abs(((counts - expected) ** 2 / expected).sum() - 99) < 5 * np.sqrt(2 * 99)


def turn(mixture, id_):
    """(part, number in the part) of a document: of the first part whose turn it is."""
    for part, turns in enumerate(mixture._turns):
        share = Fraction(turns, UNIT)
        before = int(id_ * share)
        if int((id_ + 1) * share) > before:
            return part, before
        id_ -= before
    return len(mixture._turns), id_


some_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(lambda lengths: max(lengths) > 1)


@settings(max_examples=60)
@given(st.lists(st.tuples(some_lengths, st.floats(0.01, 5)), min_size=1, max_size=4), st.integers(0, 5))
def test_parts_take_turns_and_go_through_their_documents_in_epochs(parts, seed):
    lengths = np.concatenate([np.array(part) for part, _ in parts])
    sources = [Source(name=str(i), documents=len(p), weight=w) for i, (p, w) in enumerate(parts)]
    mixture = Mixture(lengths, sources, seed=seed)
    rows, tokens = mixture.read(ids(200))
    assert tokens.tolist() == lengths[rows].tolist()
    expected = [turn(mixture, id_) for id_ in range(200)]
    assert mixture.sources_of(rows).tolist() == [part for part, _ in expected]
    # The n-th epoch of a source has each of its documents once, wherever they stand in the stream.
    first = np.cumsum([0] + [len(part) for part, _ in parts])
    seen = Counter()
    for (part, number), row in zip(expected, rows.tolist(), strict=True):
        epoch = number // len(parts[part][0])
        assert first[part] <= row < first[part + 1]
        seen[part, epoch, row] += 1
    assert set(seen.values()) == {1}
    # And a document looked up alone is the same.
    some = np.array([199, 3, 77])
    assert mixture.read(some)[0].tolist() == rows[some].tolist()
    far = ids(10**11, 10**11 + 5)
    assert mixture.read(far)[0].tolist() == [int(mixture.read(np.array([i]))[0][0]) for i in far]


LENGTHS = np.random.default_rng(0).pareto(1.0, 9000).astype(np.int64) % 5000 + 1
SOURCES = [
    Source(name="web", documents=6000, weight=3.0),
    Source(name="code", documents=1000, weight=1.0),
    Source(name="books", documents=2000, weight=4.0, long_length=100, long_share=0.75),
]


def test_every_source_gets_its_share_of_the_tokens():
    mixture = Mixture(LENGTHS, SOURCES, seed=0)
    count = 400_000
    rows, tokens = mixture.read(ids(count))
    sources = mixture.sources_of(rows)
    shares = np.bincount(sources, tokens) / tokens.sum()
    assert shares == pytest.approx([3 / 8, 1 / 8, 4 / 8], rel=0.02)
    books = tokens[sources == 2]
    assert books[books >= 100].sum() / books.sum() == pytest.approx(0.75, rel=0.02)
    assert set(rows[(sources == 2) & (tokens > 0)].tolist()) == set(range(7000, 9000))
    parts = np.split(LENGTHS, [6000, 7000])
    epochs = [tokens[sources == number].sum() / part.sum() for number, part in enumerate(parts)]
    assert mixture.epochs(count) == pytest.approx(epochs, rel=0.02)
    # Long documents and others have epochs of their own, in which each comes once.
    read = np.bincount(rows[tokens > 0])[7000:]
    long, others = read[LENGTHS[7000:] >= 100], read[LENGTHS[7000:] < 100]
    assert np.ptp(long) <= 1 and np.ptp(others) <= 1 and others.max() < long.min()


def test_the_parts_are_spread_evenly_over_the_stream():
    """In any run of documents a source's count is right to within one, so steps do not differ."""
    mixture = Mixture(LENGTHS, [*SOURCES[:2], Source(name="books", documents=2000, weight=4.0)], seed=0)
    sources = mixture.sources_of(mixture.read(ids(20_000))[0])
    share = np.bincount(sources) / len(sources)
    for number in range(3):
        counts = np.cumsum(sources == number)
        assert np.abs(counts - share[number] * np.arange(1, len(sources) + 1)).max() < 2.5


def test_a_sample_has_the_lengths_of_the_stream():
    assert Mixture(LENGTHS, seed=0).sample().tolist() == LENGTHS.tolist()
    mixture = Mixture(LENGTHS, SOURCES, seed=0)
    streamed = mixture.read(ids(400_000))[1]
    assert mixture.sample().mean() == pytest.approx(streamed[streamed > 0].mean(), rel=0.03)


def mixed_planner(sources):
    packing = {"packing": "wlb_lazy", "cost": "quadratic:1,400"}
    return make_planner(LENGTHS, window=512, micro_batches=4, seed=7, sources=sources, **packing)


def test_a_saved_state_goes_on_in_the_same_place_of_every_source():
    job = mixed_planner(SOURCES)
    for _ in range(7):
        job.next()
    state = job.state_dict()
    other = mixed_planner(SOURCES)
    other.load_state_dict(state)
    for _ in range(5):
        a, b = job.next(), other.next()
        assert a.digest(0) == b.digest(0)
        figures = job.source_figures(a)
        assert figures == other.source_figures(b)
        assert sum(value for key, value in figures.items() if key.startswith("tokens/")) == a.tokens
    assert mixed_planner([]).source_figures(a) == {}
    with pytest.raises(PlanError, match="its mixture is"):
        mixed_planner([*SOURCES[:2], Source(name="books", documents=2000, weight=5.0)]).load_state_dict(state)


def test_the_description_says_how_often_each_source_is_read():
    tokens = LENGTHS[6000:7000].sum()
    line = Mixture(LENGTHS, SOURCES, seed=0).describe(1000)[1]
    facts = f"12.5% of the tokens; has 1,000 documents, {tokens:,} tokens"
    assert line == f"code: {facts}, each read once in {tokens / 125:,.1f} steps"
    assert Mixture(LENGTHS, seed=0).describe(1000) == []


def test_mixtures_that_cannot_be_met():
    for source, message in (
        ({}, "The source 'b' has no tokens"),
        ({"long_length": 99, "long_share": 0.5}, "no documents of at least 99 tokens .the longest has 8"),
        ({"long_length": 1, "long_share": 0.5}, "only documents of at least 1 tokens"),
    ):
        with pytest.raises(PlanError, match=message):
            sources = [Source(name="a", documents=3, **source), Source(name="b", documents=1)]
            Mixture(np.array([8, 3, 2, 0]), sources, seed=0)


def test_empty_documents_take_nothing_from_their_source_s_share():
    lengths = np.array([10] * 50 + [10, 0, 0, 0, 0] * 50)
    sources = [Source(name="full", documents=50), Source(name="sparse", documents=250)]
    rows, tokens = Mixture(lengths, sources, seed=0).read(np.arange(6000))
    assert tokens[rows < 50].sum() / tokens.sum() == pytest.approx(0.5, abs=0.01)
