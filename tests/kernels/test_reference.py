"""The CPU path against the dense oracle, as an op under PyTorch's own tools, and its errors."""

from functools import partial

import pytest
import torch
from oracle import CASES, SHARD, WINDOWS, compare, packed, random_inputs, rows, wanted, with_gradients
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from wlb_titan.kernels import op, reference, varlen_attention

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EMPTY = {"no_keys": (packed([]), 5, 0), "no_queries": (packed([]), 0, 5)}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", [*CASES, *EMPTY])
def test_matches_the_oracle(case, window):
    """Output, log-sum-exp and all gradients, in every dtype, grouped heads and values of another head dim."""
    segments, *tokens = (CASES | EMPTY)[case]
    options = {"scale": 0.2, "window": window, "return_lse": True}
    for dtype, tolerance in TOLERANCE.items():
        for heads, dims in (((4, 1), (16, 16)), ((2, 2), (24, 8))):
            given = random_inputs(*tokens, heads, dims, dtype)
            got = with_gradients(lambda *qkv: varlen_attention(*qkv, segments, **options), *given)
            assert all(x.dtype == dtype for name, x in got.items() if name != "lse")
            compare(got, wanted(given, segments, 0.2, window), tolerance)
    padding = given[0].new_ones(tokens[0], dtype=torch.bool)
    for begin, length, *_ in segments.tolist():
        padding[begin : begin + length] = False
    out, lse = varlen_attention(*given[:3], segments, window=window, return_lse=True)
    assert torch.equal(torch.isposinf(lse).all(0), padding) and not out[padding].any()


def test_the_scale_is_that_of_the_head_dim():
    q, k, v, _, _ = random_inputs(9, 9, (2, 2), (16, 8), torch.float64)
    own, given = (varlen_attention(q, k, v, packed([9]), **options) for options in ({}, {"scale": 0.25}))
    torch.testing.assert_close(own, given)


def test_op_is_well_formed():
    q, k, v, _, _ = random_inputs(13, 12, (4, 2), (8, 6), torch.float32)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), SHARD, 0.3, 4, "auto", 0)
    torch.library.opcheck(torch.ops.wlb_titan.varlen_attention.default, inputs)


def test_a_second_derivative_is_refused_and_not_zero():
    """Also where the first one was linear in the output, so that no gradient of an output is tracked."""
    q, k, v, _, _ = random_inputs(9, 9, (2, 2), (16, 16), torch.float64)
    q.requires_grad_()
    for power in (1, 2):
        out = varlen_attention(q, k, v, packed([9]))
        (first,) = torch.autograd.grad((out**power).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="wlb_titan::varlen_attention has no second derivative"):
            first.square().sum().backward()


def test_backward_finds_the_forwards_schedule(monkeypatch):
    """Autograd gives the backward the same segments tensor, so that its lookup is the quick one."""
    seen = []
    monkeypatch.setattr(reference, "forward", lambda *a: seen.append(a[3]) or real_forward(*a))
    monkeypatch.setattr(reference, "backward", lambda *a: seen.append(a[3]) or real_backward(*a))
    q, k, v, _, _ = random_inputs(13, 12, (4, 2), (8, 8), torch.float32)
    segments, plain = SHARD.clone(), partial(varlen_attention, implementation="reference")
    for attend in (plain, lambda *x: checkpoint(plain, *x, use_reentrant=False)):
        attend(q.requires_grad_(), k, v, segments).sum().backward()
    assert len(seen) == 5 and all(x is seen[0] for x in seen)


real_forward, real_backward = reference.forward, reference.backward


def test_kernels_are_launched_on_the_tensors_device():
    guard = op.current(torch.device("cuda", 3))
    assert isinstance(guard, torch.cuda.device) and guard.idx == 3


def test_new_segments_compile_nothing():
    """Not even their number does, or a single one, if the tensor's first dimension is marked as unbacked."""
    q, k, v, _, _ = random_inputs(16, 16, (2, 2), (8, 8), torch.float32)
    plain = lambda q, k, v, s: varlen_attention(q, k, v, s).sin()  # noqa: E731
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")

    def unbacked(lengths):
        segments = packed(lengths)
        torch._dynamo.decorators.mark_unbacked(segments, 0)
        return segments

    compiled(q, k, v, unbacked([5, 11]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([1, 15], [16], [1] * 16, [5, 5, 6]):
            got = compiled(q, k, v, unbacked(lengths))
            torch.testing.assert_close(got, varlen_attention(q, k, v, packed(lengths)).sin())


def test_selective_checkpointing_saves_the_op(monkeypatch):
    forwards = []
    monkeypatch.setattr(reference, "forward", lambda *a: forwards.append(a) or real_forward(*a))

    def policy(ctx, op, *_, **__):
        ours = op == torch.ops.wlb_titan.varlen_attention.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    given = random_inputs(13, 12, (4, 2), (8, 8), torch.float32)

    def plain(q, k, v):
        return varlen_attention(q.sin(), k, v, SHARD, return_lse=True, implementation="reference")

    def checkpointed(q, k, v):
        return checkpoint(plain, q, k, v, use_reentrant=False, context_fn=contexts)

    got = with_gradients(checkpointed, *given)
    assert len(forwards) == 1, "not computed again"
    compare(got, with_gradients(plain, *given), 0.0)


BAD = [
    ({"segments": rows([0, 4, 0, 4], [4, 5, 4, 5])}, r"row 1 \(q_start 4, .*\) reaches past the 8 queries"),
    ({"segments": rows([0, 4, 0, 4], [4, 4, 5, 4])}, "row 1 .* reaches past the 8 keys"),
    ({"segments": rows([4, 4, 0, 4], [0, 5, 0, 5])}, "rows 1 and 0 overlap: queries 0 to 5 and 4 to 8"),
    ({"segments": rows([0, 4, 0, 3])}, "row 0 .* fewer keys than queries"),
    ({"segments": rows([0, 4, -1, 4])}, "row 0 .* negative"),
    ({"segments": torch.Tensor.long}, "segments must be int32 on the CPU"),
    ({"segments": lambda segments: segments[:, :3]}, r"segments must be \(S, 4\)"),
    ({"q": lambda q: q[0]}, r"q must be \(tokens, heads, head dim\)"),
    ({"q": lambda q: q[:, :3]}, "3 query heads are not a multiple of 2"),
    ({"k": torch.Tensor.double}, "q is torch.float32 but k is torch.float64"),
    ({"k": lambda k: k[:, :, :4]}, "q has head dim 8 but k has 4"),
    ({"k": lambda k: k.to("meta")}, "q is on cpu but k is on meta"),
    ({"v": lambda v: v[:4]}, "differ in tokens or heads"),
    (dict.fromkeys("qkv", torch.Tensor.int), "must be floating point"),
    ({"window": 0}, "window is the number of keys that a query sees, got 0"),
    ({"scale": -1.0}, "scale must be positive, got -1.0"),
    ({"implementation": "gluon"}, "'gluon' needs a CUDA device"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_is_refused(changes, message):
    q, k, v, _, _ = random_inputs(8, 8, (4, 2), (8, 8), torch.float32)
    given = {"q": q, "k": k, "v": v, "segments": packed([8])}
    given |= {name: x(given[name]) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(ValueError, match=message):
        varlen_attention(**given)
