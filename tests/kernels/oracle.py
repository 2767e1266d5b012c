"""What the kernels must compute, written without any of their ideas: one dense mask, float64, autograd."""

import math

import numpy as np
import torch
from torch import Tensor


def packed(lengths: list[int]) -> Tensor:
    """Segments of whole documents, one after the other."""
    lengths = np.asarray(lengths, dtype=np.int32)
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.stack([starts, lengths, starts, lengths], axis=1).astype(np.int32))


def rows(*segments: list[int]) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32)


# Two chunks of one document, padding (rows 9 and 12), a one-token segment, unsorted rows, an empty one.
SHARD = rows([5, 3, 2, 9], [0, 5, 0, 5], [8, 1, 11, 1], [10, 2, 0, 12], [3, 0, 1, 4])
CASES = {
    "shard": (SHARD, 13, 12),
    "ragged": (packed([60, 1, 200, 7]), 271, 268),
    "merged": (packed([5, 12, 3, 9, 20, 1, 1, 30]), 90, 81),
    "two_chunks": (rows([0, 30, 0, 30], [30, 30, 0, 120]), 60, 120),
    "one_token_each": (packed([1] * 9), 9, 9),
    "one_query_many_keys": (rows([0, 1, 3, 290]), 1, 293),
    "only_padding": (packed([]), 5, 3),
}
"""Segments, queries and keys."""
WINDOWS = (None, 1, 37, 100)


def visible(segments: Tensor, q_tokens: int, kv_tokens: int, window: int | None = None) -> Tensor:
    """(q_tokens, kv_tokens) bool: may this query see that key."""
    mask = torch.zeros(q_tokens, kv_tokens, dtype=torch.bool)
    for q_start, q_len, kv_start, kv_len in segments.tolist():
        for i in range(q_len):
            end = kv_start + kv_len - q_len + i + 1
            begin = kv_start if window is None else max(kv_start, end - window)
            mask[q_start + i, begin:end] = True
    return mask


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output (Tq, Nq, Dv), zero in rows that see nothing, and log-sum-exp (Nq, Tq), +inf there."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = visible(segments, q.shape[0], k.shape[0], window)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = torch.where(seen, scores, -torch.inf)
    padding = ~seen.any(1)
    p = torch.where(padding[:, None], 0.0, scores.softmax(-1))
    return torch.einsum("hqk,khd->qhd", p, v), torch.where(padding, torch.inf, scores.logsumexp(-1))


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """Output and log-sum-exp of attend(q, k, v), and all gradients; the log-sum-exp's rows of padding, which
    are infinite, are left out."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    torch.autograd.backward([out, lse], [dout.to(out.dtype), dlse.to(lse.dtype)])
    dq, dk, dv = (x.grad for x in leaves)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def wanted(given: tuple[Tensor, ...], segments: Tensor, scale: float, window: int | None = None) -> dict:
    """For q, k, v, dout and dlse."""
    wide = [x.double() for x in given]
    return with_gradients(lambda q, k, v: attention_and_lse(q, k, v, segments, scale, window), *wide)


def row_statistics(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, pack: int) -> list[Tensor]:
    """What triton_launch.row_statistics must return: `pack` heads of each token side by side."""
    tokens, heads, _ = out.shape
    delta = (out.float() * dout.float()).sum(-1).T
    if dlse is not None:
        delta = delta - torch.where(torch.isposinf(lse), 0.0, dlse)
    both = torch.full((2, heads // pack, -(-tokens * pack // 4) * 4), torch.nan)
    for rows, values in zip(both, (lse * math.log2(math.e), delta), strict=True):
        rows[:, : tokens * pack] = values.view(-1, pack, tokens).transpose(1, 2).flatten(1)
    return list(both)


def gradient(sums: Tensor, q: Tensor, bounds: Tensor, pack: int, scale: float) -> Tensor:
    """What gluon_launch.gradient must return: the sums of dQ in the order of q."""
    tokens, heads, dim = q.shape
    blocks = sums.view(-1, heads // pack, 2, dim // 16, 4, 8, 4, 2, 2).permute(0, 4, 7, 5, 1, 2, 3, 6, 8)
    rows = blocks.reshape(-1, 64 // pack, pack, heads // pack, dim).transpose(2, 3)
    rows = rows.reshape(-1, heads, dim)[:tokens] * scale
    return torch.where((bounds[0] < bounds[1])[:, None, None], rows, 0.0).to(q.dtype)


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


def compare_all(
    out: Tensor, lse: Tensor, gradients: tuple[Tensor, ...], given: tuple[Tensor, ...], segments: Tensor,
    scale: float, window: int | None, tolerance: float,
) -> None:  # fmt: skip
    """Compare what a kernel computed for given = q, k, v, dout, dlse with the oracle; padding is zero."""
    padding = torch.isposinf(lse[0])
    got = {"out": out, "lse": torch.where(padding, 0.0, lse)}
    got |= {f"d{name}": x for name, x in zip("qkv", gradients, strict=True)}
    compare(got, wanted(given, segments, scale, window), tolerance)
    assert (out[padding] == 0).all() and (gradients[0][padding] == 0).all()


def random_inputs(
    q_tokens: int, kv_tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and the gradients of output and log-sum-exp, standard normal; all but the last in dtype. k and
    v are views of one tensor with both in a row, which is how context parallelism gathers them."""
    rng = torch.Generator().manual_seed(seed)
    (q_heads, kv_heads), (dim, v_dim) = heads, dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    q, kv = normal(q_tokens, q_heads, dim), normal(kv_tokens, kv_heads * (dim + v_dim)).to(dtype)
    k, v = kv.split([kv_heads * dim, kv_heads * v_dim], dim=1)
    dout, dlse = normal(q_tokens, q_heads, v_dim), normal(q_heads, q_tokens)
    k, v = k.unflatten(1, (kv_heads, dim)), v.unflatten(1, (kv_heads, v_dim))
    return q.to(dtype), k, v, dout.to(dtype), dlse
