"""How evenly experts get their tokens: measured in logged steps, by the counters of torchtitan's routers.

In each layer all ranks wait for the one whose experts got most tokens, in both exchanges. So its share over
the mean is a factor on the time of routed tokens, and on their memory on that rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum_tensor
from torchtitan.models.common.moe import MoE
from torchtitan.tools.logging import logger, warn_once

from wlb_titan.cost.models import ModelShape

UNEVEN = 1.5  # times the mean, from which on a run warns


class ExpertLoad:
    """The tokens that each expert of a `model` got in a step."""

    def __init__(
        self, model: ModelShape, model_parts: Sequence[nn.Module], dims: ParallelDims, device: torch.device
    ) -> None:
        self._model, self._dims, self._device = model, dims, device
        modules = [pair for part in model_parts for pair in part.named_modules() if isinstance(pair[1], MoE)]
        self._numbers = [int(name.split(".")[1]) for name, _ in modules]  # of "layers.3. ... .moe"
        self._moes = [module for _, module in modules]

    def begin(self) -> None:
        self._before = self._counts()

    def end(self) -> None:
        """Call it before the optimizer's step, in which torchtitan may set the counters to zero."""
        self._routed = self._counts() - self._before

    def figures(self) -> dict[str, float]:
        """`busiest_expert` and `busiest_expert_rank` of the step (docs/metrics.md), where the model has
        experts; every rank calls it."""
        if not self._model.experts:
            return {}
        dims, routed = self._dims, self._routed
        ratios = torch.ones(2, self._model.layers, device=self._device)
        if self._moes:
            if dims.ep_enabled:
                each = dist_sum_tensor(routed, dims.get_mesh("ep")).unflatten(1, (dims.ep, -1)).sum(2)
                ratios[1, self._numbers] = each.amax(1) / each.mean(1)
            if dims.ep_enabled and dims.tp_enabled:  # which then share a sequence's tokens
                routed = dist_sum_tensor(routed, dims.get_mesh("tp"))
            routed = dist_sum_tensor(routed, dims.get_optional_mesh("loss"))
            ratios[0, self._numbers] = routed.amax(1) / routed.mean(1)
        dist.all_reduce(ratios, op=dist.ReduceOp.MAX)
        expert, rank = ratios[0].max().item(), ratios[1].mean().item()
        if rank >= UNEVEN:
            warn_once(
                logger,
                f"In the mean layer the busiest rank's experts get over {UNEVEN:g} times their share of the "
                "tokens, and all ranks wait for it in each layer (busiest_expert_rank in docs/metrics.md).",
            )
        return {"busiest_expert": expert, "busiest_expert_rank": rank}

    def _counts(self) -> torch.Tensor:
        """float32 (layers with experts, experts), of this rank's tokens, since some time."""
        counters = [moe.tokens_per_expert_E for moe in self._moes]
        local = [c.to_local() if isinstance(c, DTensor) else c for c in counters]
        return torch.stack(local) if local else torch.zeros(0)
