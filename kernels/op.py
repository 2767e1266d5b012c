"""The op: `varlen_attention`, with its checks, its fake kernel, its gradient, and the calls of what runs it.

It is an op of torch's dispatcher, so torch.compile, selective activation checkpointing (by the overload
`torch.ops.wlb_titan.varlen_attention.default`) and DTensor's local_map see one op, and none of them looks at
what the segments hold: document lengths that change every step recompile nothing.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .implementations import REFERENCE, chosen, device_of, load
from .schedule import schedule_of
from .segments import Options, Saved, check_tensors

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed documents, or of one context-parallel rank's share of them.

    q: (Tq, Nq, D); k: (Tk, Nkv, D); v: (Tk, Nkv, Dv), with Nq a multiple of Nkv (grouped-query attention).
    segments: int32 (S, 4) on the CPU, columns q_start, q_len, kv_start, kv_len: query i of a segment attends
    to keys kv_start ... kv_start + kv_len - q_len + i (see `segments.py`). Query ranges must not overlap;
    rows of q in no segment are padding: they give zeros and no gradient. Key ranges may overlap.
    scale: positive factor on the scores, 1 / sqrt(D) if None.
    window: a query sees the last `window` of those, its own included (FlashAttention's left window + 1).
    return_lse: also return the log-sum-exp of the scores (natural logarithm); differentiable. With sinks, a
    logit a head that takes part in the softmax without a value, the output is out * sigmoid(lse - sink).
    implementation: one of implementations.IMPLEMENTATIONS.
    sm_margin: multiprocessors left to other kernels, see `segments.Options`; the result is the same.

    Returns (Tq, Nq, Dv) in the dtype of q, and if return_lse (Nq, Tq) float32, +inf for padding. Softmax and
    sums are computed in float32 (float64 for float64 inputs). Gradients repeat bit for bit, those of "torch",
    which "auto" may take, only if torch.use_deterministic_algorithms is on.

    On CUDA (compute capability 8.0 or later): float16 and bfloat16, D and Dv multiples of 8 up to 256. On the
    CPU: any floating-point dtype and any head dims. q, k and v have one dtype, and autocast converts none.
    All numbers must be finite, also those of padding: a kernel may multiply them by zero.

    Raises ValueError, before anything is launched, for inputs that do not fit together or are not supported.
    """
    arguments = scale_of(q, scale), window, implementation, sm_margin
    out, lse = torch.ops.wlb_titan.varlen_attention.default(q, k, v, segments, *arguments)
    return (out, lse) if return_lse else out


OPTIONS = "float scale, int? window, str implementation, int sm_margin"  # `Options`, in a schema


def scale_of(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


_library = torch.library.Library("wlb_titan", "FRAGMENT")


def define_attention(name: str, tensors: Sequence[str], forward: Callable, backward: Callable) -> None:
    """Makes functions the op wlb_titan::name and its gradient, wlb_titan::name_backward.

    Not by `torch.library.custom_op`, whose checks of every call cost as much host time as all else between a
    model and its kernels.

    tensors: names of those besides q, k and v; the first are the segments. forward: from q, k, v, these and
    OPTIONS to output and log-sum-exp. backward: from dout, dlse (or None), q, k, v, output, log-sum-exp,
    these and OPTIONS to the gradients of q, k and v.
    """
    others = "".join(f"Tensor {tensor}, " for tensor in tensors) + OPTIONS
    inputs, outputs = "Tensor q, Tensor k, Tensor v", "Tensor out, Tensor lse"
    schemas = {
        name: f"({inputs}, {others}) -> (Tensor, Tensor)",
        f"{name}_backward": f"(Tensor dout, Tensor? dlse, {inputs}, {outputs}, {others}) "
        "-> (Tensor, Tensor, Tensor)",
    }
    functions = (forward, _outputs), (backward, _gradients)
    for (op, schema), (compute, fake) in zip(schemas.items(), functions, strict=True):
        _library.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(op, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"wlb_titan::{op}", fake, lib=_library)

    def save(ctx, inputs, output) -> None:
        q, k, v, *rest = inputs
        ctx.set_materialize_grads(False)  # most callers have no gradient of the log-sum-exp
        ctx.save_for_backward(q, k, v, *output, *rest[: len(tensors)])
        ctx.options = rest[len(tensors) :]

    def differentiate(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[3])
        op = getattr(torch.ops.wlb_titan, f"{name}_backward").default
        return *op(dout, dlse, *saved, *ctx.options), *[None] * (len(tensors) + len(ctx.options))

    def refuse(ctx, *gradients: Tensor | None) -> None:
        raise NotImplementedError(f"wlb_titan::{name} has no second derivative: its gradient is a kernel's")

    torch.library.register_autograd(f"wlb_titan::{name}", differentiate, setup_context=save, lib=_library)
    torch.library.register_autograd(f"wlb_titan::{name}_backward", refuse, lib=_library)


def _outputs(q, k, v, segments, *others):
    check_tensors(q, k, v, segments, Options(*others[-len(Options._fields) :]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), lse


def _gradients(dout, dlse, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    options = Options(*arguments)
    check_tensors(q, k, v, segments, options)
    return forward(q, k, v, segments, options)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Tensor, *arguments: Any,
) -> Gradients:  # fmt: skip
    return backward(dout, dlse, Saved(q, k, v, out, lse), segments, Options(*arguments))


define_attention("varlen_attention", ("segments",), _forward, _backward)


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (Nq, Tq), for tensors that segments.check_tensors has accepted."""
    kernels = load(taken("forward", q, v, options))
    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.reach)
        return kernels.forward(q, k, v, schedule, options)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, segments: Tensor, options: Options, divided: Any = None
) -> Gradients:
    """Gradients, given those of the output and, unless None, of the log-sum-exp. divided: one of the
    implementation's divisions of the work, None for the one that it chooses."""
    q, k, v, _, _ = saved
    kernels = load(taken("backward", q, v, options, dlse is not None))
    with current(q.device):
        schedule = schedule_of(segments, q.shape[0], k.shape[0], q.device, options.reach)
        given = dout, dlse, saved, schedule, options
        return kernels.backward(*given) if divided is None else kernels.backward(*given, divided)


def taken(which: str, q: Tensor, v: Tensor, options: Options, lse_gradient: bool = False) -> str:
    """The implementation that computes a pass, "forward" or "backward"."""
    call = (q.shape[2], v.shape[2]), q.dtype, device_of(q.device), options.window is not None, lse_gradient
    name = chosen(which, options.implementation, *call)
    return name if q.numel() and v.numel() else REFERENCE  # there is nothing to launch


def current(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one, on which Triton launches, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
