"""Attention over segments by torch's own FlashAttention: on NVIDIA GPUs its varlen kernels, on CPUs torch_cpu.

Segments become cumulative lengths (lengths.py). The ops are those that `torch.nn.attention.varlen` calls for
FlashAttention, below its autograd: FlashAttention-2, or what `torch.nn.attention.activate_flash_attention_impl`
has put in its place. Gradients of q are added up in any order, unless torch.use_deterministic_algorithms asks
for one that repeats.
"""

import torch
from torch import Tensor

from . import torch_cpu
from .lengths import Lengths
from .schedule import Schedule
from .segments import Options, Saved, Shape, aligned
from .tiles import Cut


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, D) like q, and log-sum-exp (Nq, Tq) float32, +inf where a query sees no key."""
    if q.device.type == "cpu":
        return torch_cpu.forward(q, k, v, schedule, options)
    return varlen_forward(q, k, v, schedule.lengths, options)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the output; none of the log-sum-exp."""
    assert dlse is None, "the log-sum-exp has no gradient here"
    if dout.device.type == "cpu":
        return torch_cpu.backward(dout, saved, schedule, options)
    return varlen_backward(dout, saved, schedule.lengths, options)


def cuts(shape: Shape, device: torch.device) -> tuple[Cut, Cut]:
    """FlashAttention-2's tiles at head dim 128."""
    return Cut("queries", 128, 64), Cut("keys", 64, 128)


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> tuple[Tensor, Tensor]:
    """`forward` by the varlen op."""
    q, k, v = aligned(q), aligned(lengths.gathered(k)), aligned(lengths.gathered(v))
    sizes, window = _arguments(lengths, options)
    op = torch.ops.aten._flash_attention_forward.default
    out, lse, *_ = op(q, k, v, *sizes, return_debug_mask=False, **window)
    # FlashAttention-2 gives a sequence without keys +inf, its successors -inf.
    return out, lse.index_fill_(1, lengths.padding, torch.inf)


def varlen_backward(
    dout: Tensor, saved: Saved, lengths: Lengths, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` by the varlen op."""
    q, k, v, out, lse = saved
    dout, q, out = aligned(dout), aligned(q), aligned(out)
    keys, values = aligned(lengths.gathered(k)), aligned(lengths.gathered(v))
    sizes, window = _arguments(lengths, options)
    no_dropout = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    op = torch.ops.aten._flash_attention_backward.default
    dq, dk, dv = op(dout, q, keys, values, out, lse, *sizes, *no_dropout, **window)
    return dq, lengths.summed(dk, k), lengths.summed(dv, v)


def _arguments(lengths: Lengths, options: Options) -> tuple[tuple, dict]:
    """Cumulative and longest lengths, dropout and whether it is causal without a window; scale and window."""
    left = -1 if options.reach >= lengths.most_k else options.reach - 1
    sizes = lengths.q, lengths.k, lengths.most_q, lengths.most_k, 0.0, left < 0
    return sizes, {"scale": options.scale, "window_size_left": left, "window_size_right": 0}
