"""Documents held out, what a plan says of whole ones, and lengths without a corpus."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning import job, make_planner

from wlb_titan.config.documents import steps_of_epochs
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED, named_or_read
from wlb_titan.documents.mixture import HoldOut, Source, is_held_out
from wlb_titan.errors import PlanError
from wlb_titan.packing import POLICIES
from wlb_titan.packing.once import Once
from wlb_titan.plan import ID, LENGTH, START, MicroBatch, Plan

# Documents held out of training and validated on once; and how many steps an epoch is.


def test_a_document_is_trained_on_or_held_out():
    rows = np.arange(100_000)
    assert is_held_out(rows, 0.01).mean() == pytest.approx(0.01, rel=0.15)
    assert (is_held_out(rows, 0.01) <= is_held_out(rows, 0.02)).all()
    lengths = np.arange(1, 1001)
    trained, validated = (HoldOut(lengths, 0.3, held_out=held) for held in (False, True))
    assert (trained[0:1000] + validated[0:1000]).tolist() == lengths.tolist()
    assert (trained[np.array([7, 3])] + validated[np.array([7, 3])]).tolist() == [8, 4]
    some = HoldOut(lengths, 0.3, held_out=True, rows=range(100, 200))[0:1000] > 0
    assert (some == is_held_out(rows[:1000], 0.3) & (rows[:1000] // 100 == 1)).all()


def test_what_is_said_of_the_corpus_leaves_out_what_is_held_out():
    lengths = np.full(1000, 10)
    trained = HoldOut(lengths, 0.3, held_out=False)
    sources = [Source(name=name, documents=500) for name in "ab"]
    head, *of_sources = Documents(lengths=trained, sources=tuple(sources)).describe(64, 640)
    kept = (trained[:] > 0).reshape(2, 500).sum(axis=1)
    assert 0 < kept.sum() < 1000 and f" {kept.sum()} documents, {10 * kept.sum():,} tokens" in head
    for line, documents in zip(of_sources, kept, strict=True):
        assert f"has {documents} documents, {10 * documents:,} tokens" in line


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=60),
    micro_batches=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 8]),
)
def test_held_out_documents_are_read_once(lengths, micro_batches, ranks):
    """Also where they are fewer than micro-batches, and shorter than the ranks that share one."""
    assume(max(lengths) >= 2)
    documents, degrees = Documents(lengths=np.array(lengths), seed=None), Degrees(context=ranks)
    planner = job(micro_batches=micro_batches, degrees=degrees, packing=Once.Config()).planner(documents)
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


@pytest.mark.parametrize("others", [None, 3, 16])
@pytest.mark.parametrize("policy", ["plain", "fixed_greedy", "wlb_lazy", "wlb", "slim"])
def test_an_epoch_ends_when_all_was_trained_on(policy, others):
    """Straight on, or with another number of micro-batches after 6 steps."""
    lengths = np.random.default_rng(0).integers(2, 90, size=150)
    documents, settings = Documents(lengths=lengths), {"packing": POLICIES.configure(policy)}
    planner, saved, missing = job(**settings).planner(documents), None, [2 * int(lengths.sum())]

    def train(steps):
        for _ in range(steps):
            pieces = planner.next().documents
            missing.append(missing[-1] - int(pieces[pieces[:, ID] < 300, LENGTH].sum()))

    if others:
        train(6)
        saved = json.loads(json.dumps(planner.state_dict(), default=np.ndarray.tolist))
        planner = job(**settings, micro_batches=others).planner(documents)
        planner.load_state_dict(saved)
        settings["micro_batches"] = others
    train(steps_of_epochs(job(**settings), documents, 2, saved) - planner.iteration)
    assert missing[-1] == 0 < missing[-2]


# What a plan says of whole documents: tokens in pieces cut at their begin, keys that a token attends to.


@pytest.mark.parametrize(
    ("lengths", "micro_batches", "cut", "keys"),
    [([5, 6, 5], 2, 3 / 16, (2 * 15 + 2 * 6) / 16), ([20, 4], 3, 0, (2 * 36 + 2 * 10) / 24)],
)
def test_tokens_and_keys_of_a_step_by_hand(lengths, micro_batches, cut, keys):
    """Windows of 8 tokens. First 5 + 3 and 3 + 5: of the second document 3 tokens do not see the others. And
    a document of 20 tokens is cut at 8 and at 16 whatever is done: nothing of it is called cut."""
    plan = make_planner(lengths * 4, window=8, micro_batches=micro_batches, seed=None).next()
    assert (plan.cut_share(8), plan.keys_per_token) == (cut, keys)


@given(
    st.lists(st.integers(2, 300), min_size=60, max_size=60), st.sampled_from(["plain", "wlb_lazy", "slim"])
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


def test_slices_that_see_what_precedes_them_are_not_cut():
    """Tokens 10 to 19 of a document: behind ten of them as a prefix, and without them."""
    rows = np.array([[0, 10, 10, 0]])
    whole = MicroBatch(documents=rows, length=10, slices=np.array([[10, 20]]))
    for micro_batch, share in ((whole, 0.0), (replace(whole, slices=None), 1.0)):
        plan = Plan(iteration=0, micro_batches=(micro_batch,), plan_ms=0.0)
        assert plan.cut_share(8) == share


# Named distributions: what their sources state of them holds.

MANY = 1 << 21


def test_web_and_code_have_the_mean_the_tail_and_the_quantiles_of_their_sources():
    lengths = NAMED["web"].draw(MANY)
    assert lengths.mean() == pytest.approx(20.5e12 / 14.5e9, rel=0.02)
    assert (lengths >= 65536).mean() == pytest.approx(6_661_465 / 14.5e9, rel=0.1)
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
    with pytest.raises(PlanError, match=f"'wbe' is neither .* lengths .{', '.join(NAMED)}. nor a file"):
        named_or_read("wbe")
