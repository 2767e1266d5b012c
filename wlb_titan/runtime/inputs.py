"""From a packed sequence to what the model takes on this rank: its share of the tokens, and its mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchtitan.distributed import ParallelDims

from wlb_titan.planner import sharding
from wlb_titan.runtime.attention import DocumentMask
from wlb_titan.runtime.compile import documents_vary


def rank_inputs(
    dims: ParallelDims,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    lengths: NDArray[np.int64],
    shards: sharding.Sharding | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Cuts this context-parallel rank's share out of a micro-batch and makes its attention mask.

    Args:
        dims: of the job.
        inputs, labels, positions: int64 (1, L), the same on all context- and tensor-parallel ranks.
        lengths: int64 (n,), tokens of the documents, in their order; what is left of L is padding.
        shards: what each context-parallel rank holds; None without context parallelism.

    Returns:
        inputs and labels, (1, L / context-parallel ranks), and what else the model takes: positions, alike,
        and attention_masks, a DocumentMask.
    """
    if shards is None:
        key_order = None
        segments = sharding.segments(sharding.whole(lengths), lengths)
    else:
        rank = dims.get_mesh("cp").get_local_rank()
        order = sharding.sequence_positions(shards, lengths, inputs.shape[1])
        mine = torch.from_numpy(order[rank]).to(inputs.device)
        inputs, labels, positions = inputs[:, mine], labels[:, mine], positions[:, mine]
        key_order = torch.from_numpy(np.argsort(order.ravel())).to(inputs.device)
        segments = sharding.segments(shards[rank], lengths)
    mask = DocumentMask(documents_vary(torch.from_numpy(segments)), key_order)
    return inputs, labels, {"positions": positions, "attention_masks": mask}
