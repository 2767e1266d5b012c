"""The shape of a model, and the sizes of the paper's Table 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_titan.arrays import Floats

Windows = tuple[tuple[int, float], ...]
"""Sliding windows, in keys, and the share of layers that has each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A LLaMA-style decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int  # inner width of the gated MLP, or of all experts that a token visits
    vocabulary: int
    unvisited_weights: int = 0  # of one layer's experts that a token does not visit
    experts: int = 0  # routed experts of a layer that has them; 0 in a dense model
    routed_width: int = 0  # the part of `feed_forward` in routed experts, which expert parallelism spreads
    visits: float = 0.0  # routed experts that a token visits; like `routed_width`, a mean over all layers
    v_head_dim: int | None = None  # of values; None: `head_dim`
    projections: int | None = None  # weights of a layer's attention, if it is latent; None: from the shape
    windows: tuple[int | None, ...] = ()
    """By layer the keys that a query sees, with its own; None: all before it. Empty: no layer has any."""

    tied: bool = False  # embedding and head are one table
    qk_norm: bool = False  # queries and keys are normalized before they are rotated
    frozen: bool = False  # only adapters are trained, whose products are too small to count

    @property
    def head_dims(self) -> int:
        """Head dim of queries and keys plus that of values."""
        return self.head_dim + (self.v_head_dim or self.head_dim)

    @property
    def attention_weights(self) -> int:
        if self.projections is not None:
            return self.projections
        return self.hidden * self.head_dims * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one layer, visited or not."""
        return 3 * self.hidden * self.routed_width + self.unvisited_weights

    @property
    def linear_weights(self) -> int:
        """Weights that every token is multiplied with; not the embedding, which is looked up."""
        layer = self.attention_weights + 3 * self.hidden * self.feed_forward
        return self.layers * layer + self.hidden * self.vocabulary

    def squares(self, lengths: NDArray[Any]) -> Floats:
        """Twice the pairs of query and key in all layers, shaped like `lengths`: in each d^2 for a document
        of d tokens, or w (2 d - w) under a window of w < d keys."""
        d = np.asarray(lengths, dtype=np.float64)
        total = np.zeros_like(d)
        for window, layers in Counter(self.windows or [None] * self.layers).items():
            seen = d if window is None else np.minimum(d, window)
            total += layers * seen * (2 * d - seen)
        return total

    def window_shares(self, first: int, layers: int) -> Windows:
        """Of these layers alone."""
        found = Counter(self.windows[first : first + layers])
        return tuple((window, count / layers) for window, count in found.items() if window is not None)

    def flops(self, lengths: NDArray[Any]) -> float:
        """FLOPs of forward and backward passes over documents of these lengths, without recomputation and
        masked pairs of tokens, so that MFU rewards no work on those. Frozen weights have no gradients."""
        d = np.asarray(lengths, dtype=np.float64)
        linear = 2.0 * self.linear_weights * d.sum()
        attention = self.heads * self.head_dims * self.squares(d).sum()
        return float((3.0 - self.frozen) * linear + 3.0 * attention)


def layer_parameters(model: ModelShape) -> int:
    mlp = 3 * model.hidden * model.feed_forward
    return model.attention_weights + mlp + 2 * model.hidden + model.unvisited_weights


def rank_parameters(model: ModelShape, layers: Sequence[int], stages: Sequence[int]) -> int:
    """Weights of some stages, with embedding and head where they have them."""
    first, last = 0 in stages, len(layers) - 1 in stages
    tables = 1 if first and last and model.tied else first + last
    ends = tables * model.hidden * model.vocabulary + last * model.hidden
    return sum(layers[stage] for stage in stages) * layer_parameters(model) + ends


_TABLE_1 = {  # layers, heads, inner width of the MLP
    "550M": (16, 12, 4096),
    "7B": (32, 32, 11008),
    "30B": (64, 48, 16384),
    "70B": (86, 64, 22016),
}
PAPER_MODELS = {
    name: ModelShape(
        layers=layers, hidden=128 * n, heads=n, kv_heads=n, head_dim=128, feed_forward=width, vocabulary=32000
    )
    for name, (layers, n, width) in _TABLE_1.items()
}
"""The sizes of the paper's Table 1. The 7B model is LLaMA2; the paper says of the others only that layers and
width are scaled in proportion, so these are shapes of that size."""
