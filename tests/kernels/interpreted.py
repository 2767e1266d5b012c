"""The Triton kernels, run by Triton's interpreter on the CPU, against the dense float64 oracle.

Started by test_interpreter.py with TRITON_INTERPRET=1. Tiles are far smaller than those that ship, so that
short segments already have full, masked, partial and merged tiles; the interpreter does not mind. float16 and
float32 only: it computes bfloat16 products wrongly without a word.
"""

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import (
    SHARD,
    attention_and_lse,
    compare,
    compare_all,
    packed,
    random_inputs,
    side_by_side,
    with_gradients,
)
from test_tiles import VISIBILITIES, segment_lists
from wlb_titan.kernels import gluon_launch, triton_launch, varlen_attention
from wlb_titan.kernels.schedule import schedule_of
from wlb_titan.kernels.segments import CAUSAL, Options, Saved, Shape, Visibility
from wlb_titan.kernels.self_check import Noise, check_kernels, poisoned
from wlb_titan.kernels.triton_launch import Config, choose

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_interpreter.py"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def check(
    segments,
    q_tokens,
    kv_tokens,
    heads,
    dims,
    dtype,
    *,
    tma,
    forward,
    key,
    query,
    visibility=CAUSAL,
    scale=0.2,
    seed=0,
):
    """Forward, log-sum-exp and every gradient of one call with these configurations, outputs poisoned
    beforehand, keys and values side by side in one row as context parallelism gathers them.
    """
    q, k, v, dout = random_inputs(q_tokens, kv_tokens, *heads, *dims, dtype, seed=seed)
    k, v = side_by_side(k, v)
    dlse = torch.randn(heads[0], q_tokens, generator=torch.Generator().manual_seed(seed))
    schedule = schedule_of(segments, q_tokens, kv_tokens, q.device, visibility)
    with poisoned():
        options = Options(scale, visibility)
        out, lse = triton_launch.forward(q, k, v, schedule, options, tma=tma, config=forward)
        padding = torch.isposinf(lse[0])
        grads = triton_launch.backward(
            dout,
            torch.where(padding, torch.nan, dlse),
            Saved(q, k, v, out, lse),
            schedule,
            options,
            tma=tma,
            key_config=key,
            query_config=query,
        )
    given = q, k, v, dout, dlse
    compare_all(out, lse, grads, given, segments, scale, visibility, TOLERANCE[dtype])


@st.composite
def configs(draw):
    """One for each pass: tiles of 16 or 32, both forms of the key-tile pass."""
    size = st.sampled_from([16, 32])
    forward, key, query = (Config(draw(size), draw(size), 4, 1) for _ in range(3))
    return {"forward": forward, "key": replace(key, transposed=draw(st.booleans())), "query": query}


# No shrinking, and an eighth of others' examples: one takes a second or more.
@settings(max_examples=settings().max_examples // 8, phases=[Phase.explicit, Phase.generate])
@given(
    segment_lists(documents=4, longest=40),
    st.sampled_from(VISIBILITIES),
    configs(),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 1)]),
    st.sampled_from([(16, 16), (24, 16), (48, 16), (16, 40), (72, 32)]),
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_ragged(case, visibility, configs, heads, dims, dtype, tma, seed):
    segments, *tokens = case
    segments = torch.from_numpy(segments)
    check(segments, *tokens, heads, dims, dtype, tma=tma, visibility=visibility, seed=seed, **configs)


SMALL = {"forward": Config(32, 32, 4, 1), "key": Config(32, 32, 4, 1), "query": Config(32, 32, 4, 1)}
GROUPED = {"forward": Config(32, 32, 4, 1), "key": Config(64, 32, 4, 1), "query": Config(64, 32, 4, 1)}
WIDE = {name: Config(64, 64, 4, 1) for name in SMALL}
CASES = {
    "one_token": (packed([1]), 1, 1),
    "one_token_each": (packed([1] * 9), 9, 9),
    "one_query_many_keys": (torch.tensor([[0, 1, 3, 290]], dtype=torch.int32), 1, 293),
    "ragged": (packed([60, 1, 200, 7]), 271, 268),
    "two_chunks": (torch.tensor([[0, 30, 0, 30], [30, 30, 0, 120]], dtype=torch.int32), 60, 120),
    "shard": (SHARD, 13, 12),
    "merged": (packed([5, 12, 3, 9, 20, 1, 1, 30]), 90, 81),
    "only_padding": (packed([]), 5, 3),
    "no_keys": (packed([]), 5, 0),
    "no_queries": (packed([]), 0, 5),
}


@pytest.mark.parametrize("case", [name for name in CASES if name != "ragged"])
def test_shapes(case):
    """Every case with one head a group in float32 by TMA, and with eight in float16 by pointers."""
    check(*CASES[case], (2, 2), (16, 16), torch.float32, tma=True, **SMALL)
    check(*CASES[case], (8, 1), (16, 16), torch.float16, tma=False, **GROUPED)


@pytest.mark.parametrize("visibility", [*VISIBILITIES, Visibility(window=100)], ids=str)
def test_masks(visibility):
    """Blocks that are masked at their start, at their end, at both and not at all, by either pass's loops."""
    options = {"visibility": visibility}
    check(*CASES["ragged"], (4, 1), (16, 16), torch.float32, tma=True, **WIDE, **options)
    check(*CASES["two_chunks"], (8, 1), (16, 16), torch.float16, tma=False, **GROUPED, **options)


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_shapes_as_shipped(dims, tma):
    """The tables' own configurations, on segments of some tiles each."""
    segments = torch.tensor([[0, 70, 0, 70], [70, 60, 70, 150]], dtype=torch.int32)
    names = (("forward", "forward"), ("key", "key_tiles"), ("query", "query_tiles"))
    configs = {name: choose(which, dims, tma) for name, which in names}
    check(segments, 130, 230, (2, 1), dims, torch.float16, tma=tma, **configs)


