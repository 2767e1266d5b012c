"""The tile lists, against a count of every (query, key) pair, and their cost."""

import cProfile
import gc
import pstats
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import WINDOWS, packed, rows, visible
from wlb_titan.kernels import tiles
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import NO_WINDOW

CPU = torch.device("cpu")


@st.composite
def segment_lists(draw, documents: int = 8, longest: int = 300):
    """(segments, q_tokens, kv_tokens): documents whole, cut into two chunks or one, with padding between."""
    found, q, kv = [], draw(st.integers(0, 3)), draw(st.integers(0, 3))
    length = st.one_of(st.integers(1, 20), st.integers(1, longest))
    for _ in range(draw(st.integers(0, documents))):
        n = draw(length)
        cut = sorted(draw(st.integers(0, n)) for _ in range(draw(st.sampled_from([0, 0, 2, 4]))))
        for begin, end in zip(cut[::2] or [0], cut[1::2] or [n], strict=True):
            found.append([q, end - begin, kv, end])
            q += end - begin
        q += draw(st.sampled_from([0, 0, 0, 1, 5]))
        kv += n + draw(st.sampled_from([0, 0, 2]))
    found = draw(st.permutations(found))
    return np.array(found, dtype=np.int32).reshape(-1, 4), q + draw(st.integers(0, 2)), kv


reaches = st.sampled_from([window or NO_WINDOW for window in WINDOWS])


def mask_of(segments, q_tokens, kv_tokens, reach):
    return visible(torch.from_numpy(segments), q_tokens, kv_tokens, reach).numpy()


@settings(max_examples=60)
@given(segment_lists(), reaches)
def test_row_bounds(case, reach):
    segments, q_tokens, kv_tokens = case
    first, last = tiles.row_bounds(segments, q_tokens, reach, "cpu").numpy()
    keys = np.arange(kv_tokens)
    got = (keys >= first[:, None]) & (keys < last[:, None])
    assert (got == mask_of(segments, q_tokens, kv_tokens, reach)).all()


@settings(max_examples=60)
@given(segment_lists(), reaches, st.sampled_from([4, 16, 128]))
def test_query_tiles_cover_every_pair_once(case, reach, tokens):
    segments, q_tokens, kv_tokens = case
    mask = mask_of(segments, q_tokens, kv_tokens, reach)
    covered = np.zeros(q_tokens, int)
    for tile in tiles.query_tiles(segments, q_tokens, reach, tokens=tokens):
        q_begin, q_end, kv_begin, shared_begin, shared_end, kv_end = tile
        assert q_begin < q_end <= q_begin + tokens
        assert 0 <= kv_begin <= shared_begin <= shared_end <= kv_end <= kv_tokens
        covered[q_begin:q_end] += 1
        seen = mask[q_begin:q_end]
        assert not seen[:, :kv_begin].any() and not seen[:, kv_end:].any()
        assert seen[:, shared_begin:shared_end].all()
    assert (covered == 1).all()


@settings(max_examples=60)
@given(segment_lists(), reaches, st.sampled_from([4, 16, 64]), st.sampled_from([16, 128]), st.booleans())
def test_key_tiles_cover_every_pair_once(case, reach, tokens, block_n, turns):
    segments, q_tokens, kv_tokens = case
    mask = mask_of(segments, q_tokens, kv_tokens, reach)
    found = np.zeros_like(mask, dtype=int)
    keys = np.zeros(kv_tokens, int)
    shape = {"tokens": tokens, "block_n": block_n, "turn_rows": 8 if turns else 0}
    key_tiles, items, *_ = tiles.key_tiles(segments, kv_tokens, reach, **shape)
    for kv_begin, kv_end, item_begin, item_end in key_tiles:
        assert kv_begin < kv_end <= kv_begin + block_n
        keys[kv_begin:kv_end] += 1
        for q_begin, q_full, q_tail, q_end, *_ in items[item_begin:item_end]:
            assert 0 <= q_begin < q_end <= q_tokens and q_begin <= q_full <= q_tail <= q_end
            found[q_begin:q_end, kv_begin:kv_end] += mask[q_begin:q_end, kv_begin:kv_end]
            if q_full < q_tail:
                assert q_full % tiles.ROW_ALIGNMENT == 0 and (q_tail - q_full) % tokens == 0
                assert kv_end - kv_begin == block_n  # an unmasked block reads so many keys
                assert mask[q_full:q_tail, kv_begin:kv_end].all()
    assert (keys == 1).all()
    assert (found == mask).all()


