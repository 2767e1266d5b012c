"""torch's FlashAttention as an implementation: the CPU's kernel itself; of the GPU's what is given to it, by a
dense op in its place that has its contract, in float64.
"""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import CASES, WINDOWS, compare, compare_all, packed, random_inputs, rows, wanted, with_gradients
from test_tiles import reaches, segment_lists
from torch._subclasses.fake_tensor import FakeTensorMode
from wlb_titan.kernels import op, reference, torch_cpu, torch_varlen, varlen_attention
from wlb_titan.kernels.implementations import Device
from wlb_titan.kernels.schedule import Schedule, schedule_of
from wlb_titan.kernels.segments import NO_WINDOW, Options, Saved

CPU = torch.device("cpu")
SLICES = rows(*[[n, 3, 0, n + 3] for n in range(0, 27, 3)])  # of one document, all at once


def sequences(q, k, v, cum_q, cum_k, max_q, max_k, left, right, scale):
    """Of each sequence its queries, keys, and scores, -inf where a query does not see a key."""
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[1] % k.shape[1] == 0
    assert all(x.stride(2) == 1 for x in (q, k, v)) and right == 0
    edges = [(cum_q, q, max_q), (cum_k, k, max_k)]
    for cum, x, longest in edges:  # what lies outside of all sequences is not written
        assert cum.dtype == torch.int32 and cum.is_contiguous() and cum[0] == 0 and cum[-1] == len(x)
        assert 0 <= cum.diff().min() and cum.diff().max() <= longest
    for (q0, q1), (k0, k1) in zip(*(cum.unfold(0, 2, 1).tolist() for cum, *_ in edges), strict=True):
        keys = k[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale
        ahead = torch.arange(k1 - k0) - (torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0))
        hidden = (ahead > 0) | ((ahead < -left) if left >= 0 else False)
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(hidden, -torch.inf)


def dense_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale, window_size_left, window_size_right, **others,
):  # fmt: skip
    assert is_causal == (window_size_left < 0) and not dropout_p and not return_debug_mask
    out = torch.full_like(query, torch.nan)
    lse = query.new_full((query.shape[1], len(query)), torch.nan)
    ranges = cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right, scale
    for at, keys, scores in sequences(query, key, value, *ranges):
        v = value[keys].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        lse[:, at] = scores.logsumexp(-1)  # -inf without keys
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out, lse, *(query.new_empty(0),) * 3


def dense_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    """By what the forward left, as the kernels do."""
    group = query.shape[1] // key.shape[1]
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    delta = (grad_out * out).sum(-1).T.unsqueeze(-1)
    ranges = cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right, scale
    for at, keys, scores in sequences(query, key, value, *ranges):
        k, v = (x[keys].repeat_interleave(group, dim=1) for x in (key, value))
        p = (scores - logsumexp[:, at, None]).exp()
        ds = p * (torch.einsum("qhd,khd->hqk", grad_out[at], v) - delta[:, at]) * scale
        dq[at] = torch.einsum("hqk,khd->qhd", ds, k)
        for total, x, y in ((dk, ds, query), (dv, p, grad_out)):
            of_heads = torch.einsum("hqk,qhd->khd", x, y[at])
            total[keys] = of_heads.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture(scope="module")
def dense():
    """torch's varlen op on the CPU, where it has none."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in (("forward", dense_forward), ("backward", dense_backward)):
        library.impl(f"_flash_attention_{name}", function, "CPU")
    yield
    library._destroy()


def check_varlen(segments, tokens, heads, window, dtype=torch.float64):
    given = random_inputs(*tokens, heads, (8, 8), dtype)
    q, k, v, dout, dlse = (*given[:4], torch.zeros_like(given[4]))
    options = Options(0.3, window)
    lengths = schedule_of(segments, *tokens, CPU, options.reach).lengths
    out, lse = torch_varlen.varlen_forward(q, k, v, lengths, options)
    gradients = torch_varlen.varlen_backward(dout, Saved(q, k, v, out, lse), lengths, options)
    assert torch.isposinf(lse[0]).nonzero()[:, 0].tolist() == lengths.padding.tolist()
    compare_all(out, lse, gradients, (q, k, v, dout, dlse), segments, 0.3, window, 1e-10)
    return lengths


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", [*CASES, "slices"])
def test_cases_by_cumulative_lengths(case, window):
    segments, *tokens = (CASES | {"slices": (SLICES, 27, 27)})[case]
    lengths = check_varlen(segments, tokens, (4, 2), window)
    if window is None:
        assert (lengths.rows is None) == (case not in ("shard", "two_chunks", "slices"))


@pytest.mark.usefixtures("dense")
@settings(max_examples=150, deadline=None)
@given(segment_lists(longest=60), reaches, st.sampled_from([(1, 1), (4, 1), (6, 3)]))
def test_any_segments_by_cumulative_lengths(case, reach, heads):
    """Whole documents, chunks, slices, gaps, in any order: every row of output and gradients."""
    segments, *tokens = case
    assume(all(tokens))
    check_varlen(torch.from_numpy(segments), tokens, heads, None if reach == NO_WINDOW else reach)
