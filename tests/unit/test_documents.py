"""The documents of a job: a mixture's order, the stream, what is held out, lengths without a corpus."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import job, make_planner

from wlb_titan.config.documents import steps_of_epochs
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED, named_or_read
from wlb_titan.documents.mixture import UNIT, Divided, Mixture, Source, is_held_out
from wlb_titan.documents.permutation import permuted
from wlb_titan.documents.stream import DocumentStream
from wlb_titan.errors import PlanError
from wlb_titan.packing import POLICIES
from wlb_titan.plan import ID, LENGTH, START, MicroBatch, Plan
from wlb_titan.validation import Once


def ids(stop, start=0):
    return np.arange(start, stop)


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


def oracle(mixture, count):
    """(part, number in the part) of the first documents: at each id the first part whose turn it is."""
    turns = [Fraction(share, UNIT) for share in mixture._turns]
    result = []
    for id_ in range(count):
        rest = id_
        for part, share in enumerate(turns):
            before = int(rest * share)
            if int((rest + 1) * share) > before:
                result.append((part, before))
                break
            rest -= before
        else:
            result.append((len(turns), rest))
    return result


mixtures = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(lambda lengths: max(lengths) > 1),
        st.floats(0.01, 5),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(mixtures, st.integers(0, 5))
def test_parts_take_turns_and_go_through_their_documents_in_epochs(parts, seed):
    lengths = np.concatenate([np.array(part) for part, _ in parts])
    sources = [Source(name=str(i), documents=len(p), weight=w) for i, (p, w) in enumerate(parts)]
    mixture = Mixture(lengths, sources, seed=seed)
    rows, tokens = mixture.read(ids(200))
    assert tokens.tolist() == lengths[rows].tolist()
    expected = oracle(mixture, 200)
    assert mixture.sources_of(ids(200)).tolist() == [part for part, _ in expected]
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
    far = ids(10**11 + 5, 10**11)
    assert mixture.sources_of(far).tolist() == [int(mixture.sources_of(np.array([i]))[0]) for i in far]


LENGTHS = np.random.default_rng(0).pareto(1.0, 9000).astype(np.int64) % 5000 + 1
SOURCES = [
    Source(name="web", documents=6000, weight=3.0),
    Source(name="code", documents=1000, weight=1.0),
    Source(name="books", documents=2000, weight=4.0, long_length=100, long_share=0.75),
]


def test_every_source_gets_its_share_of_the_tokens():
    mixture = Mixture(LENGTHS, SOURCES, seed=0)
    count = 400_000
    sources, (rows, tokens) = mixture.sources_of(ids(count)), mixture.read(ids(count))
    shares = np.bincount(sources, tokens) / tokens.sum()
    assert shares == pytest.approx([3 / 8, 1 / 8, 4 / 8], rel=0.02)
    books = tokens[sources == 2]
    assert books[books >= 100].sum() / books.sum() == pytest.approx(0.75, rel=0.02)
    assert set(rows[(sources == 2) & (tokens > 0)].tolist()) == set(range(7000, 9000))
    parts = np.split(LENGTHS, [6000, 7000])
    epochs = [tokens[sources == number].sum() / part.sum() for number, part in enumerate(parts)]
    assert mixture.epochs(count) == pytest.approx(epochs, rel=0.02)


def test_long_documents_and_others_have_epochs_of_their_own():
    lengths = np.array([50, 1, 2, 3, 60, 4])
    source = Source(name="", documents=6, long_length=50, long_share=0.5)
    mixture = Mixture(lengths, [source], seed=3)
    rows, tokens = mixture.read(ids(600))
    counts = np.bincount(rows[tokens > 0], minlength=6)
    assert np.ptp(counts[[0, 4]]) <= 1
    assert np.ptp(counts[[1, 2, 3, 5]]) <= 1
    assert counts[0] < counts[1]  # two long documents have many more tokens than four others


def test_the_parts_are_spread_evenly_over_the_stream():
    """In any run of documents a source's count is right to within one, so steps do not differ."""
    mixture = Mixture(LENGTHS, [*SOURCES[:2], Source(name="books", documents=2000, weight=4.0)], seed=0)
    sources = mixture.sources_of(ids(20_000))
    share = np.bincount(sources) / len(sources)
    for number in range(3):
        counts = np.cumsum(sources == number)
        assert np.abs(counts - share[number] * np.arange(1, len(sources) + 1)).max() < 2.5


def test_a_sample_has_the_lengths_of_the_stream():
    assert Mixture(LENGTHS, seed=0).sample().tolist() == LENGTHS.tolist()
    mixture = Mixture(LENGTHS, SOURCES, seed=0)
    streamed = mixture.read(ids(400_000))[1]
    assert mixture.sample().mean() == pytest.approx(streamed[streamed > 0].mean(), rel=0.03)


