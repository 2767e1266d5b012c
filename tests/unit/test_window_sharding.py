"""A rank's share of windowed attention is that of the whole sequence, however the sequence is divided."""

import numpy as np
import planning
import pytest
import torch
from wlb_titan.kernels import varlen_attention

from wlb_titan.context import layout
from wlb_titan.cost.attention_kernels import hopper

LENGTHS = np.array([90, 7, 1, 40, 22])
TOTAL = 168  # with padding
RANKS = 4


@pytest.mark.parametrize("window", [1, 13, 60])
@pytest.mark.parametrize("policy", ["per_sequence", "per_document", "adaptive", "hybrid"])
def test_every_rank_has_its_rows(policy, window):
    rng = torch.Generator().manual_seed(window)
    q, k, v = torch.randn(3, TOTAL, 2, 8, generator=rng, dtype=torch.float64)
    sequence = torch.from_numpy(layout.segments(layout.whole_sequence(LENGTHS), LENGTHS))
    whole, whole_lse = varlen_attention(q, k, v, sequence, window=window, return_lse=True)
    _, shards = planning.shard(policy, LENGTHS, TOTAL, RANKS, hopper(64, 2))
    held = layout.sequence_positions(shards, LENGTHS, TOTAL)
    for shard, rows in zip(shards, torch.from_numpy(held), strict=True):
        segments = torch.from_numpy(layout.segments(shard, LENGTHS))
        out, lse = varlen_attention(q[rows], k, v, segments, window=window, return_lse=True)
        torch.testing.assert_close(out, whole[rows])
        torch.testing.assert_close(lse, whole_lse[:, rows])
