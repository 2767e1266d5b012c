"""What computes attention: the rule, and that [wlb.attention] implementation reaches every call."""

import typing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from wlb_titan.kernels import gluon_launch, op, reference, triton_launch
from wlb_titan.kernels.implementations import IMPLEMENTATIONS, Device, chosen
from wlb_titan.kernels.segments import Shape
from wlb_titan.kernels.self_check import KernelError

from wlb_titan.config.settings import AttentionSettings
from wlb_titan.context.layout import segments, segments_after, whole_sequence
from wlb_titan.errors import UserError

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
HOPPER, AMPERE, UNKNOWN, CPU = Device("cuda", (9, 0)), Device("cuda", (8, 0)), Device("cuda"), Device("cpu")
PASSED = HOPPER._replace(passed=frozenset({((128, 128), BF16)}))
SHORT, LONG = 256, 2048  # tokens of a document, whose attention counts as short or long


def test_the_key_takes_what_the_kernels_have():
    assert typing.get_args(typing.get_type_hints(AttentionSettings)["implementation"]) == IMPLEMENTATIONS


@pytest.mark.parametrize(
    ("wish", "dim", "device", "expected"),
    [
        ("auto", 128, HOPPER, "gluon, then triton"),
        ("auto", 128, PASSED, "gluon"),
        ("auto", 64, HOPPER, "triton"),
        ("auto", 128, AMPERE, "triton"),
        ("auto", 128, UNKNOWN, "triton"),
        ("auto", 7, CPU, "reference"),
        ("triton", 128, HOPPER, "triton"),
        ("gluon", 64, HOPPER, "gluon"),
        ("gluon", 128, UNKNOWN, "gluon"),
        ("reference", 7, HOPPER, "reference"),
    ],
)
def test_what_is_chosen(wish, dim, device, expected):
    found = [chosen(which, wish, (dim, dim), BF16, device) for which in ("forward", "backward")]
    assert ", then ".join(dict.fromkeys(found)) == expected


def test_a_record_is_of_head_dims_and_dtype():
    assert chosen("backward", "auto", (128, 128), torch.float16, PASSED) == "triton"


@pytest.mark.parametrize(
    ("wish", "dim", "dtype", "device", "reason"),
    [
        ("gluon", 128, BF16, AMPERE, "needs a GPU of compute capability 9"),
        ("gluon", 96, BF16, UNKNOWN, r"head dims \(64, 128\), but q has 96"),
        ("auto", 128, torch.float32, HOPPER, "got torch.float32"),
        ("auto", 128, BF16, Device("cuda", (7, 5)), "needs? compute capability 8.0"),
        ("triton", 264, BF16, UNKNOWN, "up to 256, but q has 264"),
        ("triton", 128, BF16, CPU, "needs a CUDA device"),
        ("fast", 128, BF16, HOPPER, "'fast' is none of auto, reference, triton, gluon"),
    ],
)
def test_what_is_refused(wish, dim, dtype, device, reason):
    with pytest.raises(ValueError, match=reason):
        chosen("forward", wish, (dim, dim), dtype, device)


MARGIN = 16


def configured(attention):
    """What is read of a configuration."""
    training = SimpleNamespace(mixed_precision_param="bfloat16")
    return SimpleNamespace(training=training, wlb=SimpleNamespace(attention=attention, device="auto"))


@pytest.fixture
def on_hopper(monkeypatch):
    """The CPU taken for a Hopper GPU, whose launches compute by the reference; and which of them ran."""
    ran = []

    def launch(name, compute):
        def call(*tensors, **_):
            *inputs, schedule, options = tensors
            assert options.sm_margin == MARGIN
            ran.append(name)
            return compute(*inputs, torch.from_numpy(schedule.segments.copy()), options)

        return call

    for module, name in ((gluon_launch, "gluon"), (triton_launch, "triton")):
        monkeypatch.setattr(module, "forward", launch(name, reference.forward))
        monkeypatch.setattr(module, "backward", launch(name, reference.backward))
    monkeypatch.setattr(op, "device_of", lambda device: HOPPER)
    return ran


