"""All-gather context parallelism (paper section 5; docs/context_parallel.md): a rank attends with its own
queries to everybody's keys, which are gathered in every layer; a document whole on one rank stays there.

Each rank holds the tokens whose keys travel first, and sends as many rows as the rank with most of them: one
regular collective, in which excess rows are padding. A rank then has the gathered keys, document by document,
the padding, and the keys of its own documents:

    rank 0 holds  a0 a1 | b b b      gathered  a0 a1 a2 -     keys of rank 0  a0 a1 a2 - b b b
    rank 1 holds  a2 | c c c c                 (3 of 2 x 2)   keys of rank 1  a0 a1 a2 - c c c c
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Interval

from wlb_titan.arrays import Floats, Ints
from wlb_titan.context.layout import (
    Joined,
    Sharding,
    apart,
    document_chunks,
    from_runs,
    joined,
    per_document,
    per_sequence,
    segments_among,
    sent_tokens,
    sequence_positions,
    spans,
    widest_first,
    with_prefix,
)
from wlb_titan.context.strategy import (
    ContextMask,
    ContextStrategy,
    Exchange,
    Figures,
    KeyShares,
    MoveSeconds,
    Placed,
    Unsharded,
    all_gather_exchange,
)
from wlb_titan.cost.attention_latency import AttentionLatency
from wlb_titan.cost.models import ModelShape
from wlb_titan.errors import PlanError
from wlb_titan.plan import DOCUMENT, Slices
from wlb_titan.plugins import is_ours

MOST_GROUPS = 8  # of heads


class AllGather(ContextStrategy):
    """The base of shardings: each is a subclass with its own `divide`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ContextStrategy.Config):
        groups: Annotated[int, Interval(ge=1, le=MOST_GROUPS)] | Literal["auto"] = 1
        """Groups of heads: while one attends, the keys of the next travel. "auto" takes for each micro-batch
        the number, of 1, 2, 4 and 8, that is predicted fastest. More than 1 gives the same losses to the bit
        on CPUs, and is untried on GPUs."""

        @property
        def grouped(self) -> bool:
            return self.groups != 1

    attention = "wlb_titan.runtime.attention.exchange:AllGatherAttention"
    merges = True
    keeps_short: ClassVar[bool] = False  # most documents do not travel

    def __init__(self, config: Any, ranks: int, latency: AttentionLatency, moves: Sequence[MoveSeconds] = ()):
        super().__init__(config, ranks, latency, moves)
        keys = latency.heads // latency.group
        auto = [groups for groups in (1, 2, 4, 8) if keys % groups == 0]
        self.groups = auto if config.groups == "auto" else [config.groups]

    def check(self, model: ModelShape, tensor: int) -> None:
        keys, most = model.kv_heads // tensor, max(self.groups)
        if keys % most:
            raise PlanError(
                f"{most} groups of heads cannot be made of the {keys} key heads of a tensor-parallel "
                f'rank; take a divisor of {keys}, or "auto".',
                setting="context.groups",
            )

    @property
    def divisor(self) -> int:
        return 2 * self.ranks

    def seconds(self, sharding: Sharding) -> Floats:
        return self.latency.seconds(sharding, held_keys(self._sent(sharding), self.levels))

    def _sent(self, sharding: Sharding, slices: Slices | None = None) -> Ints:
        return sent_tokens(sharding, spans(sharding, self.levels, slices), len(self.levels))

    def shard(self, lengths: Ints, total: int, slices: Slices | None = None) -> tuple[str, Sharding]:
        name, sharding = super().shard(lengths, total, slices)
        return name, widest_first(sharding, spans(sharding, self.levels, slices))

    @property
    def levels(self) -> tuple[int, ...]:
        """Sizes of the groups of neighbours within which documents may be exchanged; see `layout.spans`."""
        return (self.ranks,)

    @property
    def meshes(self) -> Sequence[Mapping[str, int]]:
        return tuple({"cp": size} for size in self.levels)

    def travelling(self, sharding: Sharding, total: int, slices: Slices | None = None) -> tuple[int, ...]:
        most = self._sent(sharding, slices)[:-1].max(axis=1)
        return tuple(int(tokens) * size for tokens, size in zip(most, self.levels, strict=True))

    def keys(self, sharding: Sharding, total: int, slices: Slices | None = None) -> KeyShares:
        return key_shares(sharding, total, self.levels, slices)

    def figures(self, packs: Sequence[Placed]) -> list[Figures]:
        if not is_ours(type(self)):
            return super().figures(packs)
        shardings, totals, slices = zip(*packs, strict=True)
        cut = Slices(*map(np.concatenate, zip(*slices, strict=True))) if slices[0] else None
        sharding = joined(shardings)
        seconds = self.seconds(with_prefix(sharding, cut and cut.prefix)).reshape(len(packs), -1, 2)
        sent = self._sent(sharding, cut)
        most = sent[:-1].reshape(len(self.levels), len(packs), -1).max(axis=2).T * np.array(self.levels)
        gathered, held = shares_of_keys(sent, np.array(totals), self.levels)
        keys = map(KeyShares, gathered.tolist(), held.tolist())
        return [*map(Figures, seconds, map(tuple, most.tolist()), keys)]

    def mask(
        self, sharding: Sharding, lengths: Ints, total: int, rank: int, slices: Slices | None = None
    ) -> ContextMask:
        """As of the base; `exchange` is a `KeyExchange`."""
        return gathered_mask(sharding, lengths, total, rank, self.levels, slices)

    def exchange(self, model: ModelShape, tensor: int) -> Exchange:
        found = all_gather_exchange(model, tensor, self.ranks, self.levels, always=not self.keeps_short)
        values = model.heads * (model.v_head_dim or model.head_dim) / (tensor * self.ranks)
        return replace(found, joined=values if max(self.groups) > 1 else 0.0)


