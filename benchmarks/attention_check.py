"""Is an implementation right on this device? Against the reference in float32, row by row.

Fresh random inputs in every run, new tensors full of NaN, keys and values side by side in one row as context
parallelism gathers them, padding, every mask, log-sum-exp, sinks, and everything twice: the same bits.
"""

import torch
from attention_cases import lognormal, shard, whole
from torch import Tensor
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.measure import Shape, make_inputs

TOLERANCE = 1e-2  # of a whole tensor, norm over norm
ROW_TOLERANCE = 5e-2  # of any row of a token and head, over its norm or the mean row's, whichever is more


def check_cases(scale: int = 1) -> dict[str, tuple[Tensor, dict]]:
    """Segments and the op's options by name; lengths divided by `scale`."""

    def lengths(*of: int) -> list[int]:
        return [max(1, n // scale) for n in of]

    padded = whole(lengths(300, 1, 77, 1500, 13, 12, 11, 640))
    padded[3:, 0] += 5  # rows of padding between documents
    padded[5:, 0] += 1
    many = whole(lengths(150, 1, 300, 77) * 80)  # work for every multiprocessor: heads are packed both ways
    return {
        "ragged": (padded, {}),
        "window": (padded, {"window": max(1, 130 // scale)}),
        "not causal": (padded, {"causal": False}),
        "many": (many, {}),
        "many, window": (many, {"window": max(1, 90 // scale)}),
        "many, not causal": (many, {"causal": False}),
        "shard": (shard(lengths(3000, 500, 40, 6000), 4, 1), {}),
        "long": (whole(lengths(5000, 200)), {}),
        "long window": (whole(lengths(5000, 200)), {"window": max(1, 1024 // scale)}),
        "mix": (shard(lognormal(20000 // scale, 500 // scale + 1, 0, 8000 // scale), 2, 0), {}),
    }


def check(
    implementation: str,
    segments: Tensor,
    options: dict,
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> dict:
    """The errors of each output and gradient, whole and of the worst row; and the names of what is wrong."""
    q, k, v, dout = make_inputs(segments, shape, dtype, device, seed)
    k, v = _side_by_side(k, v)
    rng = torch.Generator(device).manual_seed(seed)
    sinks = torch.randn(shape.q_heads, generator=rng, device=device)
    dlse = torch.randn(shape.q_heads, q.shape[0], generator=rng, device=device)

    def run(implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        sink_leaf = sinks.clone().requires_grad_()
        out, lse = varlen_attention(
            *leaves, segments, sinks=sink_leaf, return_lse=True, implementation=implementation, **options
        )
        finite = torch.isfinite(lse)
        gradients = torch.autograd.grad(
            (out, torch.where(finite, lse, 0.0)), (*leaves, sink_leaf), (dout.to(dtype), dlse)
        )
        names = ("dq", "dk", "dv", "dsinks")
        found = dict(zip(names, gradients, strict=True))
        return found | {"out": out.detach(), "lse": torch.where(finite, lse, 0.0).detach().T}

    want = run("reference", torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with NaN
    got, again = (run(implementation, dtype) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    errors, wrong = {}, []
    for name, expected in want.items():
        whole_error, row_error = _errors(got[name].float(), expected)
        errors[name] = whole_error, row_error
        if not (whole_error <= TOLERANCE and row_error <= ROW_TOLERANCE):  # NaN is wrong
            wrong.append(name)
        if not torch.equal(got[name], again[name]):
            wrong.append(f"{name} differs when repeated")
    return {"errors": errors, "wrong": wrong}


def check_million(implementation: str, shape: Shape, device: str, tokens: int = 2**20) -> dict:
    """A tensor of more than 2**32 elements: the last document of 1,024, forward and backward.

    Nothing before it is compared; the point is addresses that overflow 32 bits.
    """
    length = min(1024, tokens)
    segments = whole([length] * (tokens // length))
    q, k, v, dout = make_inputs(segments, shape, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, segments, implementation=implementation)
    got = (out, *torch.autograd.grad(out, leaves, dout))
    last = [x[-length:].detach().float().requires_grad_() for x in (q, k, v)]
    want = varlen_attention(*last, whole([length]), implementation="reference")
    wanted = (want, *torch.autograd.grad(want, last, dout[-length:].float()))
    errors = {
        name: _errors(a[-length:].float(), b)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
    }
    wrong = [n for n, (all_, row) in errors.items() if not (all_ <= TOLERANCE and row <= ROW_TOLERANCE)]
    return {"errors": errors, "wrong": wrong}


def _errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Relative error of the whole, and the largest of a row (all dimensions but the last)."""
    difference, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    row = difference / size.clamp(min=max(size.square().mean().sqrt().item(), 1e-6))
    return ((got - want).norm() / want.norm()).item(), row.max().item()


def _side_by_side(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    widths = [x.shape[1] * x.shape[2] for x in (k, v)]
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1).split(widths, dim=1)
    return tuple(x.unflatten(1, like.shape[1:]) for x, like in zip(both, (k, v), strict=True))
