"""Sharding policies: what every one of them must hold, and what each promises besides."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import planning
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wlb_titan.context import layout
from wlb_titan.context.all_gather import Adaptive
from wlb_titan.context.hybrid import Hybrid, levels_of
from wlb_titan.context.layout import per_document, sequence_positions, spans, widest_first
from wlb_titan.context.strategy import STRATEGIES, MoveSeconds
from wlb_titan.cost.attention_kernels import hopper
from wlb_titan.cost.attention_latency import slowest
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.documents import Documents
from wlb_titan.errors import PlanError
from wlb_titan.job import Job
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET, Slices

FIXED = ("per_sequence", "per_document")
SHARDINGS = (*FIXED, "adaptive", "hybrid")

LATENCY = hopper(128, 32)

length = st.one_of(st.integers(1, 9), st.integers(1, 300), st.sampled_from([1, 2, 7, 137, 2041, 20000]))
ragged = st.lists(length, min_size=1, max_size=40)
degrees = st.integers(1, 16)
slack = st.integers(0, 3)


def padded(lengths: list[int], ranks: int, extra: int = 0) -> tuple[np.ndarray, int]:
    unit = 2 * ranks
    return np.array(lengths, dtype=np.int64), (-(-sum(lengths) // unit) + extra) * unit


def shard(policy, lengths, total, ranks, latency=LATENCY):
    return planning.shard(policy, lengths, total, ranks, latency)[1]


def pairs(rank: np.ndarray) -> int:
    """Pairs of a query and a key that a rank computes."""
    low = rank[:, OFFSET]
    high = low + rank[:, COUNT]
    return int((high * (high + 1) // 2 - low * (low + 1) // 2).sum())


def check_keys(mask, shards, positions, lengths, rank, levels):
    """That a rank's segments see their documents' keys up to their queries: positions move as keys do."""
    exchange, share, keys = mask.exchange, positions.shape[1], []
    begins, span = [0] * len(shards), spans(shards, levels)
    for (order, sent), size in reversed(list(zip(exchange.levels, levels, strict=True))):
        rows, first = len(order) // size, rank // size * size
        travels = span == levels.index(size)
        counts = [int(s[travels[s[:, DOCUMENT]], COUNT].sum()) for s in shards]
        firsts = [(member, min(begins[member], share - rows)) for member in range(first, first + size)]
        gathered = [positions[member, at : at + rows] for member, at in firsts]
        assert rows == max(counts[first : first + size]) and sent == counts[rank]
        assert sorted(order) == list(range(rows * size))
        keys.append(np.concatenate(gathered)[order])
        begins = [b + c for b, c in zip(begins, counts, strict=True)]
    begin = begins[rank]
    if exchange.kept:
        assert exchange.kept == share - begin
        keys.append(positions[rank, begin:])
    keys = np.concatenate(keys)
    starts = np.cumsum(lengths) - lengths
    at = 0
    for number, tokens in mask.keys.tolist():
        if number >= 0:
            assert (keys[at : at + tokens] == starts[number] + np.arange(lengths[number])).all()
        at += tokens
    (documents, offsets, counts), segments = shards[rank].T, mask.segments
    assert segments[:, :2].tolist() == np.stack([np.cumsum(counts) - counts, counts], axis=1).tolist()
    assert segments[:, 3].tolist() == (offsets + counts).tolist()
    for document, (k, k_len) in zip(documents, segments[:, 2:].tolist(), strict=True):
        assert (keys[k : k + k_len] == starts[document] + np.arange(k_len)).all()


@settings(max_examples=60)
@given(ragged, st.sampled_from([(2, 1), (4, 2), (6, 3), (8, 2), (8, 8)]), st.integers(0, 40))
def test_ulysses_gather_divides_groups_per_document_and_their_ranks_in_a_row(lengths, degrees, extra):
    ranks, within = degrees
    assume(sum(lengths) >= ranks)
    config = STRATEGIES.configure("own_policies.ulysses_gather:UlyssesGather", within=within)
    strategy = config.make(ranks, LATENCY)
    lengths = np.array(lengths)
    total = (-(-int(lengths.sum()) // strategy.divisor) + extra) * strategy.divisor
    _, shards = strategy.shard(lengths, total)
    groups = per_document(lengths, total, ranks // within)
    groups = widest_first(groups, spans(groups, (len(groups),)))
    positions = sequence_positions(shards, lengths, total).reshape(ranks // within, -1)
    expected = sequence_positions(groups, lengths, total)
    held = positions < lengths.sum()
    assert (held == (expected < lengths.sum())).all() and (positions[held] == expected[held]).all()
    for rank in range(ranks):
        mask = strategy.mask(shards, lengths, total, rank)
        check_keys(mask, groups, expected, lengths, rank // within, (len(groups),))
    assert strategy.travelling(shards, total) == (total, len(mask.exchange.levels[0].order))
    assert strategy.seconds(shards).shape == (ranks, 2)


@pytest.mark.parametrize("policy", [*SHARDINGS, "own_policies.sharding:RoundRobin"])
@given(lengths=ragged, ranks=degrees, extra=slack)
@settings(max_examples=60)
def test_ranks_tile_every_document_in_equal_shares_and_see_its_earlier_keys(policy, lengths, ranks, extra):
    assume(sum(lengths) >= ranks)
    lengths, total = padded(lengths, ranks, extra)
    result = shard(policy, lengths, total, ranks)

    document, offset, count = np.concatenate(result).T
    assert (count > 0).all() and (offset + count <= lengths[document]).all()
    positions = layout.sequence_positions(result, lengths, total)
    assert positions.shape == (ranks, total // ranks)
    np.testing.assert_array_equal(np.sort(positions, axis=None), np.arange(total))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    for rank, row in zip(result, positions, strict=True):
        end = 0
        for q_start, q_len, kv_start, kv_len in layout.segments(rank, lengths).tolist():
            assert q_start == end
            end += q_len
            tokens = row[q_start:end]
            assert kv_start == begins[document_of[tokens[0]]]
            np.testing.assert_array_equal(tokens, kv_start + kv_len - q_len + np.arange(q_len))
        assert (row[end:] >= lengths.sum()).all()  # what is left is padding


@pytest.mark.parametrize("policy", SHARDINGS)
@given(lengths=ragged, ranks=st.integers(2, 16), extra=slack, slow=st.sampled_from([0.0, 1e-9, 1e-6]))
@settings(max_examples=40)
def test_ranks_get_the_keys_that_their_queries_see(policy, lengths, ranks, extra, slow):
    assume(sum(lengths) >= ranks)
    lengths, total = padded(lengths, ranks, extra)
    moves = [MoveSeconds(slow, 100 * slow)] * len(levels_of(ranks))
    strategy = STRATEGIES.configure(policy).make(ranks, LATENCY, moves)
    _, shards = strategy.shard(lengths, total)
    positions = sequence_positions(shards, lengths, total)
    for rank in range(ranks):
        mask = strategy.mask(shards, lengths, total, rank)
        check_keys(mask, shards, positions, lengths, rank, strategy.levels)
    assert strategy.travelling(shards, total)[-1] == len(mask.exchange.levels[-1].order)  # among all ranks


@given(lengths=ragged, ranks=degrees)
def test_per_sequence_is_the_pairs_of_chunks(lengths, ranks):
    lengths, total = padded(lengths, ranks)
    positions = layout.sequence_positions(layout.per_sequence(lengths, total, ranks), lengths, total)
    chunks = np.arange(total).reshape(2 * ranks, -1)
    tokens = lengths.sum()
    for rank, row in enumerate(positions):
        expected = np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])
        np.testing.assert_array_equal(row[row < tokens], expected[expected < tokens])


@given(lengths=ragged, ranks=degrees, extra=slack)
def test_per_document_chunks_are_floor_or_ceil_and_tokens_differ_by_one(lengths, ranks, extra):
    lengths, total = padded(lengths, ranks, extra)
    result = layout.per_document(lengths, total, ranks)
    tokens = [int(rank[:, COUNT].sum()) for rank in result]
    assert max(tokens) - min(tokens) <= 1
    for document, length in enumerate(lengths.tolist()):
        floor = length // (2 * ranks)
        runs = [rank[rank[:, DOCUMENT] == document] for rank in result]
        counts = np.concatenate([run[:, COUNT] for run in runs])
        # A rank's two chunks may touch, and then are one run.
        assert all(floor <= n <= floor + 1 or 2 * floor <= n <= 2 * floor + 2 for n in counts)
        assert all(2 * floor <= run[:, COUNT].sum() <= 2 * floor + 2 for run in runs)


@given(lengths=st.lists(st.integers(64, 4000), min_size=1, max_size=20), ranks=degrees, data=st.data())
@settings(max_examples=150)
def test_per_document_balances_the_work_of_documents_of_64_tokens_a_rank(lengths, ranks, data):
    """Workload (paper equation 2, a 7B layer: W_l is some 24 hidden sizes of pairs a token) within 1 %."""
    lengths, total = padded([length * ranks for length in lengths], ranks)
    lengths[0] += total - lengths.sum() if data.draw(st.booleans()) else 0
    work = np.array([pairs(rank) for rank in layout.per_document(lengths, total, ranks)], dtype=float)
    linear = 6 * 4096 * total / ranks
    assert (work + linear).max() <= 1.01 * (work + linear).min()
    # Attention alone: within one token in a chunk, for each document, and less in many.
    chunk = lengths // (2 * ranks)
    share = lengths.astype(float) ** 2 / (lengths.astype(float) ** 2).sum()
    assert work.max() / work.min() - 1 <= (share / chunk).sum()


def test_the_example_of_hybrid():
    lengths = np.array([8192, 100, 100])
    name, sharding = planning.shard("hybrid", lengths, 8400, 2, planning.UNMERGED)
    hybrid = [[[0, 0, 2048], [0, 6144, 2048], [1, 0, 100]], [[0, 2048, 4096], [2, 0, 100]]]
    assert name == "hybrid" and [r.tolist() for r in sharding] == hybrid


both_kernels = pytest.mark.parametrize("latency", [LATENCY, planning.UNMERGED], ids=["merged", "unmerged"])


@both_kernels
@given(lengths=ragged, ranks=degrees, extra=slack, prefix=st.one_of(st.none(), st.integers(1, 100_000)))
@settings(max_examples=80)
def test_who_chooses_is_never_predicted_slower_than_its_choices(latency, lengths, ranks, extra, prefix):
    """Also where the first document is a slice, whose queries see a prefix."""
    assume(sum(lengths) >= ranks)
    lengths, total = padded(lengths, ranks, extra)
    before = np.zeros_like(lengths)
    before[0] = prefix or 0
    slices = None if prefix is None else Slices(before, before > 0)
    strategies = {policy: STRATEGIES.configure(policy).make(ranks, latency) for policy in SHARDINGS}
    divided = {policy: one.shard(lengths, total, slices=slices)[1] for policy, one in strategies.items()}
    shards = {policy: layout.with_prefix(one, before) for policy, one in divided.items()}
    for better, worse in (("adaptive", FIXED), ("hybrid", ("adaptive",))):
        times = {policy: slowest(strategies[better].seconds(shards[policy])) for policy in (better, *worse)}
        assert times[better] == min(times.values())


@both_kernels
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_hybrid_beats_adaptive_on_one_long_and_many_short_documents(latency, ranks):
    rng = np.random.default_rng(ranks)
    for share in (0.3, 0.5, 0.7):
        long = int(65536 * share)
        short = rng.integers(50, 700, 2000)
        short = short[: np.searchsorted(np.cumsum(short), 65536 - long)]
        lengths, total = padded(rng.permutation([long, *short]).tolist(), ranks)
        time = {p: slowest(latency.seconds(shard(p, lengths, total, ranks, latency))) for p in SHARDINGS}
        assert time["hybrid"] < time["adaptive"]
        if share == 0.3 and ranks == 8:  # short documents matter most where ranks are many
            assert time["hybrid"] < 0.9 * time["adaptive"]
        kept = shard("hybrid", lengths, total, ranks, latency)
        seconds = latency.seconds(kept)
        assert slowest(seconds) <= 1.02 * seconds.mean(axis=0).sum()
        runs = np.bincount(np.concatenate(kept)[:, DOCUMENT], minlength=len(lengths))
        # At most `ranks` fill the rooms in the end, and the search lets a few others do without need.
        assert (runs[lengths < long] == 1).sum() >= len(short) - max(ranks, 0.05 * len(short))


@given(lengths=ragged, ranks=degrees, extra=slack, data=st.data())
def test_hybrid_fills_every_rank_whichever_documents_are_cut(lengths, ranks, extra, data):
    """Whatever is tried: the search's own choice would rarely reach the corners."""
    lengths, total = padded(lengths, ranks, extra)
    hybrid = STRATEGIES.configure("hybrid").make(ranks, LATENCY)
    sizes, places = hybrid.levels, hybrid.places
    assert all(large % small == 0 for small, large in pairwise(sizes)) and sizes[-1] == ranks
    packs = layout.Joined.of([(lengths, total, None)])
    large = hybrid.large(packs)
    chosen, room = [], np.full(ranks, total // ranks - max(len(sizes) - 1, 0), dtype=float)
    for length in large.lengths[:, 0]:
        place = data.draw(st.integers(0, len(places.level) - 1))
        taken = places.has[:, place] * length / places.sizes[places.level[place]]
        chosen.append(place if (room >= taken).all() else len(places.level) - 1)
        room -= taken * (chosen[-1] == place)
    result = hybrid.spread(packs, large, np.array(chosen)[:, None])
    assert sum(int(rank[:, COUNT].sum()) for rank in result) == lengths.sum()
    assert max(int(rank[:, COUNT].sum()) for rank in result) <= total // ranks


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    ranks=st.sampled_from([2, 3, 4]),
    prices=st.tuples(st.floats(0, 1e-6), st.floats(0, 1e-4)),
)
@settings(max_examples=20)
def test_a_search_is_never_far_from_the_best_of_all_places(lengths, ranks, prices):
    """Beside every choice of places for few documents, by the time that is predicted of their sharding."""
    assume(sum(lengths) >= ranks)
    lengths, total = padded([64 * length for length in lengths[: 3 if ranks > 2 else 5]], ranks)
    moves = [MoveSeconds(*prices)] * len(levels_of(ranks))
    hybrid = STRATEGIES.configure("hybrid").make(ranks, LATENCY, moves)
    packs, places = layout.Joined.of([(lengths, total, None)]), hybrid.places
    large = hybrid.large(packs)
    best = np.inf
    for chosen in product(range(len(places.level)), repeat=len(lengths)):
        taken = places.has[:, list(chosen)] @ (large.lengths[:, 0] / places.sizes[places.level[list(chosen)]])
        if (taken <= total // ranks - len(levels_of(ranks)) + 1).all():
            sharding = hybrid.spread(packs, large, np.array(chosen)[:, None])
            best = min(best, float(hybrid.predicted(packs, [sharding])[0, 0]))
    _, sharding = hybrid.divide(lengths, total, None)
    assert hybrid.predicted(packs, [sharding])[0, 0] <= 1.25 * best


class Turned(Hybrid):
    """Somebody else's, with a `divide` and seconds of its own."""

    def divide(self, lengths, total, slices):
        return "turned", super().divide(lengths, total, slices)[1][::-1]

    def seconds(self, sharding):
        return 2 * super().seconds(sharding)


@pytest.mark.parametrize("kind", [Adaptive, Hybrid, Turned])
@given(packs=st.lists(ragged, min_size=2, max_size=5), ranks=degrees, cut=st.booleans())
@settings(max_examples=25)
def test_micro_batches_together_are_divided_and_predicted_as_each_alone(kind, packs, ranks, cut):
    strategy = kind.Config().make(ranks, LATENCY, [MoveSeconds(1e-8, 1e-6)] * len(levels_of(ranks)))
    sizes = [padded([ranks, *pack], ranks) for pack in packs]
    slices = [Slices(lengths // 2 * 7, lengths % 3 == 0) if cut else None for lengths, _ in sizes]
    packs = [(*size, of_pack) for size, of_pack in zip(sizes, slices, strict=True)]
    together = strategy.shard_all(packs)
    placed = [(sharding, *pack[1:]) for (_, sharding), pack in zip(together, packs, strict=True)]
    rows = zip(together, strategy.figures(placed), packs, placed, strict=True)
    for (name, found), figures, pack, one in rows:
        expected, alone = strategy.shard(*pack)
        assert name == expected and [rank.tolist() for rank in found] == [rank.tolist() for rank in alone]
        before = None if pack[2] is None else pack[2].prefix
        assert (figures.seconds == strategy.seconds(layout.with_prefix(found, before))).all()
        assert figures[1:] == (strategy.travelling(*one), strategy.keys(*one))


def test_a_micro_batch_with_fewer_tokens_than_ranks_is_refused():
    strategy = STRATEGIES.configure("hybrid").make(4, LATENCY)
    with pytest.raises(PlanError, match=r"A micro-batch has 3 tokens, fewer than the 4 "):
        strategy.shard(np.array([1, 2]), 8)


@pytest.mark.parametrize("policy", SHARDINGS)
def test_the_planner_shards_by_the_settings(policy):
    policies = {"context": STRATEGIES.configure(policy), "attention": planning.UNMERGED}
    job = Job(window=4096, micro_batches=4, degrees=Degrees(context=4, shard=2), **policies)
    plan = job.planner(Documents(lengths=np.random.default_rng(1).integers(1, 900, 300))).next()
    for micro_batch in plan.micro_batches:
        name, expected = job.strategy.shard(micro_batch.lengths, micro_batch.length)
        assert name == micro_batch.sharding
        assert name in {"adaptive": FIXED, "hybrid": (*FIXED, "hybrid")}.get(policy, (policy,))
        assert all((a == b).all() for a, b in zip(micro_batch.ranks, expected, strict=True))


@pytest.mark.parametrize("policy", [*SHARDINGS, "ulysses"])
@given(lengths=ragged, ranks=st.integers(2, 8), data=st.data())
@settings(max_examples=20)
def test_queries_of_slices_see_their_prefixes(policy, lengths, ranks, data):
    assume(sum(lengths) >= ranks)
    lengths, total = padded(lengths, ranks, 1)
    prefix = np.array(data.draw(st.lists(st.integers(0, 500), min_size=len(lengths), max_size=len(lengths))))
    strategy = STRATEGIES.configure(policy).make(ranks, LATENCY)
    slices = Slices(prefix, prefix > 0)
    _, shards = strategy.shard(lengths, total, slices=slices)
    seen = []
    for rank in range(ranks):
        mask = strategy.mask(shards, lengths, total, rank, slices)
        number, tokens = mask.keys.T
        before = np.where(number >= 0, prefix[number], 0)
        seen.append(layout.segments_after(mask.segments, tokens, before))
        assert set(np.flatnonzero(prefix)) <= set(number)  # others may have their later slices
        begins = np.full(len(lengths) + 1, -1)
        begins[number] = np.cumsum(before + tokens) - before - tokens
        segments = seen[-1]
        document = shards[rank][:, DOCUMENT] if policy != "ulysses" else np.arange(len(lengths))
        assert (segments[:, 2] == begins[document]).all()
        assert (segments[:, 3] - segments[:, 1] >= prefix[document]).all()
        assert (segments[:, 3] <= (prefix + lengths)[document]).all()
    queries = np.concatenate(seen)[:, [1, 3]].astype(np.int64).T
    expected = (lengths * prefix + lengths * (lengths + 1) // 2).sum() * (ranks if policy == "ulysses" else 1)
    assert (queries[0] * queries[1] - queries[0] * (queries[0] - 1) // 2).sum() == expected


@pytest.mark.parametrize(("heads", "group", "ranks", "most"), [(32, 8, 3, 16), (24, 3, 5, 6), (32, 4, 4, 8)])
def test_ulysses_ispredicted_with_the_heads_that_a_rank_runs(heads, group, ranks, most):
    """Key heads go whole to a rank, with all their queries, where there are enough of them."""
    latency = hopper(128, heads, group=group)
    strategy = STRATEGIES.configure("ulysses").make(ranks, latency)
    runs = [strategy.heads(heads, heads // group, rank)[0] for rank in range(ranks)]
    assert max(runs) == most
    _, sharding = strategy.shard(np.array([4096, 512]), -(-4608 // ranks) * ranks)
    for prefix in (0, 300):  # tokens of the first document that lie in an earlier slice
        whole = (np.array([[0, prefix, 4096], [1, 0, 512]]),)
        expected = [replace(latency, heads=n).seconds(whole)[0] for n in runs]
        found = strategy.seconds(layout.with_prefix(sharding, np.array([prefix, 0])))
        np.testing.assert_allclose(found, expected)


@given(owners=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=5))
def test_keys_travel_in_the_smallest_group_that_has_all_of_a_document(owners):
    held = [[document for document, own in enumerate(owners) if rank in own] for rank in range(8)]
    shards = [np.array([[document, 0, 1] for document in own], dtype=int).reshape(-1, 3) for own in held]
    for own, place in zip(owners, spans(shards, (2, 4, 8)).tolist(), strict=True):
        groups = [len({rank // size for rank in own}) for size in (1, 2, 4, 8)]
        assert place == groups.index(1) - 1


def test_hybrid_gives_a_long_document_to_the_group_with_the_least_work():
    """Two documents for two ranks each of four, with room for both in the first group."""
    _, shards = planning.shard("hybrid", np.array([4096, 4096] + [64] * 512), 40960, 4, hopper(32, 128))
    having = [{rank for rank in range(4) if document in shards[rank][:, DOCUMENT]} for document in (0, 1)]
    assert len(having[0]) > 1 and not having[0] & having[1]


def test_ulysses_receives_all_tokens_for_a_rank_s_heads_but_its_own():
    """Queries, keys, values and outputs of one head, 4 elements each, of the other half of the tokens."""
    exchange = STRATEGIES.configure("ulysses").make(2, hopper(32, 128)).exchange(planning.MODEL, 1)
    assert [move.received for move in exchange.moves] == [4 * 4 / 2]
