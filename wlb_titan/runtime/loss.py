"""Labels, and the loss of labels that weigh differently.

torchtitan's loss is a sum over a micro-batch's labels, which the trainer divides by their number in the step
on all ranks. With `wlb.loss_weight = "conversation"` a label weighs one over the labels of its document, and
the sum is divided by the weights of the step. Weights travel with labels: int64 (..., 2), label and the bits
of its weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torchtitan.components.loss import (
    IGNORE_INDEX,
    BaseLoss,
    ChunkedLossWrapper,
    CrossEntropyLoss,
    compute_logprobs,
)
from torchtitan.config import CompileConfig

from wlb_titan.arrays import Floats, Ints
from wlb_titan.errors import UserError


def with_weights(labels: Ints, weights: Floats) -> Ints:
    """int64 (L, 2), labels and their weights, of int64 and float64 (L,)."""
    return np.stack([labels, weights.view(np.int64)], axis=-1)


def total_weight(labels: torch.Tensor) -> float:
    """The weight of all labels: one each for (1, L); for (1, L, 2) as of `with_weights`."""
    if labels.dim() == 2:
        return int((labels != IGNORE_INDEX).sum())
    return float(labels[..., 1].view(torch.float64).sum())


class WeightedCrossEntropyLoss(CrossEntropyLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        super().__init__(config)
        self.fn = weighted_cross_entropy
        self._maybe_compile(compile_config)


def weighted_cross_entropy(
    pred: torch.Tensor, labels: torch.Tensor, *, global_vocab_size: int | None = None
) -> torch.Tensor:
    """The weighted sum over the labels, int64 (1, L, 2) as of `with_weights`; `pred`: (1, L, vocabulary)
    logits, or this tensor-parallel rank's part of the vocabulary."""
    weights = labels[..., 1].view(torch.float64).float()
    return -(compute_logprobs(pred, labels[..., 0].contiguous()) * weights).sum()


def weighted(loss: BaseLoss.Config) -> BaseLoss.Config:
    if isinstance(loss, ChunkedLossWrapper.Config):
        return replace(loss, loss_fn=weighted(loss.loss_fn))
    if type(loss) is not CrossEntropyLoss.Config:
        raise UserError(
            f'wlb.loss_weight: "conversation" weighs the labels of torchtitan\'s cross-entropy; this loss is '
            f'{type(loss).__qualname__}. Use "token".'
        )
    return WeightedCrossEntropyLoss.Config(global_vocab_size=loss.global_vocab_size)