@given(segment_lists(), reaches, st.sampled_from([16, 64]), st.sampled_from([8, 32]))
def test_turns_order_all_that_is_added_to_a_row(case, reach, block_n, size):
    """In the order of the list no tile waits; and what waits for nobody shares no row with another tile."""
    segments, q_tokens, kv_tokens = case
    mask = mask_of(segments, q_tokens, kv_tokens, reach)
    shape = {"tokens": size, "block_n": block_n, "turn_rows": size}
    key_tiles, items, counters, edges, *_ = tiles.key_tiles(segments, kv_tokens, reach, **shape)
    counters = counters.copy()
    sums = np.full((-(-q_tokens // size), size), np.nan)  # tiles that have added to a row
    sums[edges] = 0
    owner = np.full(sums.shape, -1)  # whose turns order what is added to a row: a counter's, or one item's
    stored = np.zeros(len(sums), bool)
    for kv_begin, kv_end, item_begin, item_end in key_tiles:
        for item in range(item_begin, item_end):
            q_begin, _, _, q_end, turns, turn = items[item]
            seen = np.zeros(sums.size, bool)
            seen[q_begin:q_end] = mask[q_begin:q_end, kv_begin:kv_end].any(1)
            seen = seen.reshape(sums.shape)
            for block in range(q_begin // size, -(-q_end // size)):
                store, name = q_begin <= block * size and (block + 1) * size <= q_end, len(counters) + item
                if turn >= 0:
                    name = turns + block
                    assert counters[name] // 2 == turn
                    store = counters[name] % 2 == 0
                    counters[name] += 3 if store else 2
                assert np.isin(owner[block][seen[block]], [-1, name]).all()
                owner[block][seen[block]] = name
                assert not store or not stored[block]
                stored[block] |= store
                sums[block] = seen[block] + (0 if store else sums[block])
    adds = np.zeros(sums.size, int)
    for kv_begin, kv_end, *_ in key_tiles:
        adds[:q_tokens] += mask[:, kv_begin:kv_end].any(1)
    assert (sums.ravel() == adds)[adds > 0].all()
    assert all(len(set(row[row >= 0])) <= 1 for row in owner[stored]), "nobody else adds to what is stored"


def waits(lists: tiles.KeyTiles, size: int) -> int:
    """Steps that pass while tiles wait for their turns, if all of them run at once; the most of any tile."""
    ready = np.zeros(len(lists.first_turns), int)
    longest = 0
    for (_, _, item_begin, item_end), steps in zip(lists.tiles, tiles.steps(lists, size), strict=True):
        now = 0
        for q_begin, _, _, q_end, turns, turn in lists.items[item_begin:item_end]:
            for block in reversed(range(q_begin // size, -(-q_end // size))):
                now += 1
                if turn >= 0:
                    now = ready[turns + block] = max(now, ready[turns + block] + 1)
        longest = max(longest, now - steps)
    return longest


@pytest.mark.parametrize("length", [65, 129, 192, 257, 1000])
def test_documents_that_share_tiles_do_not_wait_in_one_chain(length):
    """Each waits for those of its own document at most; in the order of the queries, for the whole batch."""
    segments = packed([length] * 200).numpy()
    lists = tiles.key_tiles(segments, length * 200, tokens=64, block_n=128, turn_rows=64)
    assert waits(lists, 64) <= -(-length // 128) + 1
    if length == 129:
        reverse = np.concatenate([np.arange(a, b)[::-1] for a, b in np.sort(lists.tiles[:, 2:], axis=0)])
        assert waits(lists._replace(items=lists.items[reverse]), 64) > 100


def test_tiles_of_a_document_follow_one_another():
    """Those that read the same keys or queries run side by side, the heaviest document's first."""
    lengths = [3000, 2000, 300, 4000, 40]
    segments, starts = packed(lengths).numpy(), np.cumsum(lengths) - lengths
    keys = tiles.key_tiles(segments, 9340, tokens=64, block_n=128, turn_rows=64).tiles[:, 0]
    queries = tiles.query_tiles(segments, 9340, tokens=128)[:, 0]
    for begins, direction in ((keys, 1), (queries, -1)):
        documents = np.searchsorted(starts, begins, side="right") - 1
        order = documents[np.append(True, documents[1:] != documents[:-1])]
        assert order[:3].tolist() == [3, 0, 1] and set(order[3:]) == {2, 4}
        assert all((np.diff(begins[documents == document]) * direction > 0).all() for document in range(5))


def test_a_window_makes_the_work_linear():
    """The tiles of a 64K document see little more than the window each, and most of it without a mask."""
    got = tiles.query_tiles(packed([65536]).numpy(), 65536, 4096, tokens=128)
    seen, shared = got[:, 5] - got[:, 2], got[:, 4] - got[:, 3]
    assert seen.max() == 4096 + 127 and shared.max() == 4096 - 127
    _, items, *_ = tiles.key_tiles(packed([65536]).numpy(), 65536, 4096, tokens=64, block_n=128)
    assert (items[:, 3] - items[:, 0]).max() == 4096 + 127


def test_tiles_are_few_and_see_few_keys():
    """Short documents share tiles, and long ones do not. Chunks of 16 tokens at the ends of long documents
    have a tile each, which reads no key for nothing."""
    chunks = rows(*[[16 * i, 16, 4096 * i, 4096] for i in range(50)])
    for segments, count, most_keys in (
        (packed([12] * 1000), 94, 128 + 2 * 12), (packed([5000, 5000]), 80, 5000), (chunks, 50, 4096)
    ):  # fmt: skip
        got = tiles.query_tiles(segments.numpy(), int(segments[:, 1].sum()), tokens=128)
        assert len(got) == count and (got[:, 5] - got[:, 2]).max() <= most_keys


def test_schedule_is_found_again_and_follows_the_content():
    segments = packed([40, 60])
    first = schedule_of(segments, 100, 100, CPU)
    assert schedule_of(segments.clone(), 100, 100, CPU) is first
    with torch.inference_mode():
        assert schedule_of(segments.clone(), 100, 100, CPU) is first
    assert first.query_tiles(64) is first.query_tiles(64)
    segments[1, 1:4:2] -= 1
    assert schedule_of(segments, 100, 100, CPU) is not first
    with pytest.raises(ValueError, match="reaches past the 50 queries"):
        schedule_of(segments, 50, 100, CPU)


def test_schedule_is_found_by_the_tensor_itself(monkeypatch):
    """The content is read once for a tensor and version: any number of segments is looked up as quickly."""
    segments = packed([40, 60])
    first = schedule_of(segments, 100, 100, CPU)
    monkeypatch.setattr("wlb_titan.kernels.schedule._schedule", None)
    assert schedule_of(segments, 100, 100, CPU) is first
    with pytest.raises(TypeError):  # another mask is another schedule
        schedule_of(segments, 100, 100, CPU, 3)
    with pytest.raises(TypeError):
        schedule_of(segments.add_(0), 100, 100, CPU)


def test_a_dropped_schedule_needs_no_garbage_collector():
    """torchtitan disables Python's: what hangs in a reference cycle would never be freed."""
    gc.disable()
    try:
        first = schedule_of(packed([7, 5]), 12, 12, CPU)
        first.query_tiles(64), first.key_tiles(64, 128), first.bounds
        dropped = weakref.ref(first)
        del first
        for n in range(64):
            schedule_of(packed([n + 1]), n + 1, n + 1, CPU)
        assert dropped() is None
    finally:
        gc.enable()


def test_copies_to_a_gpu_are_pinned(monkeypatch):
    """An unpinned copy makes the host wait for the device, in every micro-batch."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: calls.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **options: calls.append(options) or x)
    tiles.send(np.zeros(3, np.int32), torch.device("cuda"))
    assert calls == ["pinned", {"non_blocking": True}]


@pytest.mark.parametrize("segments", [10, 10_000])
def test_tiles_are_made_by_array_operations(segments):
    """Whatever the number of segments, the functions called are the same: no loop runs over segments."""
    lengths = np.random.default_rng(0).integers(1, 600, segments)
    total, segments = int(lengths.sum()), packed(lengths.tolist()).numpy()
    profile = cProfile.Profile()
    profile.runcall(tiles.query_tiles, segments, total, tokens=128)
    profile.runcall(tiles.key_tiles, segments, total, tokens=64, block_n=128)
    assert 100 < pstats.Stats(profile).total_calls < 1000
