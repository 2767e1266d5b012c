"""What the kernels must compute, written without any of their ideas: one dense mask, float64, autograd."""

import numpy as np
import torch
from torch import Tensor


def visible(segments: Tensor, q_tokens: int, kv_tokens: int) -> Tensor:
    """(q_tokens, kv_tokens) bool: may this query see that key."""
    mask = torch.zeros(q_tokens, kv_tokens, dtype=torch.bool)
    for q_start, q_len, kv_start, kv_len in segments.tolist():
        for i in range(q_len):
            mask[q_start + i, kv_start : kv_start + kv_len - q_len + i + 1] = True
    return mask


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float) -> Tensor:
    """Dense masked attention, (Tq, Nq, Dv) float64; rows that see nothing are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    mask = visible(segments, q.shape[0], k.shape[0])
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    p = torch.where(mask, scores, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", torch.where(mask, p, 0.0), v)


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The output of attend(q, k, v) and the gradients for dout."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    out.backward(dout.to(out.dtype))
    return {"out": out.detach()} | {f"d{n}": x.grad for n, x in zip("qkv", leaves, strict=True)}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Assert that the norm of each difference is within the tolerance of the norm of what is wanted.

    NaN never passes. A gradient that nearly cancels, as that of a one-token document does, is measured
    against 0.3 per element, the size of its terms.
    """
    for name, expected in want.items():
        if expected.numel() > 0:
            size = max(expected.norm().item(), 0.3 * expected.numel() ** 0.5)
            error = (got[name].double() - expected).norm().item() / size
            assert error <= tolerance, f"{name}: relative error {error:.3g} > {tolerance:.3g}"


def random_inputs(
    q_tokens: int,
    kv_tokens: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient, standard normal, rounded to dtype."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (
        (q_tokens, q_heads, dim),
        (kv_tokens, kv_heads, dim),
        (kv_tokens, kv_heads, v_dim),
        (q_tokens, q_heads, v_dim),
    )
    return tuple(torch.randn(s, generator=rng).to(dtype) for s in shapes)


def packed(lengths: list[int]) -> Tensor:
    """Segments of whole documents, one after the other."""
    lengths = np.asarray(lengths, dtype=np.int32)
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.stack([starts, lengths, starts, lengths], axis=1).astype(np.int32))
