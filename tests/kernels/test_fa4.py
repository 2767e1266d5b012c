"""FlashAttention-4 as an implementation: what it is given, by dense functions in its place that take the same
arguments and compute what they say. tests/integrations binds them to the signatures of the real package."""

import sys
from types import SimpleNamespace

import pytest
import torch
from oracle import CASES, WINDOWS, compare_all, packed, random_inputs
from test_torch_varlen import CPU, dense_backward, dense_forward
from wlb_titan.kernels import fa4, op, reference, self_check, triton_launch, varlen_attention
from wlb_titan.kernels.implementations import Device, chosen
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import Options, Saved, Shape

PACKAGE = "flash_attn.cute.interface"
ORDERS = []  # in which it was asked to add up


def of_torch(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size_left):
    """The arguments of torch's op, wide. No length may choose a kernel: a single tile, few sequences."""
    assert min(max_seqlen_q, max_seqlen_k) > 256 and min(len(cu_seqlens_q), len(cu_seqlens_k)) > 257
    left = -1 if window_size_left is None else window_size_left
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, left < 0
    return [x.double() for x in (q, k, v)], lengths, {"window_size_left": left, "window_size_right": 0}


def forward(q, k, v, *, softmax_scale, causal, return_lse, **lengths):
    assert causal and return_lse
    tensors, lengths, window = of_torch(q, k, v, **lengths)
    out, lse, *_ = dense_forward(*tensors, *lengths, False, scale=softmax_scale, **window)
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32)), None, None, None


def backward(q, k, v, out, dout, lse, *, softmax_scale, causal, dlse, deterministic, **lengths):
    assert causal and (dlse is None or dlse.is_contiguous())
    ORDERS.append(deterministic)
    tensors, lengths, window = of_torch(q, k, v, **lengths)
    given = dout.double(), *tensors, out, lse, *lengths, None, None
    gradients = dense_backward(*given, scale=softmax_scale, **window, dlse=0.0 if dlse is None else dlse)
    return tuple(x.to(q.dtype) for x in gradients)


@pytest.fixture(autouse=True, scope="module")
def package():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, PACKAGE, SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
        )
        chosen.cache_clear()
        yield
    chosen.cache_clear()


def check(segments, tokens, heads, window=None, dims=(8, 8), dlse=True):
    *given, given_lse = random_inputs(*tokens, heads, dims, torch.float64)
    options = Options(0.3, window)
    schedule = schedule_of(segments, *tokens, CPU, options.reach)
    out, lse = fa4.forward(*given[:3], schedule, options)
    saved, given_lse = Saved(*given[:3], out, lse), given_lse * dlse
    gradients = fa4.backward(given[3], given_lse.T.contiguous().T if dlse else None, saved, schedule, options)
    compare_all(out, lse, gradients, (*given, given_lse), segments, 0.3, window, 1e-10)


@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES)
def test_cases(case, window, dims):
    segments, *tokens = CASES[case]
    for dlse in (True, False):
        check(segments, tokens, (4, 2), window, dims, dlse)


def test_more_sequences_than_it_counts_as_many():
    check(packed([1, 2] * 150), (450, 450), (2, 1))


def test_a_job_on_blackwell_warms_up_checks_and_trains_with_sinks(monkeypatch):
    """By "auto", in the order that torch's setting asks for: the check's is another."""
    monkeypatch.setattr(op, "device_of", lambda device: Device("cuda", (10, 0)))
    for which in ("forward", "backward"):
        monkeypatch.setattr(triton_launch, which, getattr(reference, which))  # which is the judge
    shape, options = Shape(4, 2, 192, 128), Options(0.1)
    assert self_check.warm_up(shape, options, torch.bfloat16, CPU) == 3 and {*ORDERS} == {True, False}
    noise = self_check.Noise.rich(shape, torch.bfloat16, CPU, scale=40)
    assert 0 < self_check.check_kernels(noise, options) < self_check.TOLERANCE
    segments, *tokens = CASES["shard"]
    *given, dout, _ = random_inputs(*tokens, (4, 2), (192, 128), torch.bfloat16)
    for rows, fixed in ((13, False), (13, True), (0, False)):  # the last is a rank without queries
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda fixed=fixed: fixed)
        del ORDERS[:]
        found = []
        for implementation in ("auto", "reference"):
            leaves = [
                x.clone().requires_grad_() for x in (given[0][:rows], *given[1:], torch.linspace(-1, 1, 4))
            ]
            of_rank, wish = segments[: 5 * (rows > 0)], {"return_lse": True, "implementation": implementation}
            out, lse = varlen_attention(*leaves[:3], of_rank, **wish)
            out = out * torch.sigmoid(lse - leaves[3][:, None]).T.unsqueeze(-1)
            found.append(torch.autograd.grad(out, leaves, dout[:rows].to(out.dtype)))
        assert [fixed] * (rows > 0) == ORDERS
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
