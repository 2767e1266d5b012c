"""What a call of the op is asked to compute, and what its forward pass leaves for the backward pass."""

from typing import NamedTuple

from torch import Tensor

from .segments import CAUSAL, Visibility


class Options(NamedTuple):
    """The arguments of `varlen_attention` that say what is computed.

    scale: positive factor on the scores. visibility: which keys of its segment a query sees. deterministic:
    whether gradients repeat bit for bit.
    """

    scale: float
    visibility: Visibility = CAUSAL
    deterministic: bool = True


class Saved(NamedTuple):
    """Inputs and outputs of a forward pass, as its backward pass needs them.

    q: (Tq, Nq, D); k: (Tk, Nkv, D); v: (Tk, Nkv, Dv); out: (Tq, Nq, Dv); lse: (Nq, Tq).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
