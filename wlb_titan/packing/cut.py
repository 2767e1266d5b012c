"""Levelling micro-batches by cutting documents, where whole documents balance worse than `plain`.

`plain` cuts the document that a window's end falls into, so where work is nearly proportional to tokens
(windows of a few thousand tokens, large models) its micro-batches are nearly equal, while whole documents
leave gaps of about half a document. A step that comes out worse than `plain` is on average gives the tails of
documents from heavy micro-batches to light ones; where whole documents balance as well, none is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wlb_titan.arrays import Floats, Ints
from wlb_titan.cost.workload import CostModel, workload
from wlb_titan.packing.arrivals import Waiting
from wlb_titan.plan import LENGTH, START

ROUNDS = 4  # attention of a tail is less than it was, so the mean sinks, and one round does not level all


class Packed(NamedTuple):
    """Documents and the micro-batch of each.

    Attributes:
        documents: int64 (n, 4), columns ID, START, LENGTH, ARRIVAL.
        works: float64 (n,), work of each.
        assigned: int64 (n,), micro-batch of each.
    """

    documents: Waiting
    works: Floats
    assigned: Ints


def level_by_cutting(
    packed: Packed, micro_batches: int, max_length: int, cost_model: CostModel, limit: float, least: int = 2
) -> Packed:
    """Cuts documents of micro-batches whose work is above `limit` times the mean, down to the mean.

    Example: works equal to lengths, micro-batches of documents [6, 4] and [3, 1] tokens, limit 1: the longest
    document of the first is cut after 3 tokens and its tail goes to the second, 7 tokens each.

    Args:
        micro_batches: N.
        max_length: L_max in tokens.
        cost_model: W_a + W_l.
        limit: largest over mean work that is left as it is.
        least: tokens that a cut document keeps; with two it has one to predict.

    Returns:
        The same tokens; a tail has the id and arrival of its document.
    """
    documents, works, assigned = packed
    for _ in range(ROUNDS):
        loads = np.bincount(assigned, works, micro_batches)
        mean = loads.mean()
        heavy = np.flatnonzero(loads > limit * mean)
        if not len(heavy):
            break
        candidates = np.flatnonzero(np.isin(assigned, heavy) & (documents[:, LENGTH] > least))
        if not len(candidates):
            break
        candidates = candidates[np.lexsort((-documents[candidates, LENGTH], assigned[candidates]))]
        givers, longest = np.unique(assigned[candidates], return_index=True)
        cut = candidates[longest]
        tokens = np.bincount(assigned, documents[:, LENGTH], micro_batches)
        lightest = float(workload(cost_model, np.ones(1, dtype=np.int64))[0])  # work of a token at least
        room = np.maximum(max_length - tokens, 0) * lightest
        takers = np.argsort(loads, kind="stable")
        wanted = np.minimum(np.maximum(mean - loads, 0), room)[takers]
        giver, taker, until = _transfers(loads[givers] - mean, wanted)
        if not len(giver):
            break
        lengths = documents[cut[giver], LENGTH]
        stops = _shortened(lengths, works[cut[giver]], until, cost_model, least)
        first = np.diff(giver, prepend=-1) > 0
        ends = np.where(first, lengths, np.roll(stops, 1))
        tails = documents[cut[giver]]
        tails[:, START] += stops
        tails[:, LENGTH] = ends - stops
        documents = documents.copy()
        np.minimum.at(documents[:, LENGTH], cut[giver], stops)
        some = tails[:, LENGTH] > 0
        documents = np.concatenate([documents, tails[some]])
        assigned = np.concatenate([assigned, takers[taker[some]]])
        works = workload(cost_model, documents[:, LENGTH])
    return Packed(documents, works, assigned)


def _transfers(given: Floats, wanted: Floats) -> tuple[Ints, Ints, Floats]:
    """Who gives work to whom: both lines of work are laid side by side and cut where either has an end.

    Args:
        given: float64 (g,), positive.
        wanted: float64 (w,), not negative.

    Returns:
        (t,) each, by giver: number of the giver, of the taker, and what the giver has given by then.
    """
    give, want = np.cumsum(given), np.cumsum(wanted)
    ends = np.unique(np.concatenate([give, want]))
    ends = ends[(ends > 0) & (ends <= min(give[-1], want[-1]))]
    middles = (ends + np.concatenate([[0.0], ends[:-1]])) / 2
    # What is so little that its middle is its end belongs to the last one too.
    giver = np.minimum(np.searchsorted(give, middles, side="right"), len(give) - 1)
    taker = np.minimum(np.searchsorted(want, middles, side="right"), len(want) - 1)
    return giver, taker, ends - (give - given)[giver]


def _shortened(lengths: Ints, works: Floats, less: Floats, cost_model: CostModel, least: int) -> Ints:
    """The smallest lengths, at least `least`, at which documents have lost no more than `less` work."""
    low, high = np.full(len(lengths), least, dtype=np.int64), lengths.copy()
    while (low < high).any():
        middle = (low + high) // 2
        enough = works - workload(cost_model, middle) <= less
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle + 1)
    return high
