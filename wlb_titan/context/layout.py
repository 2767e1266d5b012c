"""Shardings, and what follows from one: attention segments, and the order of the gathered keys.

Per-document sharding (paper section 5.1): every document is cut into 2 x ranks chunks, and rank i takes
chunks i and 2 ranks - 1 - i of each. Per-sequence sharding cuts the packed sequence as one long document.

A document's length is rarely a multiple of 2 x ranks. The paper cuts the multiple and deals the remaining
tokens out one by one, and each of these is a query tile of its own that reads the whole document. Here all
chunks have floor(length / 2 ranks) or one token more, so that there is nothing left to deal. The longer
chunks come to the ranks in turn, 0, 1, 2 ..., over the documents: first to a rank's early chunk, in the next
round to its late one. So no rank is ever more than one token ahead, and what padding there is makes them
equal.

Attention work differs by that one token too. For one document of chunks of c tokens the ranks' query-key
pairs are within 1 / c of each other; over several documents that averages out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Ints
from wlb_titan.plan import COUNT, DOCUMENT, OFFSET, Slices

Sharding = tuple[Ints, ...]
"""Per rank an int64 (m, 3), columns DOCUMENT, OFFSET, COUNT: its runs of tokens, in order."""


def per_sequence(lengths: Ints, total: int, ranks: int) -> Sharding:
    """The pairs of chunks of the whole sequence.

    Example: documents of 6 and 2 tokens on 2 ranks: the chunks are 0-1, 2-3, 4-5 and 6-7, so rank 0 holds
    [(0, 0, 2), (1, 0, 2)] and rank 1 [(0, 2, 4)].

    Args:
        lengths: int64 (n,), tokens of the documents in sequence order, each at least 1.
        total: tokens of the sequence with its padding; a multiple of 2 x ranks.
    """
    _check(total, ranks)
    return from_runs(*document_chunks(np.array([0]), np.array([total]), ranks), lengths, ranks)


def per_document(lengths: Ints, total: int, ranks: int) -> Sharding:
    """The pairs of chunks of each document; arguments as of `per_sequence`.

    Example: documents of 9 and 7 tokens on 2 ranks have chunks of 3, 2, 2, 2 and 1, 2, 2, 2 tokens: rank 0
    holds [(0, 0, 3), (0, 7, 2), (1, 0, 1), (1, 5, 2)] and rank 1 [(0, 3, 4), (1, 1, 4)], 8 tokens each.
    """
    _check(total, ranks)
    return from_runs(*document_chunks(np.cumsum(lengths) - lengths, lengths, ranks), lengths, ranks)


def _check(total: int, ranks: int) -> None:
    assert total % (2 * ranks) == 0, f"{total} tokens do not divide into {2 * ranks} chunks"


def document_chunks(begins: Ints, lengths: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """The 2 x ranks chunks of each document, as runs for `from_runs`: owner, begin and end, each int64
    (ranks x documents x 2,), ordered by rank, document and place, so that sorting them takes no time.

    Args:
        begins: int64 (documents,), where they lie in the sequence.
    """
    sizes = chunk_sizes(lengths, ranks)
    ends = begins + np.cumsum(sizes, axis=0)
    early = np.arange(ranks)
    pairs = np.stack([early, 2 * ranks - 1 - early], axis=1)
    begin, end = (of_chunk[pairs].transpose(0, 2, 1).ravel() for of_chunk in (ends - sizes, ends))
    return np.repeat(early, 2 * len(lengths)), begin, end


def chunk_sizes(lengths: Ints, ranks: int) -> Ints:
    """int64 (2 x ranks, documents), tokens of the chunks of each; ranks get the longer ones in turn."""
    floor, longer = np.divmod(lengths, 2 * ranks)
    dealt = np.cumsum(longer) - longer  # longer chunks of earlier documents
    early = np.arange(ranks)
    turn = np.concatenate([early, 2 * ranks - 1 - early])[:, None]  # of each chunk to be a longer one
    sizes: Ints = floor + ((turn - dealt) % (2 * ranks) < longer)
    return sizes


def from_runs(owner: Ints, begin: Ints, end: Ints, lengths: Ints, ranks: int) -> Sharding:
    """The sharding in which ranks hold runs of the packed sequence.

    Runs are cut where documents end, those that touch are joined, padding is left out, and each rank gets
    what remains in the order of the sequence.

    Args:
        owner: int64 (n,), the rank that holds each run.
        begin, end: int64 (n,), its first token and one past the last, as positions in the sequence.
        lengths: int64 (documents,), tokens of the documents in sequence order.
    """
    ends = np.cumsum(lengths)
    end = np.minimum(end, ends[-1])
    order = np.argsort(owner * (ends[-1] + 1) + begin, kind="stable")  # quick, as runs come mostly in order
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
    """What each run of a rank's queries sees, for `wlb_titan.kernels.varlen_attention`.

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
    columns = (
        np.cumsum(counts) - counts,
        counts,
        begins[shard[:, DOCUMENT]],
        shard[:, OFFSET] + counts,
    )
    return np.stack(columns, axis=1).astype(np.int32)


