"""A rank's share of a packed sequence and its attention mask, on the host and then on the device.

`Item.of` runs in the loader's thread and makes everything on the host, in pinned memory if there is an
accelerator. `Item.to` runs between two micro-batches and only starts copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map, tree_map_only

from wlb_titan.arrays import Ints
from wlb_titan.context.layout import segments_after, sequence_positions
from wlb_titan.context.strategy import ContextMask
from wlb_titan.job import Job
from wlb_titan.memory.mix import kinds_of_layers
from wlb_titan.plan import MicroBatch
from wlb_titan.runtime.attention.kv_cache import BEFORE, HERE, NUMBER
from wlb_titan.runtime.attention.module import DocumentMask
from wlb_titan.runtime.models.blocks import documents_vary


@dataclass(frozen=True)
class Item:
    """A micro-batch of one rank on the host; l are the rank's tokens."""

    inputs: torch.Tensor  # int64 (1, l), token ids
    labels: torch.Tensor  # int64 (1, l), or (1, l, 2) as of `with_weights`
    positions: torch.Tensor  # int64 (1, l), from 0 in every document
    mask: DocumentMask
    others: dict[str, Any] = field(default_factory=dict)  # further arguments of a stage

    @classmethod
    def of(
        cls,
        micro_batch: MicroBatch,
        job: Job,
        context_rank: int,
        tokens: Ints,
        labels: Ints,
        positions: Ints,
        rows: Ints | None = None,
    ) -> Item:
        """Cuts a context-parallel rank's share out of a micro-batch, with what its attention mask needs.

        Args:
            tokens, positions: int64 (L,), of all data-parallel ranks that share it.
            labels: int64 (L,), or (L, 2).
            rows: int64 (n, 4), prefixes of documents in slices, as of `kv_cache`; None if they are whole.
        """
        lengths, shards = micro_batch.lengths, micro_batch.ranks
        strategy = job.by_sharers[micro_batch.sharers].strategy
        mask = ContextMask.of_sequence(lengths)
        if strategy is not None and shards is not None:
            ahead = micro_batch.dp_rank - micro_batch.merged.start if micro_batch.merged else 0
            rank = ahead * job.degrees.context + context_rank  # among those of all sharers
            own = sequence_positions(shards, lengths, len(tokens))[rank]
            mask = strategy.mask(shards, lengths, len(tokens), rank, micro_batch.elsewhere)
            tokens, labels, positions = tokens[own], labels[own], positions[own]
        segments = mask.segments
        if rows is not None:
            rows = rows_of_keys(rows, mask.keys)
            segments = segments_after(segments, mask.keys[:, 1], rows[:, BEFORE])
        return cls(
            *(on_host(values).unsqueeze(0) for values in (tokens, labels, positions)),
            DocumentMask(
                segments=documents_vary(torch.from_numpy(segments)),
                exchange=tree_map_only(np.ndarray, on_host, mask.exchange),
                rows=None if rows is None else documents_vary(torch.from_numpy(rows)),
                sharers=micro_batch.sharers,
                kinds=() if micro_batch.mix is None else kinds_of_layers(micro_batch.mix),
            ),
        )

    def to(
        self, device: torch.device, cache: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Starts the copies to the device; segments and rows stay on the host. `cache` is the number of the
        step's `KeyValueCache`. Returns inputs, labels, and other arguments of the model or a stage."""
        inputs, labels, exchange, others = tree_map(
            lambda part: part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part,
            (self.inputs, self.labels, self.mask.exchange, {"positions": self.positions, **self.others}),
        )
        mask = replace(self.mask, exchange=exchange, cache=cache)
        return inputs, labels, {**others, "attention_masks": mask}


def rows_of_keys(rows: Ints, keys: Ints) -> Ints:
    """The rows of the documents whose keys a rank has, in order; `keys` as of `ContextMask`."""
    number, tokens = keys.T
    result = rows[number]
    result[number < 0] = 0
    result[number < 0, NUMBER] = -1
    result[:, HERE] = tokens
    return result


def grouped(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Micro-batches that go through the model together: those of a pipeline run, or a single one."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def on_host(values: Ints) -> torch.Tensor:
    """Pins the values, if there is an accelerator, so that copies to it do not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor
