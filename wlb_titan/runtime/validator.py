"""torchtitan's validation pass with document attention: its dataset, its loop, our masks and sharding.

Sequences are of `training.seq_len` tokens and are packed by torchtitan's data loader, whatever the packing
policy of training. Under pipeline parallelism `training.local_batch_size` of them go through the pipeline
together, forward only; without it one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchtitan.components import validate as titan
from torchtitan.distributed import ParallelDims

from wlb_titan.context import ContextStrategy
from wlb_titan.runtime.inputs import rank_item, to_device


class Validator(titan.Validator):
    """Validates on `validator.dataloader`, `validator.steps` steps every `validator.freq` training steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Validator.Config):
        pass

    def __init__(
        self, config: Config, *, parallel_dims: ParallelDims, local_batch_size: int, **arguments: Any
    ) -> None:
        super().__init__(
            config,
            parallel_dims=parallel_dims,
            # Our attention takes one packed sequence at a time.
            local_batch_size=local_batch_size if parallel_dims.pp_enabled else 1,
            **arguments,
        )
        self.strategy: ContextStrategy | None = None  # the trainer sets it

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """This rank's share of a sequence, sharded as in training, and its mask; see `rank_item`."""
        device = labels.device
        tokens, positions, targets = (
            x[0].cpu().numpy() for x in (input_dict["input"], input_dict["positions"], labels)
        )
        lengths = document_lengths(positions)
        shards, rank = None, 0
        if self.strategy is not None:
            shards = self.strategy.shard(lengths, len(tokens))[1]
            rank = self.parallel_dims.get_mesh("cp").get_local_rank()
        item, mine = rank_item(tokens, targets, positions, lengths, self.strategy, shards, rank)
        return to_device(item, mine, device)


def document_lengths(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of the documents of one sequence, read off its positions.

    Args:
        positions: int64 (L,), each token's place in its document; a document begins where it is 0, and what
            the sequence begins with is a document too.
    """
    begins = np.flatnonzero(positions == 0)
    return np.diff(np.unique([0, *begins, len(positions)]))