@pytest.mark.parametrize("pack", [1, 4, 8])
def test_row_statistics(pack):
    """In the order of the Gluon backward's steps, where heads are packed."""
    out, dout = (torch.randn(37, 8, 24, dtype=torch.float16) for _ in range(2))
    lse, dlse = (torch.randn(8, 37) for _ in range(2))
    lse[:, 5], dlse[:, 5] = torch.inf, torch.nan
    delta = (out.float() * dout.float()).sum(-1).T - torch.where(torch.isinf(lse), 0.0, dlse)
    got = triton_launch.row_statistics(dout, dlse, out, lse, pack)
    for rows, want in zip(got, (lse * math.log2(math.e), delta), strict=True):
        packed_rows = want.view(8 // pack, pack, 37).transpose(1, 2).flatten(1)
        torch.testing.assert_close(rows[:, : 37 * pack], packed_rows)


@pytest.mark.parametrize(("dim", "pack"), [(64, 1), (128, 2), (64, 8)])
def test_sums_of_dq(dim, pack):
    """Of the Gluon backward: put back in order, scaled and rounded, without the rows past the end, and zero
    where a token has no keys and nobody wrote.
    """
    q = torch.zeros(150, 3 * pack, dim, dtype=torch.float16)
    want = torch.randn(150, 3 * pack, dim)
    want[40] = torch.nan
    bounds = torch.tensor([[5] * 150, [9] * 150], dtype=torch.int32)
    bounds[:, 40] = 0
    tokens = 64 // pack
    blocks = torch.nn.functional.pad(want, (0, 0, 0, 0, 0, -150 % tokens)).view(-1, tokens, 3, pack, dim)
    rows = blocks.transpose(1, 2).reshape(-1, 3, 4, 2, 8, 2, dim // 16, 4, 2)
    sums = rows.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).reshape(-1, gluon_launch.WIDTH)
    want[40] = 0.0
    torch.testing.assert_close(gluon_launch.gradient(sums, q, bounds, pack, 0.5), (0.5 * want).half())


def test_op_runs_the_kernels_and_repeats_bit_for_bit():
    segments = torch.tensor([[0, 40, 0, 40], [40, 24, 40, 60]], dtype=torch.int32)
    q, k, v, dout = random_inputs(64, 100, 4, 2, 16, 16, torch.float16)
    sinks, dlse = torch.randn(4), torch.randn(4, 64)
    options = {"scale": 0.2, "window": 33}

    def attend(q, k, v, sinks, implementation="auto"):
        return varlen_attention(
            q, k, v, segments, sinks=sinks, return_lse=True, implementation=implementation, **options
        )

    tensors = (q, k, v, sinks, dout, dlse)
    got, again = (with_gradients(attend, *tensors) for _ in range(2))
    assert all(torch.equal(got[name], again[name]) for name in got)
    wide = [x.double() for x in tensors]
    want = with_gradients(lambda q, k, v, s: attention_and_lse(q, k, v, segments, sinks=s, **options), *wide)
    compare(got, want, 4e-3)
    assert torch.equal(got["out"], attend(q, k, v, sinks, "triton")[0])


def test_op_takes_views_and_expanded_gradients():
    segments = packed([30, 20])
    qkv = random_inputs(50, 50, 12, 12, 16, 16, torch.float32)[0]
    got = {}
    for implementation in ("triton", "reference"):
        leaf = qkv.clone().requires_grad_()
        q, k, v = leaf[:, :4], leaf[:, 4:8], leaf[:, 8:].transpose(0, 1).contiguous().transpose(0, 1)
        varlen_attention(q, k, v, segments, implementation=implementation).sum().backward()
        got[implementation] = leaf.grad
    torch.testing.assert_close(got["triton"], got["reference"], rtol=1e-4, atol=1e-4)


def test_op_refuses_what_the_kernels_cannot_do():
    q, k, v, _ = random_inputs(8, 8, 2, 2, 12, 16, torch.float32)
    with pytest.raises(ValueError, match="multiples of 8 up to 256, but q has 12"):
        varlen_attention(q, k, v, packed([8]), implementation="triton")
    q, k, v, _ = random_inputs(8, 8, 2, 2, 16, 16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"got torch\.bfloat16"):
        varlen_attention(q, k, v, packed([8]), implementation="triton")


def test_op_copies_no_operand_that_tma_can_read():
    """Keys and values side by side in a row, and one head whatever its stride, are read where they lie."""
    k, v = side_by_side(torch.randn(20, 2, 64), torch.randn(20, 2, 16))
    one_head = torch.randn(20, 3, 64)[:, 1:2]
    for x in (k, v, one_head):
        assert triton_launch.aligned(x).data_ptr() == x.data_ptr()
    assert triton_launch.aligned(one_head).stride()[1] == 64
    odd = torch.randn(20 * 2 * 64 + 1)[1:].view(20, 2, 64)
    assert triton_launch.aligned(odd).data_ptr() != odd.data_ptr()


def test_the_check_before_a_job_finds_the_kernels_right():
    options = Options(0.25, Visibility(window=40), implementation="triton")
    noise = Noise.rich(Shape(4, 2, 16, 16), torch.float16, torch.device("cpu"), scale=60)
    error = check_kernels(noise, options)
    assert 0 < error < TOLERANCE[torch.float16]
