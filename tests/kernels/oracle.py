"""What the kernels must compute, written without any of their ideas: one dense mask, float64, autograd."""

import numpy as np
import torch
from torch import Tensor
from wlb_titan.kernels.segments import Visibility

# Two chunks of one document, padding (rows 9 and 12), a one-token segment, unsorted rows, an empty one.
SHARD = torch.tensor(
    [[5, 3, 2, 9], [0, 5, 0, 5], [8, 1, 11, 1], [10, 2, 0, 12], [3, 0, 1, 4]], dtype=torch.int32
)


def visible(
    segments: Tensor, q_tokens: int, kv_tokens: int, causal: bool = True, window: int | None = None
) -> Tensor:
    """(q_tokens, kv_tokens) bool: may this query see that key."""
    mask = torch.zeros(q_tokens, kv_tokens, dtype=torch.bool)
    for q_start, q_len, kv_start, kv_len in segments.tolist():
        for i in range(q_len):
            end = kv_start + kv_len - q_len + i + 1 if causal else kv_start + kv_len
            begin = kv_start if window is None else max(kv_start, end - window)
            mask[q_start + i, begin:end] = True
    return mask


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float, *, sinks: Tensor | None = None, **mask
) -> tuple[Tensor, Tensor]:
    """Dense masked attention, (Tq, Nq, Dv) float64, zero in rows that see nothing; and the log-sum-exp (Nq,
    Tq), +inf there.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = visible(segments, q.shape[0], k.shape[0], **mask)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = torch.where(seen, scores, -torch.inf)
    if sinks is not None:
        scores = torch.cat([sinks[:, None, None].expand(-1, q.shape[0], 1), scores], dim=2)
    p = scores.softmax(-1)[:, :, scores.shape[2] - k.shape[0] :]
    padding = ~seen.any(1)
    out = torch.einsum("hqk,khd->qhd", torch.where(padding[:, None], 0.0, p), v)
    return out, torch.where(padding, torch.inf, scores.logsumexp(-1))


def attention(*args, **options) -> Tensor:
    return attention_and_lse(*args, **options)[0]


def with_gradients(attend, *tensors: Tensor) -> dict[str, Tensor]:
    """The output of attend(q, k, v) and the gradients for dout, the last of the tensors q, k, v, dout.

    With dlse behind dout, and sinks behind v if those are given too: of an `attend` that returns the
    log-sum-exp as well; its rows of padding, which are infinite, are left out.
    """
    names = ("q", "k", "v", "sinks")[: 4 if len(tensors) == 6 else 3]
    leaves = [x.detach().clone().requires_grad_() for x in tensors[: len(names)]]
    given = tensors[len(names) :]
    out = attend(*leaves)
    if len(given) == 1:
        outputs = {"out": out}
        out.backward(given[0].to(out.dtype))
    else:
        finite = torch.isfinite(out[1])
        outputs = {"out": out[0], "lse": torch.where(finite, out[1], 0.0)}
        torch.autograd.backward(
            list(outputs.values()), [x.to(o.dtype) for x, o in zip(given, out, strict=True)]
        )
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d{name}": x.grad for name, x in zip(names, leaves, strict=True)
    }


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
    scale: float, visibility: Visibility, tolerance: float,
) -> None:  # fmt: skip
    """Compare what a kernel computed for given = q, k, v, dout, dlse with the oracle; padding is zero."""
    padding = torch.isposinf(lse[0])
    got = {"out": out, "lse": torch.where(padding, 0.0, lse)}
    got |= {f"d{name}": x for name, x in zip("qkv", gradients, strict=True)}
    mask = {"causal": visibility.causal, "window": visibility.window}
    want = with_gradients(
        lambda q, k, v: attention_and_lse(q, k, v, segments, scale, **mask), *(x.double() for x in given)
    )
    compare(got, want, tolerance)
    assert (out[padding] == 0).all() and (gradients[0][padding] == 0).all()


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


def side_by_side(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as views of one tensor with both in a row, which is how context parallelism gathers them."""
    widths = [x.shape[1] * x.shape[2] for x in (k, v)]
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1).split(widths, dim=1)
    return tuple(x.unflatten(1, like.shape[1:]) for x, like in zip(both, (k, v), strict=True))
