"""Rotary positions that compiled code fuses with what stands around them.

torchtitan's ComplexRoPE turns neighbouring pairs of a head's elements as complex numbers, with which Inductor
fuses nothing: compiled, the conversions and the product are kernels of their own behind the split of QKV, 6 %
of the device time of a 550M Llama's step at 65,536 tokens on an H100. Here compiled code turns the pairs in real
arithmetic, forward and backward in one kernel with split and casts. Uncompiled code keeps the complex product,
which is three kernels where real arithmetic would be six.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE


class PairwiseRoPE(ComplexRoPE):
    """ComplexRoPE with a table of real numbers: float32 (positions, head dim), each cosine beside its sine."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        return torch.view_as_real(super()._precompute_cache()).flatten(1)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Turns queries and keys.

        Args:
            query, key: (1, tokens, heads, head dim).
            rope_cache: float32 (1, tokens, 1, head dim), the table's rows of their positions.
        """
        table = rope_cache.unflatten(-1, (-1, 2))
        if not torch.compiler.is_compiling():
            return ComplexRoPE.apply_rotary_emb(query, key, torch.view_as_complex(table))
        return _turned(query, table), _turned(key, table)


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """(a, b) of each pair of x to (a cos - b sin, b cos + a sin), by float32 as a complex product."""
    cos, sin = table[..., :1], table[..., 1:]
    sign = torch.arange(-1, 2, 2, device=x.device)
    pairs = x.float().unflatten(-1, (-1, 2))
    return (pairs * cos + pairs.flip(-1) * (sin * sign)).flatten(-2).type_as(x)