def passes(ran, implementation, length, sliced, compiled):
    """What the forward and the backward pass of a layer ran, for one document or the last half of it."""
    from wlb_titan.runtime.attention.kv_cache import KeyValueCache
    from wlb_titan.runtime.attention.module import DocumentAttention, DocumentMask

    cache = KeyValueCache()
    layer = DocumentAttention.Config(implementation=implementation, sm_margin=MARGIN).build()
    attend = torch.compile(layer, backend="aot_eager") if compiled else layer
    del ran[:]
    for tokens in [length // 2] * 2 if sliced else [length]:
        before = length - tokens if ran else 0
        own = segments_after(
            segments(whole_sequence(np.array([tokens])), np.array([tokens])),
            np.array([tokens]),
            np.array([before]),
        )
        extra = {}
        if sliced:
            extra = {"rows": torch.tensor([[0, before, tokens, length]]), "cache": cache.number}
        mask = DocumentMask(torch.from_numpy(own), **extra)
        q, k, v = (torch.randn(1, tokens, 1, 128, dtype=BF16, requires_grad=True) for _ in range(3))
        out = attend(q, k, v, attention_masks=mask)
    out.sum().backward()
    return ran[-2], ran[-1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_it_reaches_every_call(on_hopper, sliced, compiled):
    for implementation in ("triton", "gluon"):
        assert passes(on_hopper, implementation, SHORT, sliced, compiled) == (implementation, implementation)
    if not compiled:
        assert passes(on_hopper, "auto", SHORT, sliced, compiled) == ("gluon", "triton")


@pytest.mark.parametrize(
    ("policy", "settings", "expected"),
    [
        ("per_document", {}, [(12, 4)] * 4),
        ("ulysses", {}, [(3, 1)] * 4),
        ("own_policies.ulysses_gather:UlyssesGather", {"within": 2}, [(6, 2)] * 4),
    ],
)
def test_kernels_are_compiled_for_the_heads_that_a_rank_has(policy, settings, expected):
    from wlb_titan.context.strategy import STRATEGIES
    from wlb_titan.cost.degrees import Degrees
    from wlb_titan.cost.models import ModelShape
    from wlb_titan.job import Job
    from wlb_titan.runtime.attention.implementation import attention_shape, windows

    model = ModelShape(
        layers=4, hidden=64, heads=24, kv_heads=8, head_dim=64, feed_forward=64, vocabulary=64,
        windows=((512, 2), (128, 1)),
    )  # fmt: skip
    job = Job(
        window=1024,
        micro_batches=1,
        model=model,
        degrees=Degrees(tensor=2, context=4),
        sharding=STRATEGIES.configure(policy, **settings),
    )
    shapes = [attention_shape(job, rank) for rank in range(4)]
    assert [(shape.q_heads, shape.kv_heads) for shape in shapes] == expected
    assert windows(job) == [None, 512, 128]


def test_kernels_that_do_not_work_on_a_gpu_end_the_job(monkeypatch):
    """With the window and the implementation that were checked, and what to set instead."""
    from wlb_titan.runtime.attention import implementation

    shape, cuda = Shape(8, 2, 128, 128), torch.device("cuda")

    def check(noise, options):
        assert noise == (shape, BF16, cuda) and options.implementation == "auto"
        if options.window == 512:
            raise KernelError("dq is 0.3 of its norm away")
        return 0.003

    monkeypatch.setattr(implementation, "warm_up", lambda *_: 1)
    monkeypatch.setattr(implementation, "check_kernels", check)
    monkeypatch.setattr(implementation.Noise, "rich", lambda *given: given)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    config = configured(AttentionSettings(implementation="auto"))
    implementation._prepare(config, shape, None, "gluon", cuda)
    reason = r"kernels with a window of 512 \(gluon\) do not work on this NVIDIA H100: dq is .* \"triton\""
    with pytest.raises(UserError, match=reason):
        implementation._prepare(config, shape, 512, "gluon", cuda)


def test_a_step_compares_gluons_backward_with_tritons(on_hopper, monkeypatch):
    """One layer's, in the steps that are asked for; what is too far away ends the run."""
    from wlb_titan.runtime.attention.implementation import ask_comparison, compared_difference

    settings = AttentionSettings(compare_every=3)
    assert [step for step in range(1, 8) if ask_comparison(settings, step)] == [3, 6]
    assert compared_difference(6) == -1.0, "no pass came"
    assert not ask_comparison(AttentionSettings(compare_every=0), 3)

    def difference(step, layers=2):
        asked = ask_comparison(settings, step)
        ran = []
        for _ in range(layers):
            passes(on_hopper, "gluon", SHORT, False, False)
            ran += on_hopper[1:]
        return ran, compared_difference(step) if asked else None

    assert difference(2) == (["gluon"] * 2, None)
    assert difference(3) == (["gluon", "triton", "gluon"], 0.0)
    right = triton_launch.backward

    def wrong(*tensors, factor, **options):
        dq, dk, dv = right(*tensors, **options)
        return dq, dk * factor, dv

    monkeypatch.setattr(triton_launch, "backward", partial(wrong, factor=1.01))
    assert difference(3)[1] == pytest.approx(0.01, rel=0.5)
    for factor in (1.03, torch.nan):
        monkeypatch.setattr(triton_launch, "backward", partial(wrong, factor=factor))
        with pytest.raises(RuntimeError, match=r"step 6 a layer's gradients by Gluon .* \"triton\""):
            difference(6)
    ask_comparison(settings, 3)
    passes(on_hopper, "triton", SHORT, False, False)
    assert compared_difference(3) == -1.0, "nothing was by Gluon"
