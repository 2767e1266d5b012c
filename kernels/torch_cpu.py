"""Attention over segments by torch's FlashAttention of CPUs, in float32, in half the time of the reference.

torch's kernel is causal from the first key on. So queries that begin behind their first key, as those of a
slice or a chunk do, see two parts: the keys before theirs, unmasked, and theirs, causal. The log-sum-exps
join both outputs, and the backward of each part takes the joined ones.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .reference import cuts as cuts
from .schedule import Schedule
from .segments import Options, Saved


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, D) like q, and log-sum-exp (Nq, Tq) float32, +inf where a query sees no key."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q_, k_, v_ = (_by_head(x) for x in (q, k, v))
    out, lse = torch.zeros_like(q_), q_.new_full(q_.shape[:3], -torch.inf)
    for rows, keys, causal in _parts(schedule.segments):
        part, own = op(q_[:, :, rows], k_[:, :, keys], v_[:, :, keys], 0.0, causal, scale=options.scale)
        before, both = lse[:, :, rows], torch.logaddexp(lse[:, :, rows], own)
        out[:, :, rows] *= (before - both).exp().unsqueeze(-1)
        out[:, :, rows] += part * (own - both).exp().unsqueeze(-1)
        lse[:, :, rows] = both
    out = out[0].transpose(0, 1).to(q.dtype, memory_format=torch.contiguous_format)
    return out, lse[0].masked_fill_(lse[0] == -torch.inf, torch.inf)


def backward(
    dout: Tensor, dlse: None, saved: Saved, schedule: Schedule, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the output; none of the log-sum-exp."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, k, v, out, lse = saved
    dout_, q_, k_, v_, out_ = (_by_head(x) for x in (dout, q, k, v, out))
    gradients = [torch.zeros(x.shape) for x in (q, k, v)]
    for rows, keys, causal in _parts(schedule.segments):
        given = dout_[:, :, rows], q_[:, :, rows], k_[:, :, keys], v_[:, :, keys], out_[:, :, rows]
        added = op(*given, lse[None, :, rows], 0.0, causal, scale=options.scale)
        for total, part, at in zip(gradients, added, (rows, keys, keys), strict=True):
            _by_head(total)[:, :, at] += part
    return tuple(total.to(x.dtype) for total, x in zip(gradients, (q, k, v), strict=True))


def _parts(segments: np.ndarray) -> Iterator[tuple[slice, slice, bool]]:
    """Queries, keys, and whether these are those of the queries, so that the part is causal."""
    for q_start, q_len, kv_start, kv_len in segments[segments[:, 1] > 0].tolist():
        queries, own = slice(q_start, q_start + q_len), kv_start + kv_len - q_len
        if own > kv_start:
            yield queries, slice(kv_start, own), False
        yield queries, slice(own, own + q_len), True


def _by_head(x: Tensor) -> Tensor:
    """(1, heads, tokens, dim) in float32, sharing the memory of x where that is float32."""
    return x.float().transpose(0, 1)[None]
