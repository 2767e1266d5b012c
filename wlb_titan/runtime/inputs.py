"""Turns a packed sequence into one rank's share of the tokens, and its attention mask.

`rank_item` runs in the loader's thread and makes everything on the host, in pinned memory if there is an
accelerator. `to_device` runs between two micro-batches and only starts copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from wlb_titan.arrays import Ints
from wlb_titan.context.layout import Sharding, segments_after, sequence_positions
from wlb_titan.context.strategy import ContextMask, ContextStrategy
from wlb_titan.plan import Slices
from wlb_titan.runtime.attention.kv_cache import BEFORE, HERE, NUMBER
from wlb_titan.runtime.attention.module import DocumentMask
from wlb_titan.runtime.models.blocks import documents_vary

Item = tuple[dict[str, Any], torch.Tensor]
"""A micro-batch of one rank on the host: "input", "positions", OF_MASK, the "regrouping" of a backward pass
with tokens of several forward passes; and labels."""

OF_MASK = ("segments", "exchange", "rows", "sharers")
REGROUPING = "regrouping"


def rank_item(
    tokens: Ints,
    labels: Ints,
    positions: Ints,
    lengths: Ints,
    strategy: ContextStrategy | None,
    shards: Sharding | None,
    rank: int,
    rows: Ints | None = None,
    slices: Slices | None = None,
    sharers: int = 1,
) -> Item:
    """Cuts a context-parallel rank's share out of a micro-batch, with what its attention mask needs.

    Args:
        tokens, positions: int64 (L,).
        labels: int64 (L,), or (L, 2) as of `with_weights`.
        lengths: int64 (n,), tokens of the documents, in their order; the rest of L is padding.
        rank: among the context-parallel ranks of all data-parallel ranks that share the micro-batch.
        rows: int64 (n, 4), prefixes of documents in slices, as of `kv_cache`; None if they are whole.
        slices: the other micro-batches' slices of these documents; None if they are whole.

    Returns:
        Tokens, positions and labels, int64 (1, L / ranks, ...); segments, int32 (S, 4).
    """
    mask = ContextMask.of_sequence(lengths)
    if strategy is not None and shards is not None:
        own = sequence_positions(shards, lengths, len(tokens))[rank]
        mask = strategy.mask(shards, lengths, len(tokens), rank, slices)
        tokens, labels, positions = tokens[own], labels[own], positions[own]
    seen = mask.segments
    if rows is not None:
        rows = rows_of_keys(rows, mask.keys)
        seen = segments_after(seen, mask.keys[:, 1], rows[:, BEFORE])
    return {
        "input": on_host(tokens).unsqueeze(0),
        "positions": on_host(positions).unsqueeze(0),
        "segments": torch.from_numpy(seen),
        "exchange": tree_map(as_tensor, mask.exchange),
        "rows": None if rows is None else torch.from_numpy(rows),
        "sharers": sharers,
    }, on_host(labels).unsqueeze(0)


def rows_of_keys(rows: Ints, keys: Ints) -> Ints:
    """The rows of the documents whose keys a rank has, in order; `keys` as of `ContextMask`."""
    number, tokens = keys.T
    result = rows[number]
    result[number < 0] = 0
    result[number < 0, NUMBER] = -1
    result[:, HERE] = tokens
    return result


def to_device(
    item: dict[str, Any], labels: torch.Tensor, device: torch.device, cache: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Starts the copies of an item to the device; segments and rows stay on the host. `cache` is the number
    of the step's `KeyValueCache`. Returns inputs, labels, and other arguments of the model or a stage."""
    moved = {name: one.to(device, non_blocking=True) for name, one in item.items() if name not in OF_MASK}
    exchange = tree_map(lambda tensor: tensor.to(device, non_blocking=True), item["exchange"])
    rows = None if item["rows"] is None else documents_vary(item["rows"])
    mask = DocumentMask(documents_vary(item["segments"]), exchange, rows, cache, item["sharers"])
    return moved.pop("input"), labels.to(device, non_blocking=True), {**moved, "attention_masks": mask}


def grouped(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Micro-batches that go through the model together: those of a pipeline run, or a single one."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def as_tensor(part: Ints | int) -> torch.Tensor:
    """A part of `ContextMask.exchange` as a tensor; a number n becomes an empty one (n, 0)."""
    return on_host(part) if isinstance(part, np.ndarray) else torch.empty((int(part), 0), dtype=torch.int64)


def on_host(values: Ints) -> torch.Tensor:
    """Pins the values, if there is an accelerator, so that copies to it do not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor
