"""The op: `varlen_attention`, with its checks, its fake kernel, its gradient, and the choice of what runs it.

It is an op of torch's dispatcher, so torch.compile, selective activation checkpointing (by the overload
`torch.ops.wlb_titan.varlen_attention.default`) and DTensor's local_map see one op, and none of them looks at
what the segments hold: document lengths that change every step recompile nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import implementations
from .options import SCHEMA, Saved, op_arguments, options_of
from .segments import check_sinks, check_tensors


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
    implementation: str = "auto",
    sm_margin: int = 0,
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
    implementation: what computes it, one of implementations.IMPLEMENTATIONS; "auto" chooses.
    sm_margin: multiprocessors left to other kernels, see `options.py`; the result is the same.

    Gradients repeat bit for bit.

    Returns (Tq, Nq, Dv) in the dtype of q, and if return_lse (Nq, Tq) float32, +inf for padding. Softmax and
    sums are computed in float32 (float64 for float64 inputs).

    On CUDA (compute capability 8.0 or later): float16 and bfloat16, D and Dv multiples of 8 up to 256. On the
    CPU: any floating-point dtype and any head dims. All numbers must be finite, also those of padding: a
    kernel may multiply them by zero.

    Raises ValueError, before anything is launched, if shapes, dtypes or devices do not fit together or are
    not supported, or if a segment is out of range, overlaps another, or has fewer keys than queries though
    attention is causal.
    """
    arguments = op_arguments(
        q,
        scale=scale,
        causal=causal,
        window=window,
        implementation=implementation,
        sm_margin=sm_margin,
    )
    out, lse = torch.ops.wlb_titan.varlen_attention.default(q, k, v, segments, *arguments)
    if sinks is not None:
        check_sinks(sinks, q)
        # exp(lse) grows by exp(sink): the output fades by what share of the sum is left to the keys.
        over = lse - sinks.to(lse.dtype).unsqueeze(1)
        out = (out * torch.sigmoid(over).T.unsqueeze(2)).to(out.dtype)
        lse = lse + torch.nn.functional.softplus(-over)
    return (out, lse) if return_lse else out


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, *arguments: Any
) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v, segments, scale)
    return implementations.forward(q, k, v, segments, options_of(scale, *arguments))


def _forward_fake(q, k, v, segments, scale, *arguments):
    check_tensors(q, k, v, segments, scale)
    options_of(scale, *arguments)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), lse


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return implementations.backward(dout, dlse, Saved(q, k, v, out, lse), segments, options_of(*arguments))


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


_library = torch.library.Library("wlb_titan", "FRAGMENT")


def define(name: str, arguments: str, returns: str, compute: Callable, fake: Callable) -> None:
    """Makes a function the op wlb_titan::name, by what it computes and by what shapes that has.

    By the dispatcher itself and not by `torch.library.custom_op`, whose checks of every call cost as much
    host time as all else between a model and its kernels.
    """
    _library.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"wlb_titan::{name}", fake, lib=_library)


def differentiate(name: str, backward: Callable, save: Callable) -> None:
    """Makes `backward` the gradient of the op wlb_titan::name, from what `save` keeps."""
    torch.library.register_autograd(f"wlb_titan::{name}", backward, setup_context=save, lib=_library)


define(
    "varlen_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor segments, {SCHEMA}",
    "(Tensor, Tensor)",
    _forward,
    _forward_fake,
)
define(
    "varlen_attention_backward",
    "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor segments, "
    + SCHEMA,
    "(Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
differentiate("varlen_attention", _differentiate, _save)
