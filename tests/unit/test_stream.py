"""The stream of documents, against a list of all its tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb_titan.documents.mixture import Mixture
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.plan import ID, LENGTH, START

corpora = st.lists(st.integers(1, 40), min_size=1, max_size=12).filter(lambda lengths: max(lengths) > 1)


def tokens_of(pieces):
    """(id, place in the document) of every token of the pieces."""
    return [(id_, start + i) for id_, start, length in pieces.tolist() for i in range(length)]


def all_tokens(stream, count):
    """The first `count` tokens of the stream, document by document."""
    tokens, id_ = [], 0
    while len(tokens) < count:
        tokens += [(id_, i) for i in range(int(stream.lengths_of(np.array([id_]))[0]))]
        id_ += 1
    return tokens[:count]


@given(corpora, st.lists(st.integers(0, 70), min_size=1, max_size=8), st.integers(0, 5))
def test_fill_gives_the_tokens_in_order_whatever_the_portions(lengths, portions, seed):
    stream = DocumentStream(Mixture(np.array(lengths), seed=seed), 8)
    parts = [stream.fill(portion) for portion in portions]
    assert [int(part[:, LENGTH].sum()) for part in parts] == portions
    got = [token for part in parts for token in tokens_of(part)]
    assert got == all_tokens(stream, sum(portions))


@given(corpora, st.lists(st.integers(1, 70), min_size=1, max_size=8), st.integers(2, 50))
def test_arrive_gives_what_begins_within_the_budget(lengths, budgets, window):
    stream = DocumentStream(Mixture(np.array(lengths), seed=3), window)
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


@given(
    st.lists(st.sampled_from([1, 1, 1, 2, 30]), min_size=1, max_size=40).map(lambda lengths: [*lengths, 2]),
    *(st.integers(0, 30), st.integers(1, 30), st.integers(0, 5)),
)
def test_what_is_read_until_enough_or_to_a_label_is_as_if_read_one_by_one(lengths, tokens, wanted, seed):
    """Where most documents have one token, and some were given back; in few steps however many that are."""
    stream, alone = (DocumentStream(Mixture(np.array(lengths), seed=seed), 8) for _ in range(2))
    for each in (stream, alone):
        each.give_back(each.arrive(seed))
    asked = []
    pieces = stream.arrive(tokens, lambda read: asked.append(1) or (read[:, LENGTH] > 1).sum() >= wanted)
    naive = alone.arrive(tokens)
    while (naive[:, LENGTH] > 1).sum() < wanted:
        naive = np.concatenate([naive, alone.arrive(1)])
    assert pieces.tolist() == naive.tolist() and len(asked) <= 6 + 3 * len(pieces).bit_length()
    skipped, state = 0, alone.state_dict()
    while not alone.has_label(alone.fill(1)).any():
        skipped, state = skipped + 1, alone.state_dict()
    assert stream.skip_unlabelled() == skipped
    assert str(stream.state_dict()) == str(state)


def test_epochs_are_shuffled_differently_and_seeds_matter():
    def order(seed, epoch):
        return Mixture(np.arange(1, 101), seed=seed).read(np.arange(100) + 100 * epoch)[0].tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), order(2**33, 0)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(None, 0) == order(None, 1) == list(range(100))


@given(corpora)
def test_only_a_documents_last_token_has_no_label(lengths):
    stream = DocumentStream(Mixture(np.array(lengths), seed=0), 4)
    pieces = stream.fill(60)
    whole = stream.lengths_of(pieces[:, ID])
    rows = zip(pieces.tolist(), whole.tolist(), strict=True)
    expected = [any(start + i + 1 < total for i in range(length)) for (_, start, length), total in rows]
    assert stream.has_label(pieces).tolist() == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=600).filter(lambda lengths: max(lengths) > 1))
def test_documents_without_tokens_are_passed_over(lengths):
    stream = DocumentStream(Mixture(np.array(lengths), seed=1), 2)
    total = sum(lengths)
    pieces = np.concatenate([stream.arrive(total), stream.fill(2 * total)])
    assert (pieces[:, LENGTH] > 0).all()
    assert tokens_of(pieces)[: 3 * total] == all_tokens(stream, 3 * total)


class OnDemand:
    """Lengths that only answer questions, and remember the largest."""

    def __init__(self, lengths):
        self.lengths, self.most = lengths, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, rows):
        found = self.lengths[rows]
        self.most = max(self.most, len(found))
        return found


def test_lengths_are_looked_up_a_block_at_a_time():
    """Whatever the size of the corpus, so that planning takes the same memory for 10^9 documents."""
    lengths = OnDemand(np.full(5_000_000, 2, dtype=np.int32))
    stream = DocumentStream(Mixture(lengths, seed=0), 4)
    assert lengths.most <= 1 << 20
    lengths.most = 0
    for _ in range(5):
        stream.fill(600_000)
    assert lengths.most <= 1 << 16 and stream._block.cache_info().currsize <= 4


BAD = {"no documents": [], "no tokens": [0, 0], "length -4": [3, -4], "no next token": [1, 1]}


@pytest.mark.parametrize("message", [*BAD, "window is 1 tokens; it must be at least 2"])
def test_bad_corpora_are_named(message):
    lengths, window = (BAD[message], 8) if message in BAD else ([3], 1)
    with pytest.raises(PlanError, match=message):
        DocumentStream(Mixture(np.array(lengths, dtype=np.int64), seed=0), window)


def test_pieces_given_back_come_next_in_the_order_of_the_stream():
    stream = DocumentStream(Mixture(np.array([8, 8, 8, 8]), seed=None), 8)
    stream.fill(4)  # the first piece begins later in its document than the others
    read = stream.fill(20)
    stream.give_back(read[::-1])
    assert stream.fill(20).tolist() == read.tolist()
