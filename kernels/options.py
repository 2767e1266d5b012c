"""The options of a call of the op, and what its forward pass leaves for the backward pass."""

import math
from functools import cache
from typing import Any, NamedTuple

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
