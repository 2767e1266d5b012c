"""The stream of documents against a list of all its tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.planner.errors import PlanError
from wlb_titan.planner.plan import ID, LENGTH, START
from wlb_titan.planner.stream import DocumentStream

corpora = st.lists(st.integers(1, 40), min_size=1, max_size=12).filter(lambda lengths: max(lengths) > 1)


def tokens_of(pieces):
    """(id, place in the document) of every token of the pieces."""
    return [(id_, start + i) for id_, start, length in pieces.tolist() for i in range(length)]


def all_tokens(stream, count):
    """The first `count` tokens of the stream, document by document."""
    tokens, id_ = [], 0
    while len(tokens) < count:
        tokens += [(id_, i) for i in range(int(stream.lengths[stream.row_of(id_)]))]
        id_ += 1
    return tokens[:count]


@given(corpora, st.lists(st.integers(0, 70), min_size=1, max_size=8), st.integers(0, 5))
def test_fill_gives_the_tokens_in_order_whatever_the_portions(lengths, portions, seed):
    stream = DocumentStream(np.array(lengths), window=8, seed=seed)
    parts = [stream.fill(portion) for portion in portions]
    assert [int(part[:, LENGTH].sum()) for part in parts] == portions
    got = [token for part in parts for token in tokens_of(part)]
    assert got == all_tokens(stream, sum(portions))


@given(corpora, st.lists(st.integers(1, 70), min_size=1, max_size=8), st.integers(2, 50))
def test_arrive_gives_what_begins_within_the_budget(lengths, budgets, window):
    stream = DocumentStream(np.array(lengths), window=window, seed=3)
    got = []
    for budget in budgets:
        pieces = stream.arrive(budget)
        assert pieces[:, LENGTH].max() <= window
        assert (pieces[:, START] % window == 0).all()
        ends = np.cumsum(pieces[:, LENGTH])
        assert ends[-1] >= budget > (ends[-2] if len(ends) > 1 else 0)
        got += tokens_of(pieces)
    assert got == all_tokens(stream, len(got))
    last = pieces[-1]  # a piece is shorter than the window only where its document ends
    assert last[LENGTH] == window or last[START] + last[LENGTH] == stream.lengths_of(pieces[-1:, ID])[0]


def test_arrive_reads_on_until_enough_pieces_have_a_label():
    stream = DocumentStream(np.array([1, 1, 1, 5, 1, 4]), window=4, seed=None)
    assert stream.arrive(2, at_least=2)[:, ID].tolist() == [0, 1, 2, 3, 3, 4, 5]


@given(corpora, st.integers(0, 9))
def test_every_epoch_is_a_permutation_and_row_of_knows_all_epochs(lengths, seed):
    stream = DocumentStream(np.array(lengths), window=8, seed=seed)
    n = len(lengths)
    epochs = [[stream.row_of(epoch * n + i) for i in range(n)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    again = DocumentStream(np.array(lengths), window=8, seed=seed)
    assert [again.row_of(2 * n + i) for i in range(n)] == epochs[2]


def test_epochs_are_shuffled_differently_and_seeds_matter():
    def order(seed, epoch):
        stream = DocumentStream(np.arange(1, 101), window=8, seed=seed)
        return [stream.row_of(100 * epoch + i) for i in range(100)]

    assert order(0, 0) != order(0, 1) != order(1, 1)
    assert order(None, 0) == order(None, 1) == list(range(100))


@given(corpora)
def test_only_a_documents_last_token_has_no_label(lengths):
    stream = DocumentStream(np.array(lengths), window=4, seed=0)
    pieces = stream.fill(60)
    whole = stream.lengths_of(pieces[:, ID])
    expected = [
        any(start + i + 1 < total for i in range(length))
        for (_, start, length), total in zip(pieces.tolist(), whole.tolist(), strict=True)
    ]
    assert stream.has_label(pieces).tolist() == expected


def test_skip_rest_goes_to_the_next_multiple_of_the_window():
    stream = DocumentStream(np.array([10, 3]), window=4, seed=None)
    assert stream.fill(2).tolist() == [[0, 0, 2]]
    assert stream.skip_rest() == 2
    assert stream.fill(4).tolist() == [[0, 4, 4]]
    assert stream.skip_rest() == 0
    assert stream.fill(1).tolist() == [[0, 8, 1]]
    assert stream.skip_rest() == 1  # the document ends before the next multiple
    assert stream.fill(1).tolist() == [[1, 0, 1]]


def test_the_cache_of_epochs_does_not_grow():
    stream = DocumentStream(np.full(300_000, 2), window=4, seed=0)
    for _ in range(8):
        stream.fill(600_000)
    assert len(stream._epochs) <= 3


@pytest.mark.parametrize(
    ("lengths", "window", "message"),
    [
        ([], 8, "no documents"),
        ([3, 0, 2], 8, "Document 1 of the corpus has length 0"),
        ([3, -4], 8, "length -4"),
        ([1, 1], 8, "no next token"),
        ([3], 0, "window is 0"),
        ([3], 1, "at least 2"),
    ],
)
def test_bad_corpora_are_named(lengths, window, message):
    with pytest.raises(PlanError, match=message):
        DocumentStream(np.array(lengths, dtype=np.int64), window=window, seed=0)
