"""Attention over segments by torch's varlen FlashAttention, on NVIDIA GPUs.

Its ops are those that `torch.nn.attention.varlen` calls, below its autograd: FlashAttention-2, or what
`torch.nn.attention.activate_flash_attention_impl` has put in its place. Gradients of q, and of keys that
several segments see, are added up in any order, unless torch.use_deterministic_algorithms asks for one that
repeats.
"""

import torch
from torch import Tensor

from .schedule import Schedule
from .segments import Options, Saved, Shape, aligned
from .tiles import Cut


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, D) like q, and log-sum-exp (Nq, Tq) float32, +inf where a query sees no key."""
    tensors, lengths, window = given(q, k, v, schedule, options)
    op = torch.ops.aten._flash_attention_forward.default
    out, lse, *_ = op(*tensors, *lengths, return_debug_mask=False, **window)
    return out, lse.masked_fill_(lse == -torch.inf, torch.inf)  # +inf already by FlashAttention-2


def backward(
    dout: Tensor, dlse: None, saved: Saved, schedule: Schedule, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the output; none of the log-sum-exp."""
    q, k, v, out, lse = saved
    tensors, lengths, window = given(q, k, v, schedule, options)
    no_dropout = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    op = torch.ops.aten._flash_attention_backward.default
    gradients = op(aligned(dout), *tensors, aligned(out), lse, *lengths, *no_dropout, **window)
    return summed(gradients, saved, schedule)


def summed(gradients: tuple, saved: Saved, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by those of what was `given`, added up in float32 where keys were gathered."""
    dq, dk, dv = gradients
    if (rows := schedule.lengths.rows) is not None:
        sums = (x.new_zeros(x.shape, dtype=saved.lse.dtype) for x in (saved.k, saved.v))
        dk, dv = (x.index_add_(0, rows, d.to(x.dtype)) for x, d in zip(sums, (dk, dv), strict=True))
    return dq, dk.to(saved.k.dtype), dv.to(saved.v.dtype)


def cuts(shape: Shape, device: torch.device) -> tuple[Cut, Cut]:
    """FlashAttention-2's at head dim 128."""
    return Cut("queries", 128, 64), Cut("keys", 64, 128)


def given(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[list, tuple, dict]:
    """Tensors; lengths, dropout, and whether it is causal without a window; scale and window."""
    ends_q, ends_k, most_q, most_k, rows = schedule.lengths
    k, v = (x if rows is None else x.index_select(0, rows) for x in (k, v))
    left = -1 if options.reach >= most_k else options.reach - 1
    window = {"scale": options.scale, "window_size_left": left, "window_size_right": 0}
    return [aligned(x) for x in (q, k, v)], (ends_q, ends_k, most_q, most_k, 0.0, left < 0), window
