"""Shardings, and what follows from one: attention segments, and the order of the gathered keys.

Per-document sharding (paper section 5.1): every document is cut into 2 x ranks chunks, and rank i takes
chunks i and 2 ranks - 1 - i of each. Per-sequence sharding cuts the packed sequence as one long document.

Chunks have floor(length / 2 ranks) tokens or one more. Over the documents, ranks get the longer chunks in
turn, 0, 1, 2 ...: in one round their early chunk is longer, in the next their late one. So no rank is ever
more than one token ahead, and padding makes them equal (docs/context_parallel.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET, Slices

Sharding = tuple[Ints, ...]
"""For each rank its runs of tokens: int64 (m, 3), columns DOCUMENT, OFFSET, COUNT, in order."""


def per_sequence(lengths: Ints, total: int, ranks: int) -> Sharding:
    """Each rank has a pair of chunks of the whole sequence.

    Example: documents of 6 and 2 tokens on 2 ranks: the chunks are 0-1, 2-3, 4-5 and 6-7, so rank 0 holds
    [(0, 0, 2), (1, 0, 2)] and rank 1 [(0, 2, 4)].

    Args:
        lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
        total: tokens of the sequence with its padding; a multiple of 2 x ranks.
    """
    return from_runs(*document_chunks(np.array([0]), np.array([total]), ranks), lengths, ranks)


def per_document(lengths: Ints, total: int, ranks: int) -> Sharding:
    """Each rank has a pair of chunks of every document; arguments as of `per_sequence`.

    Example: documents of 9 and 7 tokens on 2 ranks have chunks of 3, 2, 2, 2 and 1, 2, 2, 2 tokens: rank 0
    holds [(0, 0, 3), (0, 7, 2), (1, 0, 1), (1, 5, 2)] and rank 1 [(0, 3, 4), (1, 1, 4)], 8 tokens each.
    """
    return from_runs(*document_chunks(np.cumsum(lengths) - lengths, lengths, ranks), lengths, ranks)


def document_chunks(begins: Ints, lengths: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """The 2 x ranks chunks of each document: owner, begin and end as of `from_runs`, each int64
    (ranks x documents x 2,), sorted by rank, document and place.

    Args:
        begins: int64 (documents,), where they begin in the sequence.
    """
    floor, longer = np.divmod(lengths, 2 * ranks)
    dealt = np.cumsum(longer) - longer  # longer chunks of earlier documents
    early = np.arange(ranks)
    late = 2 * ranks - 1 - early
    turn = np.concatenate([early, late])[:, None]  # when each chunk is next to be longer
    sizes = floor + ((turn - dealt) % (2 * ranks) < longer)
    ends = begins + np.cumsum(sizes, axis=0)
    pairs = np.stack([early, late], axis=1)
    begin, end = (of_chunk[pairs].transpose(0, 2, 1).ravel() for of_chunk in (ends - sizes, ends))
    return np.repeat(early, 2 * len(lengths)), begin, end


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
    cuts = np.searchsorted(owner[run], np.arange(ranks + 1))
    return tuple(rows[cuts[rank] : cuts[rank + 1]] for rank in range(ranks))


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
    key = (-span).astype(np.int8)  # int8 sorts in linear time
    return tuple(shard[np.argsort(key[shard[:, DOCUMENT]], kind="stable")] for shard in sharding)


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
    shifted = tuple(shard.copy() for shard in sharding)
    for shard in shifted:
        shard[:, OFFSET] += prefix[shard[:, DOCUMENT]]
    return shifted


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
