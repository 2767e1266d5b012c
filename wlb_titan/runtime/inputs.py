"""From a packed sequence to what one rank trains on: its share of the tokens, and its attention mask.

`rank_item` runs in the loader's thread and makes everything on the host, in pinned memory where there is an
accelerator. `to_device` runs between two micro-batches and only starts copies: nothing there waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wlb_titan import context
from wlb_titan.runtime.attention import DocumentMask
from wlb_titan.runtime.compile import documents_vary

Item = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A micro-batch of one rank on the host: "input", "positions", "segments", "key_order"; and its labels."""


def rank_item(
    tokens: NDArray[np.int64],
    labels: NDArray[np.int64],
    positions: NDArray[np.int64],
    lengths: NDArray[np.int64],
    shards: context.Sharding | None,
    rank: int,
) -> Item:
    """Cuts a context-parallel rank's share out of a micro-batch and makes what its attention mask needs.

    Args:
        tokens, labels, positions: int64 (L,).
        lengths: int64 (n,), tokens of the documents, in their order; what is left of L is padding.
        shards: what each context-parallel rank holds; None without context parallelism.
        rank: context-parallel rank.

    Returns:
        ({"input", "positions", "segments", "key_order"}, labels): tokens, positions and labels int64
        (1, L / ranks), segments int32 (S, 4), key_order int64 (L,) and only with context parallelism.
    """
    extra = {}
    if shards is None:
        segments = context.segments(context.whole(lengths), lengths)
    else:
        order = context.sequence_positions(shards, lengths, len(tokens))
        tokens, labels, positions = tokens[order[rank]], labels[order[rank]], positions[order[rank]]
        key_order = np.empty(order.size, dtype=np.int64)
        key_order[order.ravel()] = np.arange(order.size)  # the inverse of a permutation
        extra["key_order"] = _on_host(key_order)
        segments = context.segments(shards[rank], lengths)
    return {
        "input": _on_host(tokens).unsqueeze(0),
        "positions": _on_host(positions).unsqueeze(0),
        "segments": torch.from_numpy(segments),  # the op reads them on the CPU
        **extra,
    }, _on_host(labels).unsqueeze(0)


def to_device(
    item: dict[str, torch.Tensor], labels: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Starts the copies of an item to the device.

    Returns:
        inputs and labels, and what else the model takes: positions, and attention_masks, a DocumentMask.
    """
    moved = {
        name: tensor.to(device, non_blocking=True) for name, tensor in item.items() if name != "segments"
    }
    mask = DocumentMask(documents_vary(item["segments"]), moved.get("key_order"))
    extra = {"positions": moved["positions"], "attention_masks": mask}
    return moved["input"], labels.to(device, non_blocking=True), extra


def _on_host(values: NDArray[np.int64]) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor
