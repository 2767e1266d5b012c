"""The CPU path against the dense oracle, as an op under PyTorch's own tools, and its errors."""

import pytest
import torch
from oracle import CASES, SHARD, WINDOWS, compare, packed, random_inputs, wanted, with_gradients
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from wlb_titan.kernels import op, reference, varlen_attention

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EMPTY = {"no_keys": (packed([]), 5, 0), "no_queries": (packed([]), 0, 5)}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", [*CASES, *EMPTY])
def test_matches_the_oracle(case, window):
    """Output, log-sum-exp and all gradients, in every dtype, grouped heads and values of another head dim."""
    segments, *tokens = (CASES | EMPTY)[case]
    for dtype, tolerance in TOLERANCE.items():
        for heads, dims in (((4, 1), (16, 16)), ((2, 2), (24, 8))):
            given = random_inputs(*tokens, heads, dims, dtype)
            got = with_gradients(
                lambda *qkv: varlen_attention(*qkv, segments, scale=0.2, window=window, return_lse=True),
                *given,
            )
            assert all(x.dtype == dtype for name, x in got.items() if name != "lse")
            compare(got, wanted(given, segments, 0.2, window), tolerance)
    padding = given[0].new_ones(tokens[0], dtype=torch.bool)
    for begin, length, *_ in segments.tolist():
        padding[begin : begin + length] = False
    out, lse = varlen_attention(*given[:3], segments, window=window, return_lse=True)
    assert torch.equal(torch.isposinf(lse).all(0), padding) and not out[padding].any()


def test_the_scale_is_that_of_the_head_dim():
    q, k, v, _, _ = random_inputs(9, 9, (2, 2), (16, 8), torch.float64)
    segments = packed([9])
    torch.testing.assert_close(
        varlen_attention(q, k, v, segments), varlen_attention(q, k, v, segments, scale=0.25)
    )


def test_op_is_well_formed():
    q, k, v, _, _ = random_inputs(13, 12, (4, 2), (8, 6), torch.float32)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), SHARD, 0.3, 4, "auto", 0)
    torch.library.opcheck(torch.ops.wlb_titan.varlen_attention.default, inputs)


def test_backward_finds_the_forwards_schedule(monkeypatch):
    """Autograd gives the backward the same segments tensor, so that its lookup is the quick one."""
    seen = []
    monkeypatch.setattr(reference, "forward", lambda *a: seen.append(a[3]) or real_forward(*a))
    monkeypatch.setattr(reference, "backward", lambda *a: seen.append(a[3]) or real_backward(*a))
    q, k, v, _, _ = random_inputs(13, 12, (4, 2), (8, 8), torch.float32)
    segments = SHARD.clone()
    for attend in (varlen_attention, lambda *x: checkpoint(varlen_attention, *x, use_reentrant=False)):
        attend(q.requires_grad_(), k, v, segments).sum().backward()
    assert len(seen) == 5 and all(x is segments for x in seen)


real_forward, real_backward = reference.forward, reference.backward


def test_kernels_are_launched_on_the_tensors_device():
    guard = op.current(torch.device("cuda", 3))
    assert isinstance(guard, torch.cuda.device) and guard.idx == 3


def test_new_segments_compile_nothing():
    """Not even their number does, or a single one, if the tensor's first dimension is marked as unbacked."""
    q, k, v, _, _ = random_inputs(16, 16, (2, 2), (8, 8), torch.float32)
    compiled = torch.compile(
        lambda q, k, v, s: varlen_attention(q, k, v, s).sin(), fullgraph=True, backend="aot_eager"
    )

    def unbacked(lengths):
        segments = packed(lengths)
        torch._dynamo.decorators.mark_unbacked(segments, 0)
        return segments

    compiled(q, k, v, unbacked([5, 11]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([1, 15], [16], [1] * 16, [5, 5, 6]):
            got = compiled(q, k, v, unbacked(lengths))
            torch.testing.assert_close(got, varlen_attention(q, k, v, packed(lengths)).sin())


def test_selective_checkpointing_saves_the_op():
    calls = 0

    def policy(ctx, op, *args, **kwargs):
        nonlocal calls
        if op == torch.ops.wlb_titan.varlen_attention.default:
            calls += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    given = random_inputs(13, 12, (4, 2), (8, 8), torch.float32)

    def plain(q, k, v):
        return varlen_attention(q.sin(), k, v, SHARD, return_lse=True)

    def checkpointed(q, k, v):
        return checkpoint(plain, q, k, v, use_reentrant=False, context_fn=contexts)

    compare(with_gradients(checkpointed, *given), with_gradients(plain, *given), 0.0)
    assert calls > 0


BAD_SEGMENTS = [
    ([[0, 4, 0, 4], [4, 5, 4, 5]], r"row 1 \(q_start 4, q_len 5, .*\) reaches past the 8 queries"),
    ([[0, 4, 0, 4], [4, 4, 5, 4]], r"row 1 .* reaches past the 8 keys"),
    ([[4, 4, 0, 4], [0, 5, 0, 5]], r"rows 1 and 0 overlap: queries 0 to 5 and 4 to 8"),
    ([[0, 4, 0, 3]], r"row 0 .* fewer keys than queries"),
    ([[0, 4, -1, 4]], r"row 0 .* negative"),
]
BAD_TENSORS = [
    (lambda q, k, v, s: (q[0], k, v, s), r"q must be \(tokens, heads, head dim\)"),
    (lambda q, k, v, s: (q, k.double(), v, s), "q is torch.float32 but k is torch.float64"),
    (lambda q, k, v, s: (q, k[:, :, :4], v, s), "q has head dim 8 but k has 4"),
    (lambda q, k, v, s: (q, k, v[:4], s), "differ in tokens or heads"),
    (lambda q, k, v, s: (q[:, :3], k, v, s), "3 query heads are not a multiple of 2"),
    (lambda q, k, v, s: (q, k.to("meta"), v, s), "q is on cpu but k is on meta"),
    (lambda q, k, v, s: (q.int(), k.int(), v.int(), s), "must be floating point"),
    (lambda q, k, v, s: (q, k, v, s.long()), "segments must be int32 on the CPU"),
    (lambda q, k, v, s: (q, k, v, s[:, :3]), r"segments must be \(S, 4\)"),
]
BAD_OPTIONS = [
    ({"window": 0}, "window is the number of keys that a query sees, got 0"),
    ({"scale": -1.0}, "scale must be positive, got -1.0"),
    ({"implementation": "fast"}, "'fast' is none of auto, reference, triton, gluon"),
    ({"implementation": "gluon"}, "'gluon' needs a CUDA device"),
]


def refused(message, *tensors, **options):
    with pytest.raises(ValueError, match=message):
        varlen_attention(*tensors, **options)


@pytest.mark.parametrize(("change", "message"), BAD_SEGMENTS + BAD_TENSORS + BAD_OPTIONS)
def test_what_is_refused(change, message):
    q, k, v, _, _ = random_inputs(8, 8, (4, 2), (8, 8), torch.float32)
    if isinstance(change, list):
        refused(message, q, k, v, torch.tensor(change, dtype=torch.int32))
    elif isinstance(change, dict):
        refused(message, q, k, v, packed([8]), **change)
    else:
        refused(message, *change(q, k, v, packed([8])))
