"""The asymmetric partition: backward passes have MicroPacks of their own (SlimPack, section 4.1.2).

docs/slimpack.md ("Backward passes with packs of their own") has the line of documents, and how it is cut for
each pass. Example: documents of 6 and 4 tokens, their work is the square, M = 2. The work of each token, 52
in all:

    forward     6: 1 3 5 7 9 | 11, 4: 1 3 5 7         25 and 27
    backward    6: 11 9 7 | 5 3 1, 4: 7 5 3 1         27 and 25
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.bins import in_order
from wlb_titan.context.layout import sequence_positions
from wlb_titan.packing.policy import Ask, Pack, Packing
from wlb_titan.packing.slices import MicroPack, PrefixWork, Slice, piece_numbers
from wlb_titan.packing.slim.dp_merge import Packer, drafts_of
from wlb_titan.packing.slim.flow import Flows
from wlb_titan.plan import LENGTH, PREFIX, TOTAL, MicroBatch


def cut_line(table: PrefixWork, lengths: Ints, count: int) -> list[MicroPack]:
    """Cuts a line of documents into M = `count` pieces of nearly equal work.

    A document that is too short by itself stays with the one before it.
    """
    table.check(lengths, count)
    units = table.most_slices(lengths)
    works = table.work_of(lengths)
    shares = works.sum() * np.arange(1, count) / count
    places = [*table.places(lengths, works, shares).tolist(), int(units.sum())]
    pieces: list[MicroPack] = [[] for _ in places]
    start, number = 0, 0  # of the document, in grains from the start of the line
    for document, (length, own) in enumerate(zip(lengths.tolist(), units.tolist(), strict=True)):
        first = 0
        while first < own:
            last = min(own, places[number] - start)
            stop = length if last == own else last * table.grain
            pieces[number].append(Slice(document, first * table.grain, stop))
            first = last
            number += start + last == places[number]
        if not own:
            pieces[min(number, count - 1)].append(Slice(document, 0, length))
        start += own
    return pieces


class AsymmetricPacker(Packer):
    """Packs forward and backward passes separately; never merges."""

    def __init__(self, ask: Ask, window: int, flows: Flows) -> None:
        super().__init__(ask, window, flows)
        model, grain = ask.cost_model, (ask.divisor, ask.context)
        self._passes = PrefixWork(model.forward, window, *grain), PrefixWork(model.recomputed, window, *grain)

    def packed(self, batch: Pack, count: int) -> Packing:
        packs: list[MicroBatch] = []
        forward, backward = self._passes
        works, found = self._phase_1(batch)
        for own in found.own:
            line = batch[own[np.argsort(-works[own], kind="stable")]]
            back = line[::-1]
            pieces = cut_line(forward, line[:, LENGTH], count)
            packs += drafts_of(line, pieces, passes="F")
            pieces = cut_line(backward, back[:, LENGTH], count)
            packs += drafts_of(back, [piece[::-1] for piece in reversed(pieces)], passes="B")
        return Packing(packs, assigned=in_order(len(packs), self._ask.replicas))


class TokenMoves(NamedTuple):
    """How a rank gets its share of a backward micro-batch from hidden states of forward micro-batches."""

    sources: tuple[int, ...]  # forward micro-batches of which this rank sends tokens, rising
    sent: Ints  # int64 (rows,), rows of the concatenated shares of the sources, by the rank they go to
    sent_counts: list[int]  # rows for each rank
    received_counts: list[int]  # rows from each rank
    places: Ints  # int64 (rows,), where received rows go in the share; the rest of it is padding
    over: tuple[int, ...] = ()  # forward micro-batches that are not needed any more afterwards


def token_moves(packs: Sequence[MicroBatch], tensor_ranks: int, rank: int) -> list[TokenMoves]:
    """The moves for each backward micro-batch of one data-parallel rank.

    Args:
        packs: forward micro-batches, then backward ones of the same tokens.
        tensor_ranks: ranks that divide a context-parallel rank's tokens (sequence parallelism).
        rank: this one's number among those that divide a micro-batch, tensor-parallel ranks innermost.
    """
    tokens = _token_numbers(packs)
    shares = [_shares(pack, tensor_ranks) for pack in packs]
    ahead = sum(pack.passes == "F" for pack in packs)
    # For every token the forward micro-batch that has it, the rank that keeps it, and its row there.
    pack, holder, row = np.empty((3, sum(map(len, tokens[:ahead]))), dtype=np.int64)
    for number, (here, share) in enumerate(zip(tokens[:ahead], shares[:ahead], strict=True)):
        at = np.argsort(share, axis=None)[: len(here)]
        pack[here] = number
        holder[here], row[here] = np.divmod(at, share.shape[1])
    result = []
    last = np.full(ahead, -1)
    for number, (here, share) in enumerate(zip(tokens[ahead:], shares[ahead:], strict=True)):
        wanted = [here[own[own < len(here)]] for own in share]
        sent = [each[holder[each] == rank] for each in wanted]
        moved = np.concatenate(sent)
        sources = np.unique(pack[moved])
        last[sources] = number
        lengths = np.array([shares[source].shape[1] for source in sources], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        (places,) = np.nonzero(share[rank] < len(here))
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


def _token_numbers(packs: Sequence[MicroBatch]) -> list[Ints]:
    """For each micro-batch int64 (tokens,), numbers that tokens have in both passes."""
    numbers = piece_numbers(packs)
    slices = [pack.slices for pack in packs if pack.slices is not None]
    totals = np.zeros(1 + max(int(own.max()) for own in numbers), dtype=np.int64)
    for own, each in zip(numbers, slices, strict=True):
        totals[own] = each[:, TOTAL]
    begins = np.cumsum(totals) - totals
    result = []
    for own, each, pack in zip(numbers, slices, packs, strict=True):
        lengths = pack.lengths
        first = begins[own] + each[:, PREFIX] - (np.cumsum(lengths) - lengths)
        result.append(np.repeat(first, lengths) + np.arange(int(lengths.sum())))
    return result


def _shares(micro_batch: MicroBatch, tensor_ranks: int) -> Ints:
    """int64 (ranks, L), positions in the sequence of the tokens that each rank holds; padding comes last."""
    if micro_batch.ranks is None:
        return np.arange(micro_batch.length).reshape(tensor_ranks, -1)
    positions = sequence_positions(micro_batch.ranks, micro_batch.lengths, micro_batch.length)
    return positions.reshape(len(micro_batch.ranks) * tensor_ranks, -1)
