"""The latency model against tiles drawn one by one, the kernels' tile lists, and a schedule of its tiles."""

import heapq
from dataclasses import replace
from itertools import product

import numpy as np
import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wlb_titan.kernels.tiles import NO_WINDOW, key_tiles, query_tiles, steps

from wlb_titan.context import layout
from wlb_titan.cost.attention_kernels import COEFFICIENTS, Point, fit, hopper, predict
from wlb_titan.cost.attention_latency import KernelCost, KeyTiling, Tiling, slowest

TILINGS = [(128, 128), (128, 64), (64, 128), (16, 128), (256, 1), (4, 4), (1, 1)]
EARLIER = st.just(0) | st.integers(0, 3000)  # tokens of the document on other ranks


@pytest.mark.parametrize(("query_tile", "key_block"), TILINGS)
@given(q_len=st.integers(1, 1200), before=EARLIER)
@settings(max_examples=60)
def test_counts_are_those_of_tiles_drawn_one_by_one(query_tile, key_block, q_len, before):
    tiles = blocks = masked = 0
    for first in range(0, q_len, query_tile):
        last = min(first + query_tile, q_len)
        seen_by_some = -(-(before + last) // key_block)
        seen_by_all = (before + first + 1) // key_block
        tiles, blocks, masked = tiles + 1, blocks + seen_by_some, masked + seen_by_some - seen_by_all
    counts = Tiling(query_tile, key_block).count(np.array([q_len]), np.array([before + q_len]))
    assert counts[:, 0].tolist() == [tiles, blocks, masked]


@pytest.mark.parametrize(("query_tile", "key_block"), TILINGS[:4])
@given(q_tiles=st.integers(1, 12), before=EARLIER, window=st.integers(1, 300) | st.integers(1, 5000))
@settings(max_examples=60)
def test_counts_in_a_window_are_those_of_drawn_tiles(query_tile, key_block, q_tiles, before, window):
    """But for what one tile masks: that in which the window begins to leave keys behind."""
    blocks = masked = 0
    for first in range(before, before + q_tiles * query_tile, query_tile):
        last = first + query_tile - 1
        begin, shared = max(0, first + 1 - window), max(0, last + 1 - window)
        read = -(-(last + 1 - begin) // key_block)
        blocks, masked = blocks + read, masked + read - max(first + 1 - shared, 0) // key_block
    q_len = np.array([q_tiles * query_tile])
    counts = Tiling(query_tile, key_block).count(q_len, before + q_len, window)
    assert counts[:2, 0].tolist() == [q_tiles, blocks]
    assert 0 <= masked - counts[2, 0] <= -(-query_tile // key_block) + 1


def blocks_of(segments: np.ndarray, q_tokens: int, window: int | None = None) -> list[int]:
    """Tiles of the kernels' list, blocks of 128 keys that they read, and how many of them they mask."""
    listed = query_tiles(segments, q_tokens, window or NO_WINDOW, tokens=128)
    _, _, begin, _, shared, end = listed[listed[:, 5] > listed[:, 2]].T
    blocks = -(-(end - begin) // 128)
    return [len(listed), int(blocks.sum()), int((blocks - (shared - begin) // 128).sum())]


def steps_of(segments: np.ndarray, keys: int, window: int | None = None, queries: int = 64) -> list[int]:
    """Items, of a tile of keys and a segment, and steps of so many queries, as the kernels list them."""
    lists = key_tiles(segments, keys, window or NO_WINDOW, tokens=queries, block_n=128, turn_rows=queries)
    return [len(lists.items), int(steps(lists, queries).sum())]


def shards_of(policy, lengths, latency):
    """Of four context-parallel ranks."""
    return planning.shard(policy, lengths, -(-lengths.sum() // 8) * 8, 4, latency)[1]


@pytest.mark.parametrize("policy", ["per_sequence", "per_document"])
def test_long_segments_are_tiled_as_the_kernels_do(policy):
    """Beyond the length up to which the kernels merge, the counts agree exactly."""
    lengths = np.random.default_rng(0).integers(9000, 30000, 6)
    for shard in shards_of(policy, lengths, hopper(128, 1)):
        shard = shard[shard[:, 1] + shard[:, 2] > 1024]
        segments = layout.segments(shard, lengths)
        counts = Tiling(128, 128, merge_keys=1024).count(segments[:, 1], segments[:, 3]).sum(axis=1)
        assert counts.tolist() == blocks_of(segments, int(shard[:, 2].sum()))


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("longest", "error"), [(40, 0.2), (300, 0.1), (900, 0.1)])
def test_merged_segments_are_counted_as_the_kernels_merge_them(longest, error, window):
    """On average over where tiles begin; documents far below a tile mostly just miss a round number."""
    lengths = np.random.default_rng(longest).integers(1, longest, 60000 // longest)
    whole, tokens = layout.segments(layout.whole_sequence(lengths), lengths), int(lengths.sum())
    tiles, blocks, _ = blocks_of(whole, tokens, window)
    counted = Tiling(128, 128, merge_keys=1024).count(lengths, lengths, window).sum(axis=1)
    assert counted[0] == pytest.approx(tiles, rel=0.03)
    assert counted[1] == pytest.approx(blocks, rel=error)
    walked = KeyTiling(64, 128, 1024).count(lengths, lengths, window)[1].sum()
    assert walked == pytest.approx(steps_of(whole, tokens, window)[1], rel=0.1)
    unmerged = Tiling(128, 128).count(lengths, lengths).sum(axis=1)
    assert unmerged[0] > 1.2 * counted[0] or longest == 900


@pytest.mark.parametrize("queries", [64, 8])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("policy", ["per_sequence", "per_document"])
def test_tiles_of_keys_are_walked_as_the_kernels_do(policy, window, queries):
    """On average over where segments begin; long ones have tiles of their own."""
    lengths = np.random.default_rng(0).integers(3000, 30000, 12)
    counted, listed = np.zeros(2), np.zeros(2)
    for shard in shards_of(policy, lengths, hopper(128, 1)):
        segments = layout.segments(shard, lengths)
        counted += KeyTiling(queries, 128, 1024).count(segments[:, 1], segments[:, 3], window)[:2].sum(axis=1)
        listed += steps_of(segments, int(lengths.sum()), window, queries)
    assert counted == pytest.approx(listed, rel=0.02)


def test_a_program_has_as_many_heads_as_leave_it_shorter_than_the_launch():
    tiling = KeyTiling(64, 128, heads_per_tile=8)
    assert tiling.program(np.array([8.0, 8.0, 8.0]), np.array([9.0, 3.0, 0.1])).tolist() == [8, 2, 1]
    assert Tiling(64, 128, heads_per_tile=8).program(np.array([8.0]), np.array([3.0])) == [8]
    cost = KernelCost(tiling, 0, 0, 0, tile=0, block=1, masked=0, tail=0.5)
    assert cost.ends(np.array([9.0, 0.1]), np.array([8.0, 8.0])).tolist() == [13, 1]


def schedule(costs: np.ndarray, units: int) -> float:
    """When the last of these programs ends if each free unit takes the longest one left."""
    ends = [0.0] * units
    for cost in np.sort(costs)[::-1].tolist():
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


@pytest.mark.parametrize("policy", ["per_sequence", "per_document", "hybrid"])
def test_predicted_time_is_that_of_a_schedule_of_the_tiles(policy):
    rng = np.random.default_rng(3)
    lengths = np.append(np.exp(rng.normal(6.5, 1.4, 60)).astype(np.int64) + 1, 30000)
    latency = replace(planning.UNMERGED, heads=16)
    cost, shards = latency.forward, shards_of(policy, lengths, latency)
    for shard, (predicted, _) in zip(shards, latency.seconds(shards), strict=True):
        programs = []
        for _, offset, count in shard.tolist():
            for first in range(0, count, 128):
                blocks = -(-(offset + min(first + 128, count)) // 128)
                masked = blocks - (offset + first + 1) // 128
                programs.append(cost.tile + blocks * cost.block + masked * cost.masked)
        real = cost.launch + schedule(np.repeat(programs, 16), latency.units)
        assert 0.98 * real <= predicted <= real * (1 + 1e-9)


def test_the_longest_tile_bounds_a_launch_that_has_few():
    """More units then help no more, and what the tile walks over is what counts."""
    latency = replace(planning.UNMERGED, heads=1)
    last = np.array([[0, 65408, 128]])
    seconds = latency.seconds([last, np.zeros((0, 3), np.int64)])
    assert (replace(latency, units=1000).seconds([last]) == seconds[:1]).all()
    launch = [latency.forward.launch, latency.backward.launch]
    assert seconds[1].tolist() == launch
    nearer = latency.seconds([np.array([[0, 32640, 128]])])[0]
    assert (seconds[0] - launch) / (nearer - launch) == pytest.approx([2, 2], rel=0.01)


def test_time_grows_with_heads_head_dim_and_slowness_and_falls_with_units():
    many = np.array([[n, 0, 3000] for n in range(50)])
    for latency in (planning.UNMERGED, hopper(128, 32, group=8)):
        slower = replace(latency, forward=latency.forward.slower(2), backward=latency.backward.slower(2))
        once = latency.work(many[:, 2], many[:, 2])
        for twice in (replace(latency, heads=64), replace(latency, units=66), slower):
            assert twice.work(many[:, 2], many[:, 2]) == pytest.approx(2 * once)
    latency = planning.UNMERGED
    most, least = replace(latency, units=66).seconds([many]), latency.seconds([many])
    launch = latency.fixed(np.array([0]))
    assert most - launch == pytest.approx(2 * (least - launch))
    small, large = hopper(64, 8), hopper(128, 8)  # as published rates say
    assert small.forward.block / large.forward.block == pytest.approx(648 / 497 / 2, abs=1e-3)
    assert small.backward.block / large.backward.block == pytest.approx(561 / 474 / 2, abs=1e-3)


def test_a_model_with_windows_has_the_time_of_its_mean_layer():
    latency = hopper(128, 4)
    mixed = replace(latency, windows=((1024, 0.75),))
    windowed = replace(latency, windows=((1024, 1.0),))
    shards = shards_of("per_sequence", np.array([40000, 700, 3000]), latency)
    parts = [0.25 * latency.seconds(shards), 0.75 * windowed.seconds(shards)]
    np.testing.assert_allclose(mixed.seconds(shards), sum(parts))
    assert slowest(np.array([[1.0, 5.0], [2.0, 3.0]])) == 7.0  # each pass waits for its own slowest rank
    lengths = np.array([6400, 64000])
    assert np.divide(*windowed.work(lengths, lengths)[0][::-1]) == pytest.approx(10.5, rel=0.05)
    assert np.divide(*latency.work(lengths, lengths)[0][::-1]) == pytest.approx(100, rel=0.1)
    last = [np.array([[0, 65408, 128]])]
    assert windowed.seconds(last)[0, 0] < latency.seconds(last)[0, 0] / 10


def errors(cost, points):
    return np.abs(predict(cost, points, 132) / [point.seconds for point in points] - 1)


@pytest.mark.parametrize("tiling", [Tiling(128, 128, 1024), Tiling(64, 128), KeyTiling(64, 128, 1024)])
def test_fit_finds_the_coefficients_that_made_the_points(tiling):
    cost = KernelCost(tiling, launch=2e-5, key=1e-10, segment=1e-7, tile=1.5e-6, block=1.2e-6, masked=4e-7)
    cases = product((1, 16, 65, 128, 200, 512, 2000), (128, 700, 4096, 32768), (1, 50))
    blank = [Point(q, kv, segments, 16, seconds=1.0) for q, kv, segments in cases if kv >= q]
    points = [p._replace(seconds=s) for p, s in zip(blank, predict(cost, blank, 132).tolist(), strict=True)]
    found = fit(points, 132, tiling)
    assert errors(found, points).max() < 1e-3
    assert found.block == pytest.approx(cost.block, rel=0.02)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, len(points))
    noisy = [p._replace(seconds=p.seconds * n) for p, n in zip(points, noise.tolist(), strict=True)]
    found = fit(noisy, 132, tiling)
    assert np.median(errors(found, noisy)) < 0.05
    assert min(getattr(found, name) for name in COEFFICIENTS) >= 0
