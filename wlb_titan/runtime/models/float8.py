"""Linear layers that torchtitan's `Float8LinearConverter` has multiply in float8, through torchao: on GPUs of
compute capability 8.9 and more, or emulated in float32. Weights, and what layers send, stay as they are."""

from __future__ import annotations

import math
from typing import Any

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import Linear

from wlb_titan.errors import UserError
from wlb_titan.runtime.compat import recipe_of

BLOCK = 16  # by which kernels need the sizes of a product to divide
HEAD = "lm_head"


def recipes(model: Decoder.Config) -> dict[str, Any]:
    """torchao's configurations of the layers that multiply in float8, by the layers' names."""
    linear = ((name, recipe_of(layer)) for name, layer, _, _ in model.traverse(Linear.Config))
    return {name: recipe for name, recipe in linear if recipe is not None}


def by_kernels(model: Decoder.Config) -> list[str]:
    return [name for name, recipe in recipes(model).items() if not recipe.emulate]


def shares(model: Decoder.Config) -> tuple[float, float]:
    """Shares of the products of layers and of the head that kernels compute in float8."""
    linear, fast = model.traverse(Linear.Config), by_kernels(model)
    sizes = {name: layer.in_features * layer.out_features for name, layer, _, _ in linear if name != HEAD}
    return sum(sizes.get(name, 0) for name in fast) / sum(sizes.values()), float(HEAD in fast)


def multiple_of_tokens(model: Decoder.Config, loss_chunks: int, tensor: int) -> int:
    """By what a context-parallel rank's tokens divide: into chunks, and into blocks, over which gradients of
    weights add up: the head's in each chunk, those of experts' gates on each tensor-parallel rank."""
    if not (found := recipes(model)):
        return loss_chunks
    shared = tensor if any(layer.moe is not None for layer in model.layers) else 1
    return math.lcm(loss_chunks, BLOCK * math.lcm(loss_chunks if HEAD in found else 1, shared))


def check_on_cpu(model: Decoder.Config) -> None:
    if found := by_kernels(model):
        raise UserError(
            f"base: {found[0]} and {len(found) - 1} more multiply in float8, which needs a GPU of compute "
            "capability 8.9; on the CPU take a base whose Float8LinearConverter has emulate = True."
        )
