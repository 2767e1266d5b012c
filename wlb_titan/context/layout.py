"""Shardings, and what follows from one: attention segments, and the order of the gathered keys.

Per-document sharding (paper section 5.1): every document is cut into 2 x ranks chunks, and rank i takes
chunks i and 2 ranks - 1 - i of each. Per-sequence sharding cuts the packed sequence as one long document.

Chunks have floor(length / 2 ranks) tokens or one more. Over the documents, ranks get the longer chunks in
turn, 0, 1, 2 ...: in one round their early chunk is longer, in the next their late one. So no rank is ever
more than one token ahead, and padding makes them equal (docs/context_parallel.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET, Slices

Sharding = tuple[Ints, ...]
"""For each rank its runs of tokens: int64 (m, 3), columns DOCUMENT, OFFSET, COUNT, in order."""


class Joined(NamedTuple):
    """Micro-batches one behind the other, so that the same array operations divide them all: documents and
    ranks are numbered through, rank r of micro-batch m is m x ranks + r."""

    lengths: Ints  # int64 (documents,), tokens
    micro_batch: Ints  # int64 (documents,), of each document, rising
    totals: Ints  # int64 (micro-batches,), tokens with padding
    slices: Slices | None

    @classmethod
    def of(cls, packs: Sequence[tuple[Ints, int, Slices | None]]) -> Joined:
        """Lengths, total and slices of each, as of `ContextStrategy.shard`."""
        lengths, totals, slices = zip(*packs, strict=True)
        cut = [each for each in slices if each is not None]
        return cls(
            np.concatenate(lengths),
            np.repeat(np.arange(len(packs)), [len(own) for own in lengths]),
            np.array(totals),
            Slices(*map(np.concatenate, zip(*cut, strict=True))) if cut else None,
        )

    @property
    def firsts(self) -> Ints:
        """int64 (micro-batches + 1,), the first document of each, and how many there are."""
        return np.searchsorted(self.micro_batch, np.arange(len(self.totals) + 1))


def joined(shardings: Sequence[Sharding]) -> Sharding:
    """Shardings of micro-batches as one, numbered as in `Joined`."""
    shards = [shard for sharding in shardings for shard in sharding]
    runs = np.concatenate(shards)
    ends = np.cumsum([sum(map(len, sharding)) for sharding in shardings])
    documents = np.maximum.reduceat(runs[:, DOCUMENT], np.append(0, ends[:-1])) + 1
    runs[:, DOCUMENT] += np.repeat(np.cumsum(documents) - documents, np.diff(ends, prepend=0))
    return _of_ranks(runs, np.cumsum([0] + [len(shard) for shard in shards]))


def apart(sharding: Sharding, firsts: Ints) -> list[Sharding]:
    """The inverse of `joined`, by the first document of each micro-batch."""
    runs, ranks = np.concatenate(sharding), len(sharding) // len(firsts)
    counts = np.array([len(shard) for shard in sharding])
    runs[:, DOCUMENT] -= np.repeat(firsts, counts.reshape(-1, ranks).sum(axis=1))
    shards = _of_ranks(runs, np.cumsum(np.append(0, counts)))
    return [shards[first : first + ranks] for first in range(0, len(shards), ranks)]


def _of_ranks(runs: Ints, cuts: Ints) -> Sharding:
    """The runs of each rank, from one of the cuts to the next."""
    return tuple(runs[first:stop] for first, stop in pairwise(cuts.tolist()))


def per_sequence(lengths: Ints, total: int, ranks: int) -> Sharding:
    """Each rank has a pair of chunks of the whole sequence.

    >>> [rank.tolist() for rank in per_sequence(np.array([6, 2]), 8, 2)]
    [[[0, 0, 2], [1, 0, 2]], [[0, 2, 4]]]

    Args:
        lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
        total: tokens of the sequence with its padding; a multiple of 2 x ranks.
    """
    return from_runs(*document_chunks(np.array([0]), np.array([total]), ranks), lengths, ranks)


def per_document(lengths: Ints, total: int, ranks: int) -> Sharding:
    """Each rank has a pair of chunks of every document; arguments as of `per_sequence`.

    >>> [rank.tolist() for rank in per_document(np.array([9, 7]), 16, 2)]
    [[[0, 0, 3], [0, 7, 2], [1, 0, 1], [1, 5, 2]], [[0, 3, 4], [1, 1, 4]]]
    """
    return from_runs(*document_chunks(np.cumsum(lengths) - lengths, lengths, ranks), lengths, ranks)


def document_chunks(
    begins: Ints, lengths: Ints, ranks: int, first: Ints | int = 0
) -> tuple[Ints, Ints, Ints]:
    """The 2 x ranks chunks of each document: owner, begin and end as of `from_runs`, each int64
    (ranks x documents x 2,), sorted by rank, document and place.

    Args:
        begins: int64 (documents,), where they begin in the sequence.
        first: the first of the ranks that share each document; rising, with longer chunks dealt among those
            of the same ranks.
    """
    first = np.broadcast_to(first, lengths.shape)
    floor, longer = np.divmod(lengths, 2 * ranks)
    dealt = np.cumsum(longer) - longer  # longer chunks of earlier documents
    dealt = dealt - dealt[np.searchsorted(first, first)]
    early = np.arange(ranks)
    late = 2 * ranks - 1 - early
    turn = np.concatenate([early, late])[:, None]  # when each chunk is next to be longer
    sizes = floor + ((turn - dealt) % (2 * ranks) < longer)
    ends = begins + np.cumsum(sizes, axis=0)
    pairs = np.stack([early, late], axis=1)
    begin, end = (of_chunk[pairs].transpose(0, 2, 1).ravel() for of_chunk in (ends - sizes, ends))
    return (early[:, None] + np.repeat(first, 2)).ravel(), begin, end


def from_runs(owner: Ints, begin: Ints, end: Ints, lengths: Ints, ranks: int) -> Sharding:
    """The sharding in which ranks hold these runs of the packed sequence.

    Runs are sorted and cut where documents end, adjacent ones are joined, and padding is left out.

    Args:
        owner: int64 (n,), the rank that holds each run.
        begin, end: int64 (n,), its first token and one past the last, as positions in the sequence.
        lengths: int64 (documents,), tokens of the documents in sequence order.
    """
    ends = np.cumsum(lengths)
    end = np.minimum(end, ends[-1])
    order = np.argsort(owner * (ends[-1] + 1) + begin, kind="stable")  # fast, as runs are mostly sorted
    order = order[begin[order] < end[order]]
    owner, begin, end = owner[order], begin[order], end[order]
    breaks = (begin[1:] != end[:-1]) | (owner[1:] != owner[:-1])
    head, tail = np.append(True, breaks)[: len(order)], np.append(breaks, True)[: len(order)]
    owner, begin, end = owner[head], begin[head], end[tail]

    first = np.searchsorted(ends, begin, side="right")
    count = np.searchsorted(ends, end, side="left") + 1 - first
    pieces = np.cumsum(count)
    run = np.repeat(np.arange(len(count)), count)
    document = np.arange(len(run)) + (first - pieces + count)[run]
    start = (ends - lengths)[document]
    low, high = np.maximum(begin[run], start), np.minimum(end[run], ends[document])
    rows = np.stack([document, low - start, high - low], axis=1)
    return _of_ranks(rows, np.searchsorted(owner[run], np.arange(ranks + 1)))


def segments(shard: Ints, lengths: Ints) -> NDArray[np.int32]:
    """The keys that each run of a rank's queries sees, for `wlb_titan.kernels.varlen_attention`.

    Args:
        shard: int64 (m, 3), one rank's entry of a sharding.
        lengths: int64 (n,), tokens of the documents in sequence order.

    Returns:
        int32 (m, 4), columns q_start (within the rank), q_len, kv_start (within the sequence), kv_len.
    """
    return segments_among(shard, np.cumsum(lengths) - lengths)


def segments_among(shard: Ints, begins: Ints) -> NDArray[np.int32]:
    """`segments` where the keys of document i begin at begins[i]."""
    counts = shard[:, COUNT]
    columns = (np.cumsum(counts) - counts, counts, begins[shard[:, DOCUMENT]], shard[:, OFFSET] + counts)
    return np.stack(columns, axis=1).astype(np.int32)


def spans(sharding: Sharding, levels: Sequence[int], slices: Slices | None = None) -> Ints:
    """How far each document's keys travel.

    On each of the `levels` ranks are in groups of that size, side by side. A document's keys are exchanged
    within the smallest group that has all of its tokens, or among all ranks if they are cached.

    Args:
        levels: sizes of groups, rising, each a divisor of the next; the last one is all ranks.

    Returns:
        int64 (documents,), places in `levels`; -1 where one rank has all of the document.
    """
    ranks = len(sharding)
    owner = np.repeat(np.arange(ranks), [len(shard) for shard in sharding])
    document = np.concatenate(sharding)[:, DOCUMENT]
    first, last = np.zeros((2, int(document.max()) + 1), dtype=np.int64)
    first[document[::-1]] = owner[::-1]  # the last of several assignments stays
    last[document] = owner
    result = np.full(len(first), len(levels) - 1, dtype=np.int64)
    for place in range(len(levels) - 2, -1, -1):
        result[first // levels[place] == last // levels[place]] = place
    result[first == last] = -1
    if slices is not None:
        result[slices.cached] = len(levels) - 1
    return result


def widest_first(sharding: Sharding, span: Ints) -> Sharding:
    """The sharding with each rank's runs sorted by the `spans` of their documents, widest first."""
    runs, counts = np.concatenate(sharding), [len(shard) for shard in sharding]
    order = np.lexsort((-span[runs[:, DOCUMENT]], np.repeat(np.arange(len(sharding)), counts)))
    return _of_ranks(runs[order], np.cumsum([0, *counts]))