class PerSequence(AllGather):
    """The packed sequence is cut into 2 x CP chunks; rank i takes chunks i and 2 CP - 1 - i."""

    def divide(self, lengths: Ints, total: int, slices: Slices | None) -> tuple[str, Sharding]:
        return "per_sequence", per_sequence(lengths, total, self.ranks)


class Auto(PerSequence):
    """Whichever policy is predicted fastest on these documents; `per_sequence` until it is chosen."""

    automatic = True


class PerDocument(AllGather):
    """Two chunks of every document for each rank, so that all ranks do the same work."""

    def divide(self, lengths: Ints, total: int, slices: Slices | None) -> tuple[str, Sharding]:
        return "per_document", per_document(lengths, total, self.ranks)


class Adaptive(AllGather):
    """For each micro-batch the one of these two whose slowest rank is predicted faster (section 5.3)."""

    def divide(self, lengths: Ints, total: int, slices: Slices | None) -> tuple[str, Sharding]:
        return self._divided([(lengths, total, slices)])[0]

    def shard_all(self, packs: Sequence[Unsharded]) -> list[tuple[str, Sharding]]:
        if not is_ours(type(self)):  # it may have a `divide` of its own
            return super().shard_all(packs)
        for lengths, total, _ in packs:
            self.check_tokens(lengths, total)
        return self._divided(packs)

    def _divided(self, packs: Sequence[Unsharded]) -> list[tuple[str, Sharding]]:
        together = Joined.of(packs)
        names, tried = zip(*self.candidates(together), strict=True)
        best = self.predicted(together, tried).argmin(axis=0).tolist()
        owners = [range(first, first + self.ranks) for first in range(0, len(tried[0]), self.ranks)]
        sharding = tuple(tried[way][rank] for way, own in zip(best, owners, strict=True) for rank in own)
        sharding = widest_first(sharding, spans(sharding, self.levels, together.slices))
        parts = apart(sharding, together.firsts[:-1])
        return [(names[way], own) for way, own in zip(best, parts, strict=True)]

    def candidates(self, packs: Joined) -> list[tuple[str, Sharding]]:
        """Shardings to choose from, with their names; the first of equally fast ones is taken."""
        lengths, ranks = packs.lengths, self.ranks * len(packs.totals)
        stops = np.cumsum(lengths)[packs.firsts[1:] - 1]  # behind each micro-batch's last token
        firsts, begins = np.arange(0, ranks, self.ranks), stops - np.diff(stops, prepend=0)
        owner, begin, end = document_chunks(begins, packs.totals, self.ranks, firsts)
        end = np.minimum(end, stops[owner // self.ranks])  # padding
        begins = np.cumsum(lengths) - lengths
        chunks = document_chunks(begins, lengths, self.ranks, packs.micro_batch * self.ranks)
        return [
            ("per_sequence", from_runs(owner, begin, end, lengths, ranks)),
            ("per_document", from_runs(*chunks, lengths, ranks)),
        ]

    def predicted(self, packs: Joined, tried: Sequence[Sharding]) -> Floats:
        """float64 (shardings, micro-batches), seconds of a layer's attention on the slowest rank, and of
        gathering its keys."""
        sharding = seen = joined(tried)
        sent, slices, ways = self._sent(sharding), packs.slices, len(tried)
        held = held_keys(sent, self.levels)
        if slices is not None:
            slices = Slices(np.tile(slices.prefix, ways), np.tile(slices.cached, ways))
            sent, seen = self._sent(sharding, slices), with_prefix(sharding, slices.prefix)
        most = sent.reshape(len(sent), -1, self.ranks).max(axis=2)
        moved = np.zeros(most.shape[1])
        for tokens, size, move in zip(most, self.levels, self.moves, strict=False):
            moved += np.where(tokens > 0, move.token * size * tokens + move.each, 0.0)
        seconds = self.latency.seconds(seen, held).reshape(-1, self.ranks, 2)
        return np.asarray(seconds.max(axis=1).sum(axis=1) + moved).reshape(ways, -1)


class Level(NamedTuple):
    """The keys that are gathered within the rank's group of one size."""

    order: Ints
    """int64 (gathered,), for keys in document order, padding last, their places among those gathered rank by
    rank; empty where nothing is gathered."""
    sent: int  # how many of this rank's tokens are among them


class KeyExchange(NamedTuple):
    """Where a rank's keys come from."""

    levels: tuple[Level, ...]
    kept: int  # tokens whose keys stay on the rank


def gathered_mask(
    sharding: Sharding, lengths: Ints, total: int, rank: int, levels: Sequence[int], slices: Slices | None
) -> ContextMask:
    """The mask of one rank; the sharding is in the order of `widest_first`."""
    share = total // len(sharding)
    span = spans(sharding, levels, slices)
    assert (np.diff(span[sharding[rank][:, DOCUMENT]]) <= 0).all(), "widest first, as of `shard`"
    sent = sent_tokens(sharding, span, len(levels))
    offset = np.zeros(len(sharding), dtype=np.int64)  # the first token that each rank sends on the level
    exchange: list[Level] = []
    numbers: list[Ints] = []  # documents whose keys the rank has, -1 for padding
    tokens: list[Ints] = []
    for place, size in reversed(list(enumerate(levels))):
        first = rank // size * size
        group = slice(first, first + size)
        rows = int(sent[place, group].max())
        runs = [shard[span[shard[:, DOCUMENT]] == place] for shard in sharding[group]]
        documents, order = _gathered_order(runs, lengths, rows, offset[group] - (share - rows))
        exchange.insert(0, Level(order, int(sent[place, rank])))
        numbers += [documents, np.array([-1])]
        tokens += [lengths[documents], np.array([rows * size - int(lengths[documents].sum())])]
        offset += sent[place]
    shard = sharding[rank]
    whole = shard[span[shard[:, DOCUMENT]] < 0, DOCUMENT]
    alone = not any(len(level.order) for level in exchange)
    kept = share - int(offset[rank]) if len(whole) or alone else 0
    number = np.concatenate([*numbers, whole])
    size_of = np.concatenate([*tokens, lengths[whole]])
    begins = np.zeros(len(lengths) + 1, dtype=np.int64)
    begins[number] = np.cumsum(size_of) - size_of
    keys = np.stack([number, size_of], axis=1)[size_of > 0]
    return ContextMask(segments_among(shard, begins[:-1]), KeyExchange(tuple(exchange), kept), keys)


def _gathered_order(runs: Sequence[Ints], lengths: Ints, rows: int, late: Ints) -> tuple[Ints, Ints]:
    """The documents of a group's runs, and `Level.order` for them.

    Args:
        runs: each rank's runs, as in a sharding.
        rows: tokens that each rank sends.
        late: int64 (ranks,), rows that a rank would send beyond its last token if it did not start earlier.
    """
    documents, renumbered = np.unique(np.concatenate(runs)[:, DOCUMENT], return_inverse=True)
    cuts = np.cumsum([len(of_rank) for of_rank in runs])[:-1]
    for of_rank, number in zip(runs, np.split(renumbered, cuts), strict=True):
        of_rank[:, DOCUMENT] = number
    positions = sequence_positions(tuple(runs), lengths[documents], rows * len(runs))
    for row, rolled in zip(positions, late, strict=True):
        row[:] = np.roll(row, max(int(rolled), 0))
    order = np.empty(positions.size, dtype=np.int64)
    order[positions.ravel()] = np.arange(positions.size)  # the inverse of a permutation
    return documents, order


def key_shares(sharding: Sharding, total: int, levels: Sequence[int], slices: Slices | None) -> KeyShares:
    """The largest shares of the keys that a rank gathers and has; arguments as of `gathered_mask`."""
    sent = sent_tokens(sharding, spans(sharding, levels, slices), len(levels))
    return KeyShares(*(float(share[0]) for share in shares_of_keys(sent, np.array([total]), levels)))


def shares_of_keys(sent: Ints, totals: Ints, levels: Sequence[int]) -> tuple[Floats, Floats]:
    """float64 (micro-batches,) each, the largest shares of the keys that a rank gathers and has."""
    held, ranks = held_keys(sent, levels), levels[-1]
    gathered = held - sent[-1]
    keeps = (sent[-1] > 0) | (gathered == 0)
    padding = np.where(keeps, np.repeat(totals // ranks, ranks) - sent.sum(axis=0), 0)
    most = np.stack([gathered, held + padding]).reshape(2, -1, ranks).max(axis=2) / totals
    return most[0], most[1]


def held_keys(sent: Ints, levels: Sequence[int]) -> Ints:
    """int64 (ranks,), keys that stay on a rank or are gathered, with padding."""
    held: Ints = sent[-1].copy()
    for tokens, size in zip(sent, levels, strict=False):
        held += np.repeat(tokens.reshape(-1, size).max(axis=1) * size, size)
    return held
