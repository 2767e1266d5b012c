"""Linear layers that torchtitan's `Float8LinearConverter` has multiply in float8, through torchao.

Inputs, weights and gradients are cast to float8 for each product, and its result is of the activations' type;
weights, and what layers keep and send, stay as they are. GPUs of compute capability 8.9 and above have these
products; `emulate` computes them in float32, on any device.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torchtitan.components.quantization import Float8Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear

from wlb_titan.errors import UserError
from wlb_titan.runtime.compat import recipe_of

BLOCK = 16  # elements that a kernel takes at once: sizes of products divide by it
HEAD = "lm_head"


def recipes(model: Decoder.Config) -> dict[str, Any]:
    """torchao's configurations of the layers that multiply in float8, by the layers' names."""
    linear = ((name, recipe_of(layer)) for name, layer, _, _ in model.traverse(Linear.Config))
    return {name: recipe for name, recipe in linear if recipe is not None}


def is_float8(layer: nn.Module | None) -> bool:
    return isinstance(layer, Float8Linear or ())  # None without torchao


def by_kernels(model: Decoder.Config) -> list[str]:
    """Names of the layers whose products need a GPU."""
    return [name for name, recipe in recipes(model).items() if not recipe.emulate]


def shares(model: Decoder.Config) -> tuple[float, float]:
    """Shares of the products of layers and of the head that kernels compute in float8."""
    linear = {name: layer for name, layer, _, _ in model.traverse(Linear.Config)}
    sizes = {name: layer.in_features * layer.out_features for name, layer in linear.items() if name != HEAD}
    fast = by_kernels(model)
    return sum(sizes.get(name, 0) for name in fast) / sum(sizes.values()), float(HEAD in fast)


def multiple_of_tokens(model: Decoder.Config, loss_chunks: int, tensor: int) -> int:
    """What a context-parallel rank's tokens divide by, because gradients of weights add up over the tokens of
    a product: of the head a chunk of the loss, and of experts' gates a tensor-parallel rank's share."""
    found = recipes(model)
    shares = tensor if any(layer.moe is not None for layer in model.layers) else 1
    return BLOCK * math.lcm(loss_chunks if HEAD in found else 1, shares) if found else 1


def check_on_cpu(model: Decoder.Config) -> None:
    if found := by_kernels(model):
        raise UserError(
            f"base: {found[0]} and {len(found) - 1} more multiply in float8, which needs a GPU of compute "
            "capability 8.9 or more, and this job runs on the CPU; for a test derive a base whose "
            "Float8LinearConverter has emulate = True (docs/models.md)."
        )
