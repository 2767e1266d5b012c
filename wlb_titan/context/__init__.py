"""Context parallelism: who holds which tokens of a packed micro-batch, and what that costs (paper section 5).

A sharding lists the runs of documents that each rank holds: exactly total / ranks tokens, its share of the
padding last. A rank's attention segments (what its queries see) and its tokens' positions follow from it. A
strategy makes shardings, and knows what the ranks exchange.
"""

from wlb_titan.context.layout import (
    Sharding,
    per_document,
    per_sequence,
    segments,
    segments_after,
    sequence_positions,
    whole_sequence,
    with_prefix,
)
from wlb_titan.context.strategy import (
    ALL_KEYS,
    STRATEGIES,
    ContextMask,
    ContextStrategy,
    Exchange,
    ExchangeCost,
    KeyShares,
    Move,
    MoveSeconds,
    all_gather_exchange,
)

__all__ = [
    "ALL_KEYS",
    "STRATEGIES",
    "ContextMask",
    "ContextStrategy",
    "Exchange",
    "ExchangeCost",
    "KeyShares",
    "Move",
    "MoveSeconds",
    "Sharding",
    "all_gather_exchange",
    "per_document",
    "per_sequence",
    "segments",
    "segments_after",
    "sequence_positions",
    "whole_sequence",
    "with_prefix",
]