def mixed_planner(sources, **changes):
    arguments = {"window": 512, "micro_batches": 4, "seed": 7, "packing": "wlb_lazy", "sources": sources}
    return make_planner(LENGTHS, **{**arguments, "cost": "quadratic:1,400", **changes})


def test_a_saved_state_goes_on_in_the_same_place_of_every_source():
    job = mixed_planner(SOURCES)
    for _ in range(7):
        job.next()
    state = job.state_dict()
    other = mixed_planner(SOURCES)
    other.load_state_dict(state)
    for _ in range(5):
        a, b = job.next(), other.next()
        assert [m.documents.tolist() for m in a.micro_batches] == [
            m.documents.tolist() for m in b.micro_batches
        ]
        figures = job.source_figures(a)
        assert figures == other.source_figures(b)
        assert sum(value for key, value in figures.items() if key.startswith("tokens/")) == a.tokens
    assert mixed_planner([]).source_figures(a) == {}
    with pytest.raises(PlanError, match="its mixture is"):
        mixed_planner([*SOURCES[:2], Source(name="books", documents=2000, weight=5.0)]).load_state_dict(state)


def test_the_description_says_how_often_each_source_is_read():
    lines = Mixture(LENGTHS, SOURCES, seed=0).describe(1000)
    assert lines[1].startswith("code: 12.5% of the tokens; has 1,000 documents, ")
    steps = LENGTHS[6000:7000].sum() / 125
    assert lines[1].endswith(f"each read once in {steps:,.1f} steps")
    assert "; 75.0% from the" in lines[2]
    assert Mixture(LENGTHS, seed=0).describe(1000) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "The source 'b' has no tokens"),
        ({"long_length": 4}, "only one of long_length and long_share"),
        ({"long_length": 99, "long_share": 0.5}, "no documents of at least 99 tokens .the longest has 8"),
        ({"long_length": 1, "long_share": 0.5}, "only documents of at least 1 tokens"),
    ],
)
def test_mixtures_that_cannot_be_met(source, message):
    with pytest.raises(PlanError, match=message):
        sources = [Source(name="a", documents=3, **source), Source(name="b", documents=1)]
        Mixture(np.array([8, 3, 2, 0]), sources, seed=0)


# The stream, against a list of all its tokens.

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


def test_arrive_reads_on_until_enough_pieces_have_a_label():
    stream = DocumentStream(Mixture(np.array([1, 1, 1, 5, 1, 4]), seed=None), 4)
    pieces = stream.arrive(2, lambda pieces: stream.has_label(pieces).sum() >= 2)
    assert pieces[:, ID].tolist() == [0, 1, 2, 3, 3, 4, 5]


def rows(stream, start, stop):
    return stream.mixture.read(np.arange(start, stop))[0].tolist()


def test_epochs_are_shuffled_differently_and_seeds_matter():
    def order(seed, epoch):
        stream = DocumentStream(Mixture(np.arange(1, 101), seed=seed), 8)
        return rows(stream, 100 * epoch, 100 * (epoch + 1))

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), order(2**33, 0)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(None, 0) == order(None, 1) == list(range(100))


@given(corpora)
def test_only_a_documents_last_token_has_no_label(lengths):
    stream = DocumentStream(Mixture(np.array(lengths), seed=0), 4)
    pieces = stream.fill(60)
    whole = stream.lengths_of(pieces[:, ID])
    expected = [
        any(start + i + 1 < total for i in range(length))
        for (_, start, length), total in zip(pieces.tolist(), whole.tolist(), strict=True)
    ]
    assert stream.has_label(pieces).tolist() == expected


def test_skip_rest_goes_to_the_next_multiple_of_the_window():
    stream = DocumentStream(Mixture(np.array([10, 3]), seed=None), 4)
    assert stream.fill(2).tolist() == [[0, 0, 2]]
    assert stream.skip_rest() == 2
    assert stream.fill(4).tolist() == [[0, 4, 4]]
    assert stream.skip_rest() == 0
    assert stream.fill(1).tolist() == [[0, 8, 1]]
    assert stream.skip_rest() == 1  # the document ends before the next multiple
    assert stream.fill(1).tolist() == [[1, 0, 1]]


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


@pytest.mark.parametrize(
    ("lengths", "window", "message"),
    [
        ([], 8, "no documents"),
        ([0, 0], 8, "no tokens"),
        ([3, -4], 8, "length -4"),
        ([1, 1], 8, "no next token"),
        ([3], 0, "window is 0"),
        ([3], 1, "at least 2"),
    ],
)
def test_bad_corpora_are_named(lengths, window, message):
    with pytest.raises(PlanError, match=message):
        DocumentStream(Mixture(np.array(lengths, dtype=np.int64), seed=0), window)


# Documents held out of training and validated on once; and how many steps an epoch is.


