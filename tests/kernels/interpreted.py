"""The Triton kernels, run by Triton's interpreter on the CPU, against the dense float64 oracle, as
test_interpreter.py starts it. Tiles are far smaller than those that ship, so that short segments have full,
masked, partial and merged ones. float16 and float32 only: it computes bfloat16 products wrongly."""

import os

import oracle
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import CASES, WINDOWS, compare, packed, random_inputs, rows, wanted, with_gradients
from test_tiles import segment_lists
from wlb_titan.kernels import gluon_launch, triton_launch, varlen_attention
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import Options, Saved, Shape
from wlb_titan.kernels.self_check import Noise, check_kernels, poisoned
from wlb_titan.kernels.triton_launch import Config, Configs

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_interpreter.py"
F32, F16 = torch.float32, torch.float16
TOLERANCE = {F32: 2e-5, F16: 4e-3}
SMALL = Configs(*[Config(32, 32, warps=4)] * 3)
GROUPED = Configs(Config(32, 32, warps=4), *[Config(64, 32, warps=4)] * 2)
WIDE = Configs(*[Config(64, 64, warps=4)] * 3)


def check(segments, q_tokens, kv_tokens, heads, dims, dtype, *, tma, configs=None, window=None, seed=0):
    """Forward, log-sum-exp and every gradient of one call, outputs poisoned beforehand; two key heads at a
    time, with other configurations than those that ship."""
    tensors = q, k, v, dout, dlse = random_inputs(q_tokens, kv_tokens, heads, dims, dtype, seed)
    options = Options(0.2, window)
    schedule = schedule_of(segments, q_tokens, kv_tokens, q.device, options.reach)
    with poisoned(), pytest.MonkeyPatch.context() as patch:
        if configs:
            patch.setattr(triton_launch, "choose", lambda *_: configs)
            patch.setattr(triton_launch, "section", lambda x, y, programs, group=1: 2 * programs)
        out, lse = triton_launch.forward(q, k, v, schedule, options, tma=tma)
        given_dlse = torch.where(torch.isposinf(lse[0]), torch.nan, dlse)
        saved = Saved(q, k, v, out, lse)
        gradients = triton_launch.backward(dout, given_dlse, saved, schedule, options, tma=tma)
    oracle.compare_all(out, lse, gradients, tensors, segments, 0.2, window, TOLERANCE[dtype])


sizes = st.sampled_from([16, 32])


