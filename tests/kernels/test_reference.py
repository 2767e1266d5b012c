"""The CPU path against the dense oracle, as an op under PyTorch's own tools, and its errors."""

import pytest
import torch
from oracle import SHARD, attention, attention_and_lse, compare, packed, random_inputs, with_gradients
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from wlb_titan.kernels import op, reference, varlen_attention


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize(
    ("segments", "q_tokens", "kv_tokens"),
    [(SHARD, 13, 12), (packed([1, 300, 7, 512, 40]), 870, 860), (packed([]), 4, 4)],
    ids=["shard", "documents", "padding_only"],
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "v_dim"), [(4, 1, 16, 16), (2, 2, 24, 8)], ids=["gqa4", "mla"]
)
def test_matches_the_oracle(segments, q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim, dtype, tolerance):
    q, k, v, dout = random_inputs(q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim, dtype)
    got = with_gradients(lambda q, k, v: varlen_attention(q, k, v, segments), q, k, v, dout)
    wide = [x.double() for x in (q, k, v, dout)]
    want = with_gradients(lambda q, k, v: attention(q, k, v, segments, dim**-0.5), *wide)
    assert all(x.dtype == dtype for x in got.values())
    compare(got, want, tolerance)


MASKS = [{}, {"window": 1}, {"window": 5}, {"window": 100}, {"causal": False}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("segments", "q_tokens", "kv_tokens"),
    [(SHARD, 13, 12), (packed([1, 150, 7, 240, 40]), 440, 438)],
    ids=["shard", "documents"],
)
def test_masks_sinks_and_log_sum_exp(segments, q_tokens, kv_tokens, mask):
    """Everything at once, gradients of and through sinks and log-sum-exp included."""
    q, k, v, dout = random_inputs(q_tokens, kv_tokens, 4, 2, 16, 8, torch.float64)
    sinks, dlse = torch.randn(4, dtype=torch.float64), torch.randn(4, q_tokens, dtype=torch.float64)

    def ours(q, k, v, sinks):
        return varlen_attention(q, k, v, segments, sinks=sinks, return_lse=True, **mask)

    def wanted(q, k, v, sinks):
        return attention_and_lse(q, k, v, segments, 16**-0.5, sinks=sinks, **mask)

    tensors = (q, k, v, sinks, dout, dlse)
    compare(with_gradients(ours, *tensors), with_gradients(wanted, *tensors), 1e-7)
    out, lse = ours(q, k, v, sinks)
    padding = out.abs().sum((1, 2)) == 0
    assert padding.any() and torch.isposinf(lse[:, padding]).all() and torch.isfinite(lse[:, ~padding]).all()


def test_not_causal_with_fewer_keys_than_queries():
    segments = torch.tensor([[0, 9, 2, 3], [9, 2, 0, 0]], dtype=torch.int32)
    q, k, v, dout = random_inputs(11, 5, 2, 1, 8, 8, torch.float64)
    ours = with_gradients(lambda q, k, v: varlen_attention(q, k, v, segments, causal=False), q, k, v, dout)
    compare(
        ours,
        with_gradients(lambda q, k, v: attention(q, k, v, segments, 8**-0.5, causal=False), q, k, v, dout),
        1e-12,
    )


def test_gradient_of_the_log_sum_exp_alone():
    q, k, v, _ = random_inputs(13, 12, 2, 2, 8, 8, torch.float64)
    got, want = [], []
    for found, attend in ((got, varlen_attention), (want, attention_and_lse)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"return_lse": True} if attend is varlen_attention else {}
        lse = attend(*leaves, SHARD, scale=0.3, **options)[1]
        found += torch.autograd.grad(lse[:, :9].square().sum(), leaves[:2])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_op_is_well_formed():
    q, k, v, _ = random_inputs(13, 12, 4, 2, 8, 6, torch.float32)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), SHARD, 0.3, True, 4, "auto", 0)
    torch.library.opcheck(torch.ops.wlb_titan.varlen_attention.default, inputs)


def test_backward_finds_the_forwards_schedule(monkeypatch):
    """Autograd gives the backward the same segments tensor, so that its lookup is the quick one."""
    seen = []
    monkeypatch.setattr(reference, "forward", lambda *a: seen.append(a[3]) or real_forward(*a))
    monkeypatch.setattr(reference, "backward", lambda *a: seen.append(a[3]) or real_backward(*a))
    q, k, v, _ = random_inputs(13, 12, 4, 2, 8, 8, torch.float32)
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
    q, k, v, _ = random_inputs(16, 16, 2, 2, 8, 8, torch.float32)
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

    q, k, v, dout = random_inputs(13, 12, 4, 2, 8, 8, torch.float32)

    def plain(q, k, v):
        return varlen_attention(q.sin(), k, v, SHARD)

    def checkpointed(q, k, v):
        return checkpoint(plain, q, k, v, use_reentrant=False, context_fn=contexts)

    compare(with_gradients(checkpointed, q, k, v, dout), with_gradients(plain, q, k, v, dout), 0.0)
    assert calls > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 4, 0, 4], [4, 5, 4, 5]], r"row 1 \(q_start 4, q_len 5, .*\) reaches past the 8 queries"),
        ([[0, 4, 0, 4], [4, 4, 5, 4]], r"row 1 .* reaches past the 8 keys"),
        ([[4, 4, 0, 4], [0, 5, 0, 5]], r"rows 1 and 0 overlap: queries 0 to 5 and 4 to 8"),
        ([[0, 4, 0, 3]], r"row 0 .* fewer keys than queries"),
        ([[0, 4, -1, 4]], r"row 0 .* negative"),
    ],
)
def test_bad_segments(rows, message):
    q, k, v, _ = random_inputs(8, 8, 2, 2, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=message):
        varlen_attention(q, k, v, torch.tensor(rows, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, s: (q[0], k, v, s), r"q must be \(tokens, heads, head dim\)"),
        (lambda q, k, v, s: (q, k.double(), v, s), "q is torch.float32 but k is torch.float64"),
        (lambda q, k, v, s: (q, k[:, :, :4], v, s), "q has head dim 8 but k has 4"),
        (lambda q, k, v, s: (q, k, v[:4], s), "differ in tokens or heads"),
        (lambda q, k, v, s: (q[:, :3], k, v, s), "3 query heads are not a multiple of 2"),
        (lambda q, k, v, s: (q, k.to("meta"), v, s), "q is on cpu but k is on meta"),
        (lambda q, k, v, s: (q.int(), k.int(), v.int(), s), "must be floating point"),
        (lambda q, k, v, s: (q, k, v, s.long()), "segments must be int32 on the CPU"),
        (lambda q, k, v, s: (q, k, v, s[:, :3]), r"segments must be \(S, 4\)"),
    ],
)
def test_bad_tensors(change, message):
    q, k, v, _ = random_inputs(8, 8, 4, 2, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=message):
        varlen_attention(*change(q, k, v, packed([8])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is the number of keys that a query sees, got 0"),
        ({"window": 4, "causal": False}, "a window needs causal attention"),
        ({"implementation": "fast"}, "'fast' is none of auto, reference, triton, gluon"),
        ({"implementation": "gluon"}, "'gluon' needs a CUDA device"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \(4,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "floating-point"),
    ],
)
def test_bad_options(options, message):
    q, k, v, _ = random_inputs(8, 8, 4, 2, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=message):
        varlen_attention(q, k, v, packed([8]), **options)