def spans(sharding: Sharding, levels: Sequence[int], slices: Slices | None = None) -> Ints:
    """Among how many neighbours each document's keys travel.

    Ranks are in groups of each of the `levels`, a group of n beginning at a multiple of n. A document is
    exchanged within the smallest one that has all of its tokens, or among all ranks where they keep it.

    Args:
        levels: sizes of groups, rising, each a divisor of the next; the last one is all ranks.

    Returns:
        int64 (documents,), places in `levels`; -1 where a rank has all of the document.
    """
    ranks = len(sharding)
    owner = np.repeat(np.arange(ranks), [len(shard) for shard in sharding])
    document = np.concatenate(sharding)[:, DOCUMENT]
    first, last = np.zeros((2, int(document.max()) + 1), dtype=np.int64)
    first[document[::-1]] = owner[::-1]  # of several values the last one stays
    last[document] = owner
    result = np.full(len(first), len(levels) - 1, dtype=np.int64)
    for place in range(len(levels) - 2, -1, -1):
        result[first // levels[place] == last // levels[place]] = place
    result[first == last] = -1
    if slices is not None:
        result[slices.cached] = len(levels) - 1
    return result


def widest_first(sharding: Sharding, span: Ints) -> Sharding:
    """The runs of a sharding, on each rank those of documents with the widest `spans` first."""
    key = (-span).astype(np.int8)  # which sorts in linear time
    return tuple(shard[np.argsort(key[shard[:, DOCUMENT]], kind="stable")] for shard in sharding)


def sent_tokens(sharding: Sharding, span: Ints, levels: int) -> Ints:
    """int64 (levels + 1, ranks), tokens of each rank whose keys travel within its group of each level, and at
    the end those whose keys stay."""
    ranks, pieces = len(sharding), np.concatenate(sharding)
    owner = np.repeat(np.arange(ranks), [len(shard) for shard in sharding])
    row = span[pieces[:, DOCUMENT]]
    row[row < 0] = levels
    tokens = np.bincount(row * ranks + owner, pieces[:, COUNT], (levels + 1) * ranks)
    return tokens.astype(np.int64).reshape(-1, ranks)


def with_prefix(sharding: Sharding, prefix: Ints | None) -> Sharding:
    """The runs of a sharding where each document has a prefix that lies elsewhere, and its queries see it.

    Args:
        prefix: int64 (n,), tokens of each document's prefix; None for none.
    """
    if prefix is None:
        return sharding
    shifted = tuple(shard.copy() for shard in sharding)
    for shard in shifted:
        shard[:, OFFSET] += prefix[shard[:, DOCUMENT]]
    return shifted


def segments_after(seen: NDArray[np.int32], lengths: Ints, prefix: Ints) -> NDArray[np.int32]:
    """Segments among keys with a prefix before each document's own.

    Example: documents of 2 and 3 tokens, the second after a prefix of 10, seen as a whole:

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
    assert (begins[document] == seen[:, 2]).all(), "keys of a segment begin with their document"
    result = seen.copy()
    result[:, 2] += (np.cumsum(prefix) - prefix)[document].astype(np.int32)
    result[:, 3] += prefix[document].astype(np.int32)
    return result


def sequence_positions(sharding: Sharding, lengths: Ints, total: int) -> Ints:
    """Where each token that the ranks hold lies in the sequence.

    Padding takes the positions after the last document, in the order of the ranks.

    Returns:
        int64 (ranks, total / ranks): a permutation of 0 .. total - 1. Its inverse, over the flattened
        array, brings keys gathered rank by rank into document order.
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
    """The shard of a rank that holds the whole sequence: every document in one run."""
    documents = np.arange(len(lengths))
    return np.stack([documents, np.zeros_like(documents), lengths], axis=1)
