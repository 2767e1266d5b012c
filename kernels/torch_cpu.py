"""Attention over segments on the CPU by torch's FlashAttention, twice as fast as the reference's blocks.

torch's kernel is causal from the first key on, so a segment whose queries begin behind its first key, as a
slice or a context-parallel chunk does, is computed in two parts: the keys before its queries, unmasked, and
those of its queries, causal. The log-sum-exps join their outputs, and the backward of each part takes the
joined ones. A key head is a batch of torch's, whose heads are those of the group, with strides of 0 where they
share keys: nothing is copied. Half precision is computed in float32.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .schedule import Schedule
from .segments import Options, Saved

Part = tuple[slice, bool]  # keys, and whether they are those of the queries: causal

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, D) like q, and log-sum-exp (Nq, Tq) float32, +inf where a query sees no key."""
    q_, k_, v_ = _heads(q, k), _heads(k, k), _heads(v, k)
    out, lse = torch.zeros_like(q_), q_.new_full(q_.shape[:3], torch.inf)
    for rows, parts in _parts(schedule.segments):
        joined, total = None, None
        for keys, causal in parts:
            given = q_[:, :, rows], k_[:, :, keys], v_[:, :, keys]
            o, l = _forward(*given, is_causal=causal, scale=options.scale)
            if joined is None:
                joined, total = o, l
            else:
                both = torch.logaddexp(total, l)
                joined = joined * (total - both).exp().unsqueeze(-1) + o * (l - both).exp().unsqueeze(-1)
                total = both
        out[:, :, rows], lse[:, :, rows] = joined, total
    return _tokens(out, q), lse.flatten(0, 1)


def backward(
    dout: Tensor, saved: Saved, schedule: Schedule, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the output; none of the log-sum-exp."""
    q, k, v, out, lse = saved
    q_, k_, v_, out_, dout_ = (_heads(x, k) for x in (q, k, v, out, dout))
    lse_ = lse.unflatten(0, q_.shape[:2])
    dq = torch.zeros_like(q_)
    dk, dv = (x.new_zeros(x.shape, dtype=q_.dtype) for x in (k, v))
    for rows, parts in _parts(schedule.segments):
        for keys, causal in parts:
            given = dout_[:, :, rows], q_[:, :, rows], k_[:, :, keys], v_[:, :, keys], out_[:, :, rows]
            gradients = _backward(*given, lse_[:, :, rows], 0.0, causal, scale=options.scale)
            dq[:, :, rows] += gradients[0]
            for total, gradient in zip((dk, dv), gradients[1:], strict=True):
                total[keys] += gradient.sum(1).transpose(0, 1)
    return _tokens(dq, q), dk.to(k.dtype), dv.to(v.dtype)


def _parts(segments: np.ndarray) -> Iterator[tuple[slice, list[Part]]]:
    """The query rows of each segment, and the parts of its keys."""
    for q_start, q_len, kv_start, kv_len in segments.tolist():
        if q_len:
            own, end = kv_start + kv_len - q_len, kv_start + kv_len
            before = [(slice(kv_start, own), False)] if own > kv_start else []
            yield slice(q_start, q_start + q_len), [*before, (slice(own, end), True)]


def _heads(x: Tensor, k: Tensor) -> Tensor:
    """(tokens, heads, dim) as (key heads, heads of a group, tokens, dim), float32; keys are those of all."""
    return x.float().unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_heads` for queries, in the dtype of `like`."""
    return x.permute(2, 0, 1, 3).flatten(1, 2).to(like.dtype)