# No shrinking, and a twelfth of others' examples: one takes a second or more.
@settings(max_examples=settings().max_examples // 12, phases=[Phase.explicit, Phase.generate])
@given(
    segment_lists(documents=4, longest=40),
    st.sampled_from(WINDOWS),
    st.builds(Configs, *[st.builds(Config, sizes, sizes, warps=st.just(4))] * 3),
    st.sampled_from([(3, 3), (4, 1), (4, 2), (3, 1)]),
    st.sampled_from([(16, 16), (24, 16), (48, 16), (16, 40), (72, 32)]),
    st.sampled_from([F32, F16]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_ragged(case, window, configs, heads, dims, dtype, tma, seed):
    segments, *tokens = case
    segments = torch.from_numpy(segments)
    check(segments, *tokens, heads, dims, dtype, tma=tma, window=window, configs=configs, seed=seed)


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    """With one head a group in float32 by TMA, and with three in float16 by pointers."""
    check(*CASES[case], (3, 3), (16, 16), F32, tma=True, configs=SMALL)
    check(*CASES[case], (3, 1), (16, 16), F16, tma=False, configs=GROUPED)


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_windows(window):
    """Blocks that are masked at their start, at their end, at both and not at all, by either pass's loops;
    and head dims that are filled up to one power of two, or to two."""
    check(*CASES["ragged"], (2, 1), (24, 40), F32, tma=True, configs=WIDE, window=window)
    check(*CASES["two_chunks"], (2, 1), (40, 24), F16, tma=False, configs=GROUPED, window=window)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_configurations_as_shipped(dims):
    """On segments of some tiles each; by pointers there is one for all, and 192 and 128 have all parts."""
    segments = rows([0, 70, 0, 70], [70, 60, 70, 150])
    for tma in (True, False) if dims == (192, 128) else (True,):
        check(segments, 130, 230, (2, 1), dims, F16, tma=tma)


@pytest.mark.parametrize("pack", [1, 4, 8])
def test_row_statistics(pack):
    """In the order of the Gluon backward's steps, where heads are packed."""
    out, dout = (torch.randn(37, 8, 24, dtype=F16) for _ in range(2))
    lse, dlse = (torch.randn(8, 37) for _ in range(2))
    lse[:, 5], dlse[:, 5] = torch.inf, torch.nan
    got = triton_launch.row_statistics(dout, dlse, out, lse, pack)
    for found, want in zip(got, oracle.row_statistics(dout, dlse, out, lse, pack), strict=True):
        torch.testing.assert_close(found[:, : 37 * pack], want[:, : 37 * pack])


@pytest.mark.parametrize(("dim", "pack"), [(64, 1), (128, 2), (64, 8)])
def test_sums_of_dq(dim, pack):
    """Of the Gluon backward: put back in order, scaled and rounded, without the rows past the end, and zero
    where a token has no keys and nobody wrote."""
    q = torch.zeros(150, 3 * pack, dim, dtype=F16)
    bounds = torch.tensor([[5] * 150, [9] * 150], dtype=torch.int32)
    bounds[:, 40] = 0
    sums = torch.randn_like(gluon_launch.no_sums(q, pack, torch.zeros(0, dtype=torch.int64)))
    got = gluon_launch.gradient(sums, q, bounds, pack, 0.5)
    assert not got[40].any()
    torch.testing.assert_close(got, oracle.gradient(sums, q, bounds, pack, 0.5))


def test_op_runs_the_kernels_and_repeats_bit_for_bit():
    segments = rows([0, 40, 0, 40], [40, 24, 40, 60])
    tensors = random_inputs(64, 100, (4, 2), (16, 16), F16)
    options = {"scale": 0.2, "window": 33}

    def attend(*qkv, implementation="auto"):
        return varlen_attention(*qkv, segments, return_lse=True, implementation=implementation, **options)

    got, again = (with_gradients(attend, *tensors) for _ in range(2))
    assert all(torch.equal(got[name], again[name]) for name in got)
    compare(got, wanted(tensors, segments, **options), 4e-3)
    assert torch.equal(got["out"], attend(*tensors[:3], implementation="triton")[0])


@pytest.mark.parametrize("tokens", [(5, 0), (0, 5)], ids=["no keys", "no queries"])
def test_op_of_nothing(tokens):
    def attend(*qkv):
        return varlen_attention(*qkv, packed([]), return_lse=True, implementation="triton")

    got = with_gradients(attend, *random_inputs(*tokens, (2, 2), (16, 16), F16))
    assert not any(x.any() for x in got.values())


def test_op_takes_views_and_expanded_gradients():
    qkv = random_inputs(50, 50, (12, 12), (16, 16), F32)[0]
    got = {}
    for implementation in ("triton", "reference"):
        leaf = qkv.clone().requires_grad_()
        q, k, v = leaf[:, :4], leaf[:, 4:8], leaf[:, 8:].transpose(0, 1).contiguous().transpose(0, 1)
        varlen_attention(q, k, v, packed([30, 20]), implementation=implementation).sum().backward()
        got[implementation] = leaf.grad
    torch.testing.assert_close(got["triton"], got["reference"], rtol=1e-4, atol=1e-4)


def test_op_copies_no_operand_that_tma_can_read():
    """Keys and values side by side in a row, and one head whatever its stride, are read where they lie; what
    begins at an odd address, or has heads apart from each other, is not."""
    _, k, v, _, _ = random_inputs(1, 20, (2, 2), (64, 16), F32)
    one_head = torch.randn(20, 3, 64)[:, 1:2]
    for x in (k, v, one_head):
        assert triton_launch.aligned(x).data_ptr() == x.data_ptr()
    assert triton_launch.aligned(one_head).stride()[1] == 64
    for x in (torch.randn(20 * 2 * 64 + 1)[1:].view(20, 2, 64), torch.randn(20, 4, 64)[:, ::2]):
        assert triton_launch.aligned(x).data_ptr() != x.data_ptr()


def test_the_check_before_a_job_finds_the_kernels_right():
    noise = Noise.rich(Shape(2, 1, 16, 16), F16, torch.device("cpu"), scale=60)
    error = check_kernels(noise, Options(0.25, window=40, implementation="triton"))
    assert 0 < error < TOLERANCE[F16]
