"""Sharding of one packed micro-batch over context-parallel ranks (paper section 5).

A sharding says, for each rank, which runs of which documents it holds. From it follow the attention segments
of the rank (what its queries see) and the permutation between the gathered keys, rank by rank, and the
document order that attention reads. Every rank holds exactly total / ranks tokens, its share of the padding
last.
"""

from wlb_titan.context.choice import choose
from wlb_titan.context.document import per_document, per_document_round_robin
from wlb_titan.context.hybrid import hybrid
from wlb_titan.context.layout import Sharding, segments, sequence_positions, whole
from wlb_titan.context.sequence import per_sequence

__all__ = [
    "Sharding",
    "choose",
    "hybrid",
    "per_document",
    "per_document_round_robin",
    "per_sequence",
    "segments",
    "sequence_positions",
    "whole",
]
