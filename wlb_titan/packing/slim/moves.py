"""From the micro-batches of forward passes to those of backward passes: where hidden states lie.

Under the asymmetric partition a stage keeps hidden states of its forward passes, and a backward pass needs
those of other tokens than any forward pass had. Where context and sequence parallelism divide hidden states,
a token may be another rank's in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.context import sequence_positions
from wlb_titan.packing.slim.slices import parts, piece_numbers
from wlb_titan.plan import LENGTH, PREFIX, TOTAL, MicroBatch


class TokenMoves(NamedTuple):
    """How a rank's share of a backward micro-batch is put together.

    Attributes:
        sources: forward micro-batches of which this rank sends tokens, rising.
        sent: int64 (rows,), rows of the sources' shares one after the other, by the rank that they go to.
        sent_counts: number of rows sent to each rank.
        received_counts: rows from each rank.
        places: int64 (rows,), where what is received goes in the share; what is left of it is padding.
        over: forward micro-batches of which nothing is needed afterwards.
    """

    sources: tuple[int, ...]
    sent: Ints
    sent_counts: list[int]
    received_counts: list[int]
    places: Ints
    over: tuple[int, ...] = ()


def token_moves(
    forward: Sequence[MicroBatch], backward: Sequence[MicroBatch], tensor_ranks: int, rank: int
) -> list[TokenMoves]:
    """How this rank gets its share of hidden states, for each backward micro-batch.

    Args:
        forward, backward: micro-batches of one data-parallel rank, of the same tokens.
        tensor_ranks: ranks among which sequence parallelism divides a context-parallel rank's tokens; 1
            without it.
        rank: this one's number among those that share a micro-batch, tensor-parallel ranks innermost.
    """
    tokens = _token_numbers([*forward, *backward])
    own, others = tokens[: len(forward)], tokens[len(forward) :]
    shares = [_shares(m, tensor_ranks) for m in forward]
    # Of every token the forward micro-batch that has it, the rank that keeps it, and its row there.
    pack, holder, row = np.empty((3, sum(map(len, own))), dtype=np.int64)
    for number, (here, share) in enumerate(zip(own, shares, strict=True)):
        at = np.argsort(share, axis=None)[: len(here)]
        pack[here] = number
        holder[here], row[here] = np.divmod(at, share.shape[1])
    result = []
    last = np.full(len(forward), -1)
    for number, (m, here) in enumerate(zip(backward, others, strict=True)):
        wanted = [here[share[share < len(here)]] for share in _shares(m, tensor_ranks)]
        sent = [each[holder[each] == rank] for each in wanted]
        moved = np.concatenate(sent)
        sources = np.unique(pack[moved])
        last[sources] = number
        lengths = np.array([shares[source].shape[1] for source in sources], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        (places,) = np.nonzero(_shares(m, tensor_ranks)[rank] < len(here))
        by_holder = np.argsort(holder[wanted[rank]], kind="stable")
        result.append(
            TokenMoves(
                sources=tuple(sources.tolist()),
                sent=begins[np.searchsorted(sources, pack[moved])] + row[moved],
                sent_counts=[len(each) for each in sent],
                received_counts=np.bincount(holder[wanted[rank]], minlength=len(wanted)).tolist(),
                places=places[by_holder],
            )
        )
    return [one._replace(over=tuple(np.flatnonzero(last == j).tolist())) for j, one in enumerate(result)]


def _token_numbers(micro_batches: Sequence[MicroBatch]) -> list[Ints]:
    """int64 (tokens,) for each micro-batch, numbers by which a token is found in those of both passes."""
    packs = parts(micro_batches)
    numbers = piece_numbers(packs)
    totals = np.zeros(1 + max(int(own.max()) for own in numbers), dtype=np.int64)
    for own, (_, slices) in zip(numbers, packs, strict=True):
        totals[own] = slices[:, TOTAL]
    begins = np.cumsum(totals) - totals
    result = []
    for own, (documents, slices) in zip(numbers, packs, strict=True):
        lengths = documents[:, LENGTH]
        first = begins[own] + slices[:, PREFIX] - (np.cumsum(lengths) - lengths)
        result.append(np.repeat(first, lengths) + np.arange(int(lengths.sum())))
    return result


def _shares(micro_batch: MicroBatch, tensor_ranks: int) -> Ints:
    """Int64 (ranks, L), where in the sequence the tokens lie that each rank holds; padding comes last."""
    if micro_batch.ranks is None:
        return np.arange(micro_batch.length).reshape(tensor_ranks, -1)
    lengths = micro_batch.documents[:, LENGTH]
    positions = sequence_positions(micro_batch.ranks, lengths, micro_batch.length)
    return positions.reshape(len(micro_batch.ranks) * tensor_ranks, -1)
