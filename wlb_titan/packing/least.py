"""The least that a micro-batch holds: a token for each of the ranks that share it, and one to predict.

A document that has so many tokens by itself can lead a micro-batch. The first N of them come before all
others into N empty micro-batches, so whatever else is packed, none of these has too little. Only where there
are fewer than N, as of documents that are all very short, may some be moved afterwards.

Documents without a token to predict, which have one token, do not count: their tokens are taken as 0 here.
"""

from __future__ import annotations

import numpy as np

from wlb_titan.arrays import Bools, Ints


def fills(tokens: Ints, least: int) -> int:
    """How many micro-batches of at least so many tokens documents can fill, however they are packed.

    Args:
        tokens: int64 (n,), of each document with a token to predict, 0 of others.
        least: tokens of a micro-batch, at least 1.

    Returns:
        Those that can lead one, and besides as many as the shorter ones make up twice. More may be possible.
    """
    leads = tokens >= least
    return int(leads.sum()) + int(tokens[~leads].sum()) // (2 * least)


def leading_first(order: Ints, leads: Bools, count: int) -> Ints:
    """An order with the first `count` documents that can lead a micro-batch before all others.

    Args:
        order: int64 (n,), numbers of documents.
        leads: bool (n,), by number.
    """
    leading = leads[order]
    leading &= np.cumsum(leading) <= count
    return np.concatenate([order[leading], order[~leading]])


def topped_up(assigned: Ints, tokens: Ints, bins: int, least: int) -> Ints:
    """Documents in bins, some short ones of which are moved to where there are fewer than `least` tokens.

    Example: of bins with documents of [4, 2, 1] and [1] tokens, least 2, the second gets that of 2 tokens.

    Args:
        assigned: int64 (n,), bin of each document; not written to.
        tokens: int64 (n,), as of `fills`, which gives at least `bins` of them.
    """
    filled = np.bincount(assigned, tokens, bins)
    if filled.min() >= least:
        return assigned
    assigned = assigned.copy()
    while filled[short := int(filled.argmin())] < least:
        spare = (tokens > 0) & (tokens <= least) & (filled[assigned] - tokens >= least)
        if not spare.any():
            break
        moved = int(np.where(spare, tokens, 0).argmax())
        filled[assigned[moved]] -= tokens[moved]
        filled[short] += tokens[moved]
        assigned[moved] = short
    return assigned
