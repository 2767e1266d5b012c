"""The options of a call of the op, what its forward pass leaves for the backward pass, the heads of a layer,
and random tensors of these on which layers are measured and checked."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .segments import CAUSAL, Visibility


class Options(NamedTuple):
    """The arguments of `varlen_attention` that say what is computed, and by what.

    scale: positive factor on the scores. visibility: which keys of its segment a query sees.
    implementation: one of implementations.IMPLEMENTATIONS. sm_margin: multiprocessors that Gluon's kernels
    leave to others, such as NCCL's; Triton's programs end one by one and let others in by themselves.
    """

    scale: float
    visibility: Visibility = CAUSAL
    implementation: str = "auto"
    sm_margin: int = 0


SCHEMA = "float scale, bool causal, int? window, str implementation, int sm_margin"
"""`Options` among the arguments of an op."""


def op_arguments(
    q: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    implementation: str = "auto",
    sm_margin: int = 0,
) -> tuple[Any, ...]:
    """Keywords of `varlen_attention` as the arguments of SCHEMA, for every op that has these."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return scale, causal, window, implementation, sm_margin


@cache
def options_of(
    scale: float, causal: bool, window: int | None, implementation: str, sm_margin: int
) -> Options:
    """The options as an op has them."""
    return Options(scale, Visibility(causal, window), implementation, sm_margin)


class Saved(NamedTuple):
    """Inputs and outputs of a forward pass, as its backward pass needs them.

    q: (Tq, Nq, D); k: (Tk, Nkv, D); v: (Tk, Nkv, Dv); out: (Tq, Nq, Dv); lse: (Nq, Tq).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


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
