"""What attention is measured and checked on: the shape of a layer, and random tensors of it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Heads and head dims of one attention layer."""

    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        return f"D {dims}, {self.q_heads}:{self.kv_heads} heads"


def make_inputs(
    segments: Tensor, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q, k, v and output gradient, as many tokens as the segments reach."""
    q_start, q_len, kv_start, kv_len = segments.T
    q_tokens, kv_tokens = int((q_start + q_len).max()), int((kv_start + kv_len).max())
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device, dtype=dtype)

    return (
        normal(q_tokens, shape.q_heads, shape.dim),
        normal(kv_tokens, shape.kv_heads, shape.dim),
        normal(kv_tokens, shape.kv_heads, shape.v_dim),
        normal(q_tokens, shape.q_heads, shape.v_dim),
    )


def units(device: torch.device) -> int:
    """Programs that run at a time: a GPU's multiprocessors. On a CPU the reference runs block after block."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
