"""torch's FlashAttention as an implementation: the CPU's kernel itself; of the GPU's what is given to it, by
a dense op in its place that has its contract, in float64."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import CASES, WINDOWS, compare_all, random_inputs, rows
from test_tiles import reaches, segment_lists
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from wlb_titan.kernels import reference, torch_cpu, torch_varlen, varlen_attention
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import NO_WINDOW, Options, Saved

CPU = torch.device("cpu")
BF16 = torch.bfloat16
CASES = CASES | {"slices": (rows(*[[n, 3, 0, n + 3] for n in range(0, 27, 3)]), 27, 27)}  # all at once


def sequences(q, k, v, cum_q, cum_k, max_q, max_k, left, right, scale):
    """Of each sequence its queries, keys, and scores, -inf where a query does not see a key."""
    assert q.shape[1] % k.shape[1] == 0
    assert all(x.stride(2) == 1 for x in (q, k, v)) and right == 0
    edges = [(cum_q, q, max_q), (cum_k, k, max_k)]
    for cum, x, longest in edges:  # what lies outside of all sequences is not written
        assert cum.dtype == torch.int32 and cum.is_contiguous() and cum[0] == 0 and cum[-1] == len(x)
        assert cum.diff().min() >= 0 and cum.diff().max() <= longest
    for (q0, q1), (k0, k1) in zip(*(cum.unfold(0, 2, 1).tolist() for cum, *_ in edges), strict=True):
        if q0 == q1 and k0 == k1:
            continue
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
    out = query.new_full((*query.shape[:2], value.shape[2]), torch.nan)
    lse = query.new_full((query.shape[1], len(query)), torch.nan)
    ranges = cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right, scale
    for at, keys, scores in sequences(query, key, value, *ranges):
        v = value[keys].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        lse[:, at] = scores.logsumexp(-1)  # -inf without keys
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out, lse, *(query.new_empty(0),) * 3


def dense_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale, window_size_left, window_size_right, dlse=0.0,
):  # fmt: skip
    """By what the forward left, as the kernels do."""
    group = query.shape[1] // key.shape[1]
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    delta = ((grad_out * out).sum(-1).T - dlse).unsqueeze(-1)
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


def check(kernels, segments, tokens, heads, window=None, dtype=torch.float64, tolerance=1e-10):
    """Both passes beside the oracle."""
    *given, dlse = random_inputs(*tokens, heads, (8, 8), dtype)
    options = Options(0.3, window)
    schedule = schedule_of(segments, *tokens, CPU, options.reach)
    out, lse = kernels.forward(*given[:3], schedule, options)
    gradients = kernels.backward(given[3], None, Saved(*given[:3], out, lse), schedule, options)
    assert all(x.dtype == dtype and x.is_contiguous() for x in (out, *gradients))
    given.append(torch.zeros_like(dlse))
    compare_all(out, lse, gradients, given, segments, 0.3, window, tolerance)
    return schedule.lengths


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES)
def test_cases_by_cumulative_lengths(case, window):
    segments, *tokens = CASES[case]
    lengths = check(torch_varlen, segments, tokens, (4, 2), window)
    if window is None:
        assert (lengths.rows is None) == (case not in ("shard", "two_chunks", "slices")), "copied"


@pytest.mark.usefixtures("dense")
@settings(max_examples=150, deadline=None)
@given(segment_lists(longest=60), reaches, st.sampled_from([(1, 1), (4, 1), (6, 3)]))
def test_any_segments_by_cumulative_lengths(case, reach, heads):
    """Whole documents, chunks, gaps, in any order: every row of output and gradients."""
    segments, *tokens = case
    assume(all(tokens))
    window = None if reach == NO_WINDOW else reach
    check(torch_varlen, torch.from_numpy(segments), tokens, heads, window)


def test_the_ops_of_gpus_take_what_they_are_given(monkeypatch):
    """Tensors without memory, on a GPU that need not be there."""
    monkeypatch.setattr(torch_varlen, "aligned", lambda x: x)  # which looks at addresses
    segments, *tokens = CASES["shard"]
    schedule = schedule_of(segments, *tokens, CPU)
    on_cpu, options = schedule.lengths, Options(0.1, 5)
    with FakeTensorMode():
        fakes = tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype).cuda(), on_cpu)
        schedule = SimpleNamespace(lengths=fakes)
        q, k, v = (torch.empty(n, heads, 64, dtype=BF16).cuda() for n, heads in ((13, 4), (12, 2), (12, 2)))
        out, lse = torch_varlen.forward(q, k, v, schedule, options)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, BF16, (4, 13), torch.float32)
        gradients = torch_varlen.backward(out, None, Saved(q, k, v, out, lse), schedule, options)
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, BF16) for x in (q, k, v)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BF16, 1e-2), (torch.half, 2e-3)])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_of_cpus(case, dtype, tolerance):
    segments, *tokens = CASES[case]
    for heads in ((4, 1), (6, 3), (2, 2)):
        check(torch_cpu, segments, tokens, heads, None, dtype, tolerance)


@given(segment_lists(longest=60))
def test_any_segments_on_a_cpu(case):
    segments, *tokens = case
    assume(all(tokens))
    check(torch_cpu, torch.from_numpy(segments), tokens, (4, 2), None, torch.float32, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "dims", "window", "lse", "expected"),
    [
        (torch.float32, (8, 8), None, False, []),
        (torch.float32, (8, 8), None, True, ["backward"]),
        (torch.float32, (8, 8), 3, False, ["forward", "backward"]),
        (torch.float64, (8, 8), None, False, ["forward", "backward"]),
        (torch.float32, (8, 4), None, False, ["forward", "backward"]),
    ],
)
def test_what_torch_cannot_the_reference_computes(monkeypatch, dtype, dims, window, lse, expected):
    ran = []
    for name in ("forward", "backward"):
        right = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *x, name=name, right=right: ran.append(name) or right(*x))
    segments, *tokens = CASES["shard"]
    q, k, v, *_ = random_inputs(*tokens, (4, 2), dims, dtype)
    for wish in ("auto", "torch"):
        options = {"window": window, "return_lse": True, "implementation": wish}
        results = varlen_attention(q.requires_grad_(), k, v, segments, **options)
        results[lse][:, :2].sum().backward()
        assert ran == expected
        del ran[:]
