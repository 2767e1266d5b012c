"""The tile lists, against a count of every (query, key) pair, and their cost."""

import doctest
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import packed, visible
from wlb_titan.kernels import tiles
from wlb_titan.kernels.schedule import schedule_of


@st.composite
def segment_lists(draw, documents: int = 8, longest: int = 300):
    """(segments, q_tokens, kv_tokens): documents whole, cut into two chunks or one, with padding between."""
    rows, q, kv = [], draw(st.integers(0, 3)), draw(st.integers(0, 3))
    length = st.one_of(st.integers(1, 20), st.integers(1, longest))
    for _ in range(draw(st.integers(0, documents))):
        n = draw(length)
        cut = sorted(draw(st.integers(0, n)) for _ in range(draw(st.sampled_from([0, 0, 2, 4]))))
        for begin, end in zip(cut[::2] or [0], cut[1::2] or [n], strict=True):
            rows.append([q, end - begin, kv, end])
            q += end - begin
        q += draw(st.sampled_from([0, 0, 0, 1, 5]))
        kv += n + draw(st.sampled_from([0, 0, 2]))
    order = draw(st.permutations(range(len(rows))))
    array = np.array([rows[i] for i in order], dtype=np.int32).reshape(-1, 4)
    return array, q + draw(st.integers(0, 2)), kv


def bounds_of(segments, q_tokens):
    first, last = tiles.row_bounds(segments, q_tokens, "cpu").numpy()
    return first, last


@settings(max_examples=60, deadline=None, derandomize=True)
@given(segment_lists())
def test_row_bounds(case):
    segments, q_tokens, kv_tokens = case
    first, last = bounds_of(segments, q_tokens)
    keys = np.arange(kv_tokens)
    got = (keys >= first[:, None]) & (keys < last[:, None])
    assert (got == visible(torch.from_numpy(segments), q_tokens, kv_tokens).numpy()).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(segment_lists(), st.sampled_from([4, 16, 128]))
def test_query_tiles_cover_every_pair_once(case, tokens):
    segments, q_tokens, kv_tokens = case
    mask = visible(torch.from_numpy(segments), q_tokens, kv_tokens).numpy()
    rows = np.zeros(q_tokens, int)
    for q_begin, q_end, kv_begin, kv_shared, kv_end in tiles.query_tiles(segments, q_tokens, tokens=tokens):
        assert q_begin < q_end <= q_begin + tokens
        assert 0 <= kv_begin <= kv_shared <= kv_end <= kv_tokens
        rows[q_begin:q_end] += 1
        seen = mask[q_begin:q_end]
        assert not seen[:, :kv_begin].any() and not seen[:, kv_end:].any()
        assert seen[:, kv_begin:kv_shared].all()
    assert (rows == 1).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(segment_lists(), st.sampled_from([4, 16, 64]), st.sampled_from([16, 128]))
def test_key_tiles_cover_every_pair_once(case, tokens, block_n):
    segments, q_tokens, kv_tokens = case
    mask = visible(torch.from_numpy(segments), q_tokens, kv_tokens).numpy()
    found = np.zeros_like(mask, dtype=int)
    keys = np.zeros(kv_tokens, int)
    key_tiles, items = tiles.key_tiles(segments, kv_tokens, tokens=tokens, block_n=block_n)
    for kv_begin, kv_end, item_begin, item_end in key_tiles:
        assert kv_begin < kv_end <= kv_begin + block_n
        keys[kv_begin:kv_end] += 1
        for q_begin, q_full, q_tail, q_end in items[item_begin:item_end]:
            assert 0 <= q_begin <= q_full <= q_tail <= q_end <= q_tokens
            found[q_begin:q_end, kv_begin:kv_end] += mask[q_begin:q_end, kv_begin:kv_end]
            if q_full < q_tail:
                assert q_full % tiles.ROW_ALIGNMENT == 0 and (q_tail - q_full) % tokens == 0
                assert mask[q_full:q_tail, kv_begin:kv_end].all()
    assert (keys == 1).all()
    assert (found == mask).all()


def test_heaviest_first():
    segments = packed([64, 4000, 300]).numpy()
    work = np.diff(tiles.query_tiles(segments, 4364, tokens=128)[:, [2, 4]], axis=1)[:, 0]
    assert (work[:-1] >= work[1:] - 128).all() and work[0] == 4000
    key_tiles, items = tiles.key_tiles(segments, 4364, tokens=64, block_n=128)
    rows = [sum(i[3] - i[0] for i in items[t[2] : t[3]]) for t in key_tiles]
    assert rows[0] == 4000 and rows[-1] <= 64


def test_short_documents_share_tiles():
    """1,000 documents of 12 tokens fill 94 tiles of 128 rows, each over its own keys only."""
    segments = packed([12] * 1000).numpy()
    got = tiles.query_tiles(segments, 12_000, tokens=128)
    assert len(got) == 94
    assert (got[:, 4] - got[:, 2]).max() <= 128 + 2 * 12


def test_long_documents_do_not_share_tiles():
    segments = packed([5000, 5000]).numpy()
    got = tiles.query_tiles(segments, 10_000, tokens=128)
    assert len(got) == 80 and not ((got[:, 0] < 5000) & (got[:, 1] > 5000)).any()


def test_worst_case_is_linear():
    """A chunk of 16 tokens at the end of each long document: one tile each, no key read for nothing."""
    starts = np.arange(50) * 4096
    segments = np.stack([np.arange(50) * 16, np.full(50, 16), starts, np.full(50, 4096)], axis=1).astype(
        np.int32
    )
    got = tiles.query_tiles(segments, 800, tokens=128)
    assert len(got) == 50 and (got[:, 4] - got[:, 2] == 4096).all()


def test_schedule_is_found_again_and_follows_the_content():
    segments = packed([40, 60])
    first = schedule_of(segments, 100, 100, torch.device("cpu"))
    assert schedule_of(segments.clone(), 100, 100, torch.device("cpu")) is first
    assert first.query_tiles(64) is first.query_tiles(64)
    segments[1, 1:4:2] -= 1
    assert schedule_of(segments, 100, 100, torch.device("cpu")) is not first
    with pytest.raises(ValueError, match="reaches past the 50 queries"):
        schedule_of(segments, 50, 100, torch.device("cpu"))


def test_thousand_segments_take_about_a_millisecond():
    """The target is 1 ms for the two lists that the long configurations need; a slow machine gets four."""
    lengths = np.random.default_rng(0).integers(1, 600, 1000)
    segments = packed(lengths.tolist()).numpy()
    total = int(lengths.sum())

    def build() -> float:
        start = time.perf_counter()
        tiles.query_tiles(segments, total, tokens=128)
        tiles.key_tiles(segments, total, tokens=64, block_n=128)
        return time.perf_counter() - start

    assert min(build() for _ in range(20)) < 4e-3


def test_examples():
    assert doctest.testmod(tiles).failed == 0
