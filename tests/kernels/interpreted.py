"""The Triton kernels, run by Triton's interpreter on the CPU, against the dense float64 oracle.

Started by test_interpreter.py with TRITON_INTERPRET=1. Tiles are far smaller than those that ship, so that
short segments already have full, masked, partial and merged tiles; the interpreter does not mind. float16 and
float32 only: it computes bfloat16 products wrongly without a word.
"""

import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import attention, compare, packed, random_inputs, with_gradients
from test_tiles import segment_lists
from wlb_titan.kernels import reference, specialized_launch, triton_launch, varlen_attention
from wlb_titan.kernels.configs import Config, choose
from wlb_titan.kernels.schedule import schedule_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_interpreter.py"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
SHARD = torch.tensor(
    [[5, 3, 2, 9], [0, 5, 0, 5], [8, 1, 11, 1], [10, 2, 0, 12], [3, 0, 1, 4]], dtype=torch.int32
)


@contextmanager
def poisoned():
    """New tensors are full of NaN until something writes them."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(segments, q_tokens, kv_tokens, heads, dims, dtype, *, tma, forward, key, query, scale=0.2, seed=0):
    """Forward and every gradient of one call with these configurations, outputs poisoned beforehand."""
    q, k, v, dout = random_inputs(q_tokens, kv_tokens, *heads, *dims, dtype, seed=seed)
    schedule = schedule_of(segments, q_tokens, kv_tokens, q.device)
    with poisoned():
        out, lse = triton_launch.forward(q, k, v, schedule, scale, tma=tma, config=forward)
        grads = triton_launch.backward(
            dout, q, k, v, out, lse, schedule, scale, tma=tma, key_config=key, query_config=query
        )
    got = {"out": out} | {f"d{n}": x for n, x in zip("qkv", grads, strict=True)}
    wide = [x.double() for x in (q, k, v, dout)]
    want = with_gradients(lambda q, k, v: attention(q, k, v, segments, scale), *wide)
    compare(got, want, TOLERANCE[dtype])
    padding = torch.ones(q_tokens, dtype=torch.bool)
    for q_start, q_len, _, _ in segments.tolist():
        padding[q_start : q_start + q_len] = False
    assert (
        (out[padding] == 0).all() and (grads[0][padding] == 0).all() and torch.isposinf(lse[:, padding]).all()
    )


@st.composite
def configs(draw):
    """One for each pass: tiles of 16 or 32, packed heads, both forms of the key-tile pass."""
    size = st.sampled_from([16, 32])
    forward, query = (
        Config(draw(size), draw(size), 4, 1, pack=draw(st.sampled_from([1, 2, 4]))) for _ in range(2)
    )
    key = Config(
        draw(size),
        draw(size),
        4,
        1,
        pack=draw(st.sampled_from([1, 2, 4])),
        transposed=draw(st.booleans()),
        one_loop=draw(st.booleans()),
    )
    return {"forward": forward, "key": key, "query": query}


# No shrinking: one example takes a second or more.
@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    segment_lists(documents=5, longest=60),
    configs(),
    st.sampled_from([(1, 1), (4, 1), (8, 1), (4, 2), (3, 1)]),
    st.sampled_from([(16, 16), (24, 16), (16, 40)]),
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_ragged(case, configs, heads, dims, dtype, tma, seed):
    segments, q_tokens, kv_tokens = case
    segments = torch.from_numpy(segments)
    check(segments, q_tokens, kv_tokens, heads, dims, dtype, tma=tma, seed=seed, **configs)


SMALL = {"forward": Config(32, 32, 4, 1), "key": Config(32, 32, 4, 1), "query": Config(32, 32, 4, 1)}
PACKED = {
    "forward": Config(32, 32, 4, 1, pack=8),
    "key": Config(64, 32, 4, 1, pack=8),
    "query": Config(64, 32, 4, 1, pack=4),
}
CASES = {
    "one_token": (packed([1]), 1, 1),
    "one_token_each": (packed([1] * 9), 9, 9),
    "one_query_many_keys": (torch.tensor([[0, 1, 3, 290]], dtype=torch.int32), 1, 293),
    "ragged": (packed([60, 1, 300, 7]), 371, 368),
    "two_chunks": (torch.tensor([[0, 30, 0, 30], [30, 30, 0, 120]], dtype=torch.int32), 60, 120),
    "shard": (SHARD, 13, 12),
    "merged": (packed([5, 12, 3, 9, 20, 1, 1, 30]), 90, 81),
    "only_padding": (packed([]), 5, 3),
    "no_keys": (packed([]), 5, 0),
    "no_queries": (packed([]), 0, 5),
}


@pytest.mark.parametrize(
    ("dtype", "tma"), [(torch.float32, True), (torch.float16, False)], ids=["float32-tma", "float16-pointers"]
)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1)], ids=["group1", "group4", "group8"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "ragged"])
def test_shapes(case, heads, dtype, tma):
    configs = PACKED if heads == (8, 1) else SMALL
    check(*CASES[case], heads, (16, 16), dtype, tma=tma, **configs)


def test_ragged_up_to_300_tokens():
    check(*CASES["ragged"], (8, 1), (16, 16), torch.float32, tma=True, **PACKED)
    wide = {"forward": Config(64, 64, 4, 1), "key": Config(64, 64, 4, 1), "query": Config(64, 64, 4, 1)}
    check(*CASES["ragged"], (2, 2), (16, 16), torch.float16, tma=False, **wide)


@pytest.mark.parametrize("case", ["ragged", "shard", "merged", "only_padding", "no_keys"])
def test_op_specialized_forward(case):
    """The warp-specialized kernel's arithmetic; that it is specialized is test_compile.py's business."""
    segments, q_tokens, kv_tokens = CASES[case]
    q, k, v, _ = random_inputs(q_tokens, kv_tokens, 2, 1, 64, 64, torch.float16)
    schedule = schedule_of(segments, q_tokens, kv_tokens, q.device)
    with poisoned():
        out, lse = specialized_launch.forward(q, k, v, schedule, 0.1)
    want, want_lse = reference.forward(q.double(), k.double(), v.double(), segments, 0.1)
    compare({"out": out}, {"out": want}, 4e-3)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (64, 64), (256, 256), (128, 128)], ids=str)
def test_shapes_as_shipped(dims, tma):
    """The tables' own configurations, on segments of some tiles each."""
    for long in (True, False):
        configs = {
            name: choose(which, max(dims), long, tma)
            for name, which in (("forward", "forward"), ("key", "key_tiles"), ("query", "query_tiles"))
        }
        segments = torch.tensor([[0, 70, 0, 70], [70, 60, 70, 150]], dtype=torch.int32)
        check(segments, 130, 230, (2, 1), dims, torch.float16, tma=tma, **configs)


def test_op_runs_the_kernels_and_repeats_bit_for_bit():
    segments = torch.from_numpy(np.array([[0, 40, 0, 40], [40, 24, 40, 60]], dtype=np.int32))
    q, k, v, dout = random_inputs(64, 100, 4, 2, 16, 16, torch.float16)

    def attend(q, k, v):
        return varlen_attention(q, k, v, segments, scale=0.2)

    got, again = (with_gradients(attend, q, k, v, dout) for _ in range(2))
    assert all(torch.equal(got[name], again[name]) for name in got)
    wide = [x.double() for x in (q, k, v, dout)]
    compare(got, with_gradients(lambda q, k, v: attention(q, k, v, segments, 0.2), *wide), 4e-3)
    explicit = varlen_attention(q, k, v, segments, scale=0.2, implementation="triton")
    assert torch.equal(got["out"], explicit)


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
    with pytest.raises(ValueError, match="needs a GPU of compute capability 9"):
        varlen_attention(q.half(), k.half(), v.half(), packed([8]), implementation="gluon")
    with pytest.raises(ValueError, match="'fast' is none of"):
        varlen_attention(q, k, v, packed([8]), implementation="fast")