def test_a_document_is_trained_on_or_held_out():
    rows = np.arange(100_000)
    assert is_held_out(rows, 0.01).mean() == pytest.approx(0.01, rel=0.15)
    assert (is_held_out(rows, 0.01) <= is_held_out(rows, 0.02)).all()
    lengths = np.arange(1, 1001)
    trained, validated = (Divided(lengths, 0.3, held_out=held) for held in (False, True))
    assert (trained[0:1000] + validated[0:1000]).tolist() == lengths.tolist()
    assert (trained[np.array([7, 3])] + validated[np.array([7, 3])]).tolist() == [8, 4]
    some = Divided(lengths, 0.3, held_out=True, rows=range(100, 200))[0:1000] > 0
    assert (some == is_held_out(rows[:1000], 0.3) & (rows[:1000] // 100 == 1)).all()


def test_what_is_said_of_the_corpus_leaves_out_what_is_held_out():
    lengths = np.full(1000, 10)
    trained = Divided(lengths, 0.3, held_out=False)
    sources = [Source(name=name, documents=500) for name in "ab"]
    head, *of_sources = Documents(lengths=trained, sources=tuple(sources)).describe(64, 640)
    kept = (trained[:] > 0).reshape(2, 500).sum(axis=1)
    assert 0 < kept.sum() < 1000 and f" {kept.sum()} documents, {10 * kept.sum():,} tokens" in head
    for line, documents in zip(of_sources, kept, strict=True):
        assert f"has {documents} documents, {10 * documents:,} tokens" in line


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(0, 200), min_size=4, max_size=60), micro_batches=st.integers(1, 5))
def test_held_out_documents_are_read_once(lengths, micro_batches):
    if max(lengths) < 2 or len(lengths) < micro_batches:
        return
    documents = Documents(lengths=np.array(lengths), seed=None)
    planner = job(micro_batches=micro_batches, packing=Once.Config()).planner(documents)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    labels = 0
    for _ in range(planner.policy.steps):
        plan = planner.next()
        assert len(plan.packs) == micro_batches and plan.longest <= 64
        labels += planner.labels(plan)
        for pack in plan.packs:
            for piece in pack.documents:
                if piece[LENGTH] > 1 or lengths[piece[ID]] == 1 or piece[START] % 64 == 0:
                    seen[piece[ID]][piece[START] : piece[START] + piece[LENGTH]] += 1
    assert all((count >= 1).all() for count in seen)
    assert labels == sum(max(length - 1, 0) for length in lengths)


@pytest.mark.parametrize("policy", ["plain", "fixed_greedy", "wlb_lazy", "slim"])
def test_an_epoch_ends_when_all_was_trained_on(policy):
    lengths = np.random.default_rng(0).integers(2, 90, size=150)
    documents = Documents(lengths=lengths)
    steps = steps_of_epochs(job(packing=POLICIES.configure(policy)), documents, 2)
    planner = job(packing=POLICIES.configure(policy)).planner(documents)
    missing = [2 * int(lengths.sum())]
    for _ in range(steps):
        pieces = np.concatenate([pack.documents for pack in planner.next().packs])
        missing.append(missing[-1] - int(pieces[pieces[:, ID] < 300, LENGTH].sum()))
    assert missing[-1] == 0 < missing[-2]


# What a plan says of whole documents: tokens in pieces cut at their begin, keys that a token attends to.


def test_tokens_and_keys_of_a_step_by_hand():
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


# Named distributions: what their sources state of them holds.

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


def test_a_name_that_is_neither_is_refused():
    with pytest.raises(
        PlanError, match=r"called 'wbe', .* one of web, code, chat, paper, wlbllm, prolong, nor a file"
    ):
        named_or_read("wbe")


def test_slices_that_see_what_precedes_them_are_not_cut():
    """Tokens 10 to 19 of a document: behind ten of them as a prefix, and without them."""
    rows = np.array([[0, 10, 10, 0]])
    whole = MicroBatch(documents=rows, length=10, slices=np.array([[10, 20]]))
    for micro_batch, share in ((whole, 0.0), (replace(whole, slices=None), 1.0)):
        plan = Plan(iteration=0, micro_batches=(micro_batch,), plan_ms=0.0)
        assert plan.cut_share(8) == share


def test_pieces_given_back_come_next_in_the_order_of_the_stream():
    stream = DocumentStream(Mixture(np.array([8, 8, 8, 8]), seed=None), 8)
    stream.fill(4)  # the first piece begins later in its document than the others
    read = stream.fill(20)
    stream.give_back(read[::-1])
    assert stream.fill(20).tolist() == read.tolist()


def test_empty_documents_take_nothing_from_their_source_s_share():
    lengths = np.array([10] * 50 + [10, 0, 0, 0, 0] * 50)
    sources = [Source(name="full", documents=50), Source(name="sparse", documents=250)]
    rows, tokens = Mixture(lengths, sources, seed=0).read(np.arange(6000))
    assert tokens[rows < 50].sum() / tokens.sum() == pytest.approx(0.5, abs=0.01)