def sent_tokens(sharding: Sharding, span: Ints, levels: int) -> Ints:
    """int64 (levels + 1, ranks), tokens of a rank whose keys travel on each level; last, whose keys stay."""
    ranks, pieces = len(sharding), np.concatenate(sharding)
    owner = np.repeat(np.arange(ranks), [len(shard) for shard in sharding])
    row = span[pieces[:, DOCUMENT]]
    row[row < 0] = levels
    tokens = np.bincount(row * ranks + owner, pieces[:, COUNT], (levels + 1) * ranks)
    return tokens.astype(np.int64).reshape(-1, ranks)


def with_prefix(sharding: Sharding, prefix: Ints | None) -> Sharding:
    """The sharding with runs counted from the start of each document's prefix, int64 (n,) tokens, which lies
    elsewhere and which its queries see."""
    if prefix is None:
        return sharding
    runs = np.concatenate(sharding)
    runs[:, OFFSET] += prefix[runs[:, DOCUMENT]]
    return _of_ranks(runs, np.cumsum([0] + [len(shard) for shard in sharding]))


def segments_after(seen: NDArray[np.int32], lengths: Ints, prefix: Ints) -> NDArray[np.int32]:
    """Segments among keys where each document's prefix comes before its own.

    Example: documents of 2 and 3 tokens, the second after a prefix of 10:

        >>> seen = np.array([[0, 2, 0, 2], [2, 3, 2, 3]], dtype=np.int32)
        >>> segments_after(seen, np.array([2, 3]), np.array([0, 10])).tolist()
        [[0, 2, 0, 2], [2, 3, 2, 13]]

    Args:
        seen: int32 (m, 4), as of `segments`: each sees its document's keys from the first.
        lengths: int64 (n,), tokens of the documents that are here, in sequence order.
        prefix: int64 (n,), tokens of each document's prefix.
    """
    begins = np.cumsum(lengths) - lengths
    document = np.searchsorted(begins, seen[:, 2], side="right") - 1
    assert (begins[document] == seen[:, 2]).all(), "a segment's keys begin with their document"
    result = seen.copy()
    result[:, 2] += (np.cumsum(prefix) - prefix)[document].astype(np.int32)
    result[:, 3] += prefix[document].astype(np.int32)
    return result


def sequence_positions(sharding: Sharding, lengths: Ints, total: int) -> Ints:
    """int64 (ranks, total / ranks), the position in the sequence of each token that the ranks hold.

    Padding takes the positions after the last document, rank by rank. The inverse of this permutation,
    flattened, brings keys gathered rank by rank into document order.
    """
    begins = np.cumsum(lengths) - lengths
    share = total // len(sharding)
    positions = np.empty((len(sharding), share), dtype=np.int64)
    padding = int(lengths.sum())
    for row, shard in zip(positions, sharding, strict=True):
        counts = shard[:, COUNT]
        filled = int(counts.sum())
        first = begins[shard[:, DOCUMENT]] + shard[:, OFFSET] - (np.cumsum(counts) - counts)
        row[:filled] = np.repeat(first, counts) + np.arange(filled)
        row[filled:] = np.arange(padding, padding + share - filled)
        padding += share - filled
    return positions


def whole_sequence(lengths: Ints) -> Ints:
    """The shard of a rank that holds the whole sequence."""
    documents = np.arange(len(lengths))
    return np.stack([documents, np.zeros_like(documents), lengths], axis=1)
