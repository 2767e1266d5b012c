"""The op: `varlen_attention`, with its checks, its fake kernel, its gradient, and the choice of what runs it.

It is a `torch.library` custom op, so torch.compile, selective activation checkpointing (by the overload
`torch.ops.wlb_titan.varlen_attention.default`) and DTensor's local_map see one op, and none of them looks at
what the segments hold: document lengths that change every step recompile nothing.
"""

import math

import torch
from torch import Tensor

from . import dispatch
from .segments import check_tensors


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    *,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention of packed documents, or of one context-parallel rank's share of them.

    q: (Tq, Nq, D); k: (Tk, Nkv, D); v: (Tk, Nkv, Dv), with Nq a multiple of Nkv (grouped-query attention).
    segments: int32 (S, 4) on the CPU, columns q_start, q_len, kv_start, kv_len: query i of a segment attends
    to keys kv_start ... kv_start + kv_len - q_len + i (see `segments.py`). Query ranges must not overlap;
    rows of q in no segment are padding: they give zeros, and no gradient flows from them. Key ranges may
    overlap.
    scale: positive factor on the scores, 1 / sqrt(D) if None.
    implementation: what computes it, one of dispatch.IMPLEMENTATIONS; "auto" chooses.

    Returns (Tq, Nq, Dv) in the dtype of q. Softmax and sums are computed in float32 (float64 for float64
    inputs). The gradients of q, k and v are deterministic, except for implementation="triton_fused_dq".

    On CUDA (compute capability 8.0 or later): float16 and bfloat16, D and Dv multiples of 8 up to 256. On the
    CPU: any floating-point dtype and any head dims. All numbers must be finite, also those of padding: a
    kernel may multiply them by zero.

    Raises ValueError, before anything is launched, if shapes, dtypes or devices do not fit together or are
    not supported, or if a segment is out of range, has fewer keys than queries, or overlaps another.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    return torch.ops.wlb_titan.varlen_attention.default(q, k, v, segments, scale, implementation)[0]


@torch.library.custom_op("wlb_titan::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, implementation: str
) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v, segments, scale)
    return dispatch.forward(q, k, v, segments, scale, implementation)


@_forward.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, implementation: str
) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v, segments, scale)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), lse


@torch.library.custom_op("wlb_titan::varlen_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return dispatch.backward(dout, q, k, v, out, lse, segments, scale, implementation)


@_backward.register_fake
def _backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    q, k, v, segments, ctx.scale, ctx.implementation = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, segments)


def _differentiate(ctx, dout: Tensor, _dlse) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, segments = ctx.saved_tensors
    backward = torch.ops.wlb_titan.varlen_attention_backward.default
    dq, dk, dv = backward(dout, q, k, v, out, lse, segments, ctx.scale, ctx.implementation)
    return dq, dk, dv, None, None, None


torch.library.register_autograd("wlb_titan::varlen_attention", _differentiate, setup_context=_save)
