"""Attention over segments in plain PyTorch, which runs on the CPU, for small models and for tests.

Both passes walk over blocks of at most `BLOCK` queries of one segment and the keys that these see, so that
memory is BLOCK x keys per head and nothing above the diagonal is computed but the last square. The backward
recomputes the probabilities from the saved log-sum-exp, as the kernels do (FlashAttention-2, Dao 2023). Half
precision is computed in float32, float64 in float64.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .schedule import Schedule
from .segments import Options, Saved, Shape
from .tiles import Cut

BLOCK = 64  # the scores of a block stay in the second-level cache up to some thousand keys


def forward(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, options: Options) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv) like q, and log-sum-exp (Nq, Tq), +inf where a query sees no key."""
    q_tokens, q_heads, _ = q.shape
    kv_heads, v_dim = v.shape[1:]
    qg, k_, v_ = _by_head(q, kv_heads), _by_head(k, kv_heads)[:, 0], _by_head(v, kv_heads)[:, 0]
    out = qg.new_zeros(kv_heads, q_heads // kv_heads, q_tokens, v_dim)
    lse = qg.new_full((kv_heads, q_heads // kv_heads, q_tokens), torch.inf)
    for rows, keys, hidden in _blocks(schedule.segments, options.reach, q.device):
        scores = _scores(qg[:, :, rows], k_[:, keys], options.scale, hidden)
        m = scores.amax(-1, keepdim=True)
        p = scores.sub_(m).exp_()
        total = p.sum(-1, keepdim=True)
        out[:, :, rows] = torch.einsum("hgqk,hkd->hgqd", p, v_[:, keys]).div_(total)
        lse[:, :, rows] = total.log_().add_(m).squeeze(-1)
    lse = lse.reshape(q_heads, q_tokens).to(torch.promote_types(q.dtype, torch.float32))
    return _by_token(out, q), lse


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given those of the output (Tq, Nq, Dv) and the log-sum-exp (Nq, Tq)."""
    q, k, v, out, lse = saved
    kv_heads = k.shape[1]
    qg, k_, v_ = _by_head(q, kv_heads), _by_head(k, kv_heads)[:, 0], _by_head(v, kv_heads)[:, 0]
    dog = _by_head(dout, kv_heads)
    delta = (dog * _by_head(out, kv_heads)).sum(-1)
    if dlse is not None:
        delta -= dlse.reshape(delta.shape)  # the gradient of log-sum-exp by the scores is p
    lse = lse.reshape(delta.shape).to(qg.dtype)
    dq, dk, dv = torch.zeros_like(qg), torch.zeros_like(k_), torch.zeros_like(v_)
    for rows, keys, hidden in _blocks(schedule.segments, options.reach, q.device):
        p = _scores(qg[:, :, rows], k_[:, keys], options.scale, hidden)
        p = p.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        dv[:, keys] += torch.einsum("hgqk,hgqd->hkd", p, dog[:, :, rows])
        ds = torch.einsum("hgqd,hkd->hgqk", dog[:, :, rows], v_[:, keys])
        ds.sub_(delta[:, :, rows].unsqueeze(-1)).mul_(p).mul_(options.scale)
        dq[:, :, rows] = torch.einsum("hgqk,hkd->hgqd", ds, k_[:, keys])
        dk[:, keys] += torch.einsum("hgqk,hgqd->hkd", ds, qg[:, :, rows])
    return _by_token(dq, q), _by_token(dk.unsqueeze(1), k), _by_token(dv.unsqueeze(1), v)


def cuts(shape: Shape, device: torch.device) -> tuple[Cut, Cut]:
    cut = Cut("queries", 1, BLOCK)
    return cut, cut


def _blocks(segments: np.ndarray, reach: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Query rows, the keys that any sees, and (rows, n) whether the last n keys are hidden from a row."""
    for q_start, q_len, kv_start, kv_len in segments.tolist():
        shift = kv_start + kv_len - q_len
        for first in range(0, q_len, BLOCK):
            last = min(first + BLOCK, q_len)
            begin = max(kv_start, shift + first + 1 - reach)
            own = torch.arange(shift + first, shift + last, device=device).unsqueeze(1)
            since = shift + first if shift + last - reach <= begin else begin  # a window leaves keys behind
            ahead = torch.arange(since, shift + last, device=device) - own
            rows = slice(q_start + first, q_start + last)
            yield rows, slice(begin, shift + last), (ahead > 0) | (ahead <= -reach)


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """(heads, group, rows, keys), -inf for keys that a row does not see."""
    scores = torch.einsum("hgqd,hkd->hgqk", q * scale, k)
    scores[..., -hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
    return scores


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """(tokens, heads, dim) to (key heads, heads per key head, tokens, dim), in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).permute(1, 2, 0, 3).contiguous()


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of _by_head, in the dtype of `like`."""
    return x.flatten(0, 1).transpose(0, 1).to(like.dtype).contiguous()
