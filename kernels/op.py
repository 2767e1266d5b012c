"""The op: `varlen_attention`, with its checks, its fake kernel, its gradient, and the choice of what runs it.

It is a `torch.library` custom op, so torch.compile, selective activation checkpointing (by the overload
`torch.ops.wlb_titan.varlen_attention.default`) and DTensor's local_map see one op, and none of them looks at
what the segments hold: document lengths that change every step recompile nothing.
"""

import math

import torch
from torch import Tensor

from . import dispatch
from .options import Options, Saved
from .segments import Visibility, check_sinks, check_tensors


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed documents, or of one context-parallel rank's share of them.

    q: (Tq, Nq, D); k: (Tk, Nkv, D); v: (Tk, Nkv, Dv), with Nq a multiple of Nkv (grouped-query attention).
    segments: int32 (S, 4) on the CPU, columns q_start, q_len, kv_start, kv_len: query i of a segment attends
    to keys kv_start ... kv_start + kv_len - q_len + i (see `segments.py`). Query ranges must not overlap;
    rows of q in no segment are padding: they give zeros, and no gradient flows from them. Key ranges may
    overlap.
    scale: positive factor on the scores, 1 / sqrt(D) if None.
    causal: if not, every query sees all keys of its segment, which may then have fewer keys than queries.
    window: sees only the last `window` keys of those, its own included (FlashAttention's left window + 1).
    sinks: (Nq,) floating point, one logit a head that takes part in the softmax without a value (gpt-oss);
    differentiable.
    return_lse: give the log-sum-exp of the scores (natural logarithm, sinks included) too; differentiable.
    deterministic: whether gradients repeat bit for bit. Only "gluon" is any faster without.
    implementation: what computes it, one of dispatch.IMPLEMENTATIONS; "auto" chooses.

    Returns (Tq, Nq, Dv) in the dtype of q, and if return_lse (Nq, Tq) float32, +inf for padding. Softmax and
    sums are computed in float32 (float64 for float64 inputs).

    On CUDA (compute capability 8.0 or later): float16 and bfloat16, D and Dv multiples of 8 up to 256. On the
    CPU: any floating-point dtype and any head dims. All numbers must be finite, also those of padding: a
    kernel may multiply them by zero.

    Raises ValueError, before anything is launched, if shapes, dtypes or devices do not fit together or are
    not supported, or if a segment is out of range, overlaps another, or has fewer keys than queries though
    attention is causal.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    out, lse = torch.ops.wlb_titan.varlen_attention.default(
        q, k, v, segments, scale, causal, window, deterministic, implementation
    )
    if sinks is not None:
        check_sinks(sinks, q)
        # exp(lse) grows by exp(sink): the output fades by what share of the sum is left to the keys.
        over = lse - sinks.to(lse.dtype).unsqueeze(1)
        out = (out * torch.sigmoid(over).T.unsqueeze(2)).to(out.dtype)
        lse = lse + torch.nn.functional.softplus(-over)
    return (out, lse) if return_lse else out


@torch.library.custom_op("wlb_titan::varlen_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    deterministic: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v, segments, scale)
    options = Options(scale, Visibility(causal, window), deterministic)
    return dispatch.forward(q, k, v, segments, options, implementation)


@_forward.register_fake
def _forward_fake(q, k, v, segments, scale, causal, window, deterministic, implementation):
    check_tensors(q, k, v, segments, scale)
    Visibility(causal, window)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), lse


@torch.library.custom_op("wlb_titan::varlen_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    deterministic: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(scale, Visibility(causal, window), deterministic)
    return dispatch.backward(dout, dlse, Saved(q, k, v, out, lse), segments, options, implementation)


@_backward.register_fake
def _backward_fake(dout, dlse, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    q, k, v, segments, *ctx.options = inputs
    ctx.set_materialize_grads(False)  # most callers have no gradient of the log-sum-exp
    ctx.save_for_backward(q, k, v, *output, segments)


def _differentiate(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, segments = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    backward = torch.ops.wlb_titan.varlen_attention_backward.default
    gradients = backward(dout, dlse, q, k, v, out, lse, segments, *ctx.options)
    return *gradients, None, *[None] * len(ctx.options)


torch.library.register_autograd("wlb_titan::varlen_attention", _differentiate, setup_context=_save)
