"""What computes attention: the rule, and that [wlb.attention] implementation reaches every call."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import planning
import pytest
import torch
from wlb_titan.kernels import gluon_launch, op, reference, self_check, triton_launch
from wlb_titan.kernels.implementations import PASSES, Device, chosen, device_of, load
from wlb_titan.kernels.segments import Options, Shape

from wlb_titan.config.settings import AttentionSettings
from wlb_titan.context.layout import segments, segments_after, whole_sequence
from wlb_titan.context.strategy import STRATEGIES
from wlb_titan.cost.attention_kernels import gluon_tilings, taken
from wlb_titan.cost.profile import TILES_OF
from wlb_titan.dimensions.degrees import Degrees
from wlb_titan.errors import UserError
from wlb_titan.runtime.attention import implementation
from wlb_titan.runtime.attention.kv_cache import KeyValueCache
from wlb_titan.runtime.attention.module import DocumentAttention, DocumentMask
from wlb_titan.runtime.models.bases import base_config

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
HOPPER, AMPERE, UNKNOWN, CPU = Device("cuda", (9, 0)), Device("cuda", (8, 0)), Device("cuda"), Device("cpu")
AMD = Device("cuda", (9, 4), hip=True)
BLACKWELL = Device("cuda", (10, 0))
OTHERS = [AMPERE, *(Device("cuda", capability) for capability in ((8, 9), (10, 0), (12, 0))), UNKNOWN]
LAYERS = {  # head dims of q and v, and what else decides
    "64": ((64, 64), {}),
    "128": ((128, 128), {}),
    "112": ((112, 112), {}),
    "256": ((256, 256), {}),
    "latent": ((192, 128), {}),
    "sinks": ((64, 64), {"lse_gradient": True}),
    "window": ((128, 128), {"windowed": True}),
}
MIXED = "gluon, then triton"
SINKS = "torch, then triton"
CPU_OTHERS = ["reference", "torch_cpu, then reference", "reference"]
TAKEN = [  # by "auto" in the layers above, and by "torch"
    *((gpu, "auto", ["torch"] * 4 + ["triton", SINKS, "torch"]) for gpu in OTHERS),
    (HOPPER, "auto", ["triton", MIXED, "triton", "triton", "triton", "triton", MIXED]),
    (AMD, "auto", ["triton"] * 7),
    *((CPU, wish, ["torch_cpu"] * 4 + CPU_OTHERS) for wish in ("auto", "torch")),
    *((gpu, "torch", ["torch"] * 4 + ["triton", SINKS, "torch"]) for gpu in (HOPPER, *OTHERS)),
    *((gpu, "triton", ["triton"] * 7) for gpu in (HOPPER, AMPERE)),
    *((device, "reference", ["reference"] * 7) for device in (HOPPER, CPU)),
    (Device("cpu", interpreted=True), "auto", ["reference"] * 7),  # in bfloat16, which it computes wrongly
]


def passes_of(wish, dims, dtype, device, **others):
    found = [chosen(which, wish, dims, dtype, device, **others) for which in PASSES]
    return ", then ".join(dict.fromkeys(found))


@pytest.mark.parametrize(("device", "wish", "expected"), TAKEN)
def test_what_is_chosen(device, wish, expected):
    found = [passes_of(wish, dims, BF16, device, **others) for dims, others in LAYERS.values()]
    assert dict(zip(LAYERS, found, strict=True)) == dict(zip(LAYERS, expected, strict=True))


def test_what_is_chosen_by_dtype_and_head_dims_that_few_can():
    assert passes_of("auto", (7, 7), torch.float32, CPU) == "torch_cpu"
    assert passes_of("auto", (64, 64), torch.float64, CPU) == "reference"
    assert passes_of("auto", (64, 64), torch.float32, Device("cpu", interpreted=True)) == "triton"
    for dim in (64, 128):
        assert passes_of("gluon", (dim, dim), BF16, HOPPER) == "gluon"
        assert passes_of("gluon", (dim, dim), BF16, UNKNOWN) == "gluon"


@pytest.fixture
def with_fa4(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace())
    chosen.cache_clear()
    yield
    chosen.cache_clear()


def test_what_is_chosen_where_flash_attn_4_is_installed(with_fa4):
    wishes = {device: "fa4" if device is HOPPER else "auto" for device in (BLACKWELL, HOPPER)}
    for device, wish in wishes.items():
        for dims, others in LAYERS.values():
            assert passes_of(wish, dims, BF16, device, **others) == "fa4"
    at_256 = passes_of("auto", (256, 256), BF16, BLACKWELL, lse_gradient=True)
    assert at_256 == "fa4, then triton" and passes_of("auto", (160, 160), BF16, BLACKWELL) == "torch"
    assert passes_of("auto", (128, 128), BF16, Device("cuda", (12, 0))) == "torch"
    assert passes_of("auto", (128, 128), BF16, HOPPER) == MIXED
    config = base_config("torchtitan.models.llama3.config_registry:llama3_8b")
    said = implementation.on_devices(config)
    assert said == "gluon on Hopper, fa4 on Blackwell and torch on other GPUs"
    assert implementation.slow_path(config, BLACKWELL, "fa4") is None
    assert "torch runs where fa4" in implementation.slow_path(config, BLACKWELL, "torch")


@pytest.mark.parametrize("wish", ["auto", "torch", "triton"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (128, 64)])
def test_predictions_are_of_what_is_taken(dims, wish):
    for gpu in (HOPPER, AMPERE, BLACKWELL):
        expected = tuple(chosen(which, wish, dims, BF16, gpu) for which in PASSES)
        assert taken(wish, dims, gpu.family) == expected


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 12, 16])
def test_predictions_cut_the_work_as_gluon_does(group):
    cuts = load("gluon").cuts(Shape(2 * group, 2, 128, 128), torch.device("cpu"))
    assert tuple(TILES_OF[cut.tiles_of](*cut[1:]) for cut in cuts) == gluon_tilings(group)


def test_an_amd_gpu_is_no_hopper(monkeypatch):
    """Though its compute capability may be 9.4, as an MI300X's is."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    device = device_of.__wrapped__(torch.device("cuda", 0))
    assert device == AMD and not device.tma


@pytest.mark.parametrize(
    ("wish", "dim", "dtype", "device", "reason"),
    [
        ("gluon", 128, BF16, AMPERE, "needs an NVIDIA GPU of compute capability 9"),
        ("gluon", 128, BF16, AMD, "needs an NVIDIA GPU of compute capability 9"),
        ("gluon", 96, BF16, UNKNOWN, r"head dims \(64, 128\), but q has 96"),
        ("auto", 128, torch.float32, HOPPER, "got torch.float32"),
        ("torch", 128, torch.float32, AMPERE, "got torch.float32"),
        ("torch", 128, BF16, AMD, "needs an NVIDIA GPU or a CPU"),
        ("torch", 264, BF16, AMPERE, "up to 256, but q has 264"),
        ("auto", 128, BF16, Device("cuda", (7, 5)), "needs? compute capability 8.0"),
        ("fa4", 128, BF16, BLACKWELL, r"pip install 'wlb-titan\[fa4\]'`: No module named 'flash_attn'"),
        ("fa4", 128, BF16, AMPERE, "needs an NVIDIA GPU of compute capability 9 or 10"),
        ("fa4", 128, BF16, Device("cuda", (12, 0)), "needs an NVIDIA GPU of compute capability 9 or 10"),
        ("fa4", 160, BF16, BLACKWELL, r"takes head dims \(192, 128\) and equal ones, .*got"),
        ("fa4", 128, torch.float32, HOPPER, "got torch.float32"),
        ("triton", 264, BF16, UNKNOWN, "up to 256, but q has 264"),
        ("triton", 128, BF16, CPU, "needs a CUDA device"),
        ("fast", 128, BF16, HOPPER, "'fast' is not one of auto, gluon, fa4, torch, torch_cpu, "),
    ],
)
def test_what_is_refused(wish, dim, dtype, device, reason):
    with pytest.raises(ValueError, match=reason):
        chosen("forward", wish, (dim, dim), dtype, device)


@pytest.fixture
def on_hopper(monkeypatch):
    """The CPU taken for a Hopper GPU, whose launches compute by the reference; and which of them ran."""
    ran = []

    def launch(name, compute):
        def call(*tensors):
            ran.append((name, next(x for x in tensors if isinstance(x, Options)).sm_margin))
            return compute(*tensors)

        return call

    for module, name in ((gluon_launch, "gluon"), (triton_launch, "triton")):
        monkeypatch.setattr(module, "forward", launch(name, reference.forward))
        monkeypatch.setattr(module, "backward", launch(name, reference.backward))
    monkeypatch.setattr(op, "device_of", lambda device: HOPPER)
    return ran


def passes(ran, wish, sliced=False, compiled=False):
    """What the forward and the backward pass of a layer ran, for one document or the last half of it."""
    length = 256
    cache = KeyValueCache()
    layer = DocumentAttention.Config(implementation=wish, sm_margin=16).build()
    attend = torch.compile(layer, backend="aot_eager") if compiled else layer
    del ran[:]
    for tokens in [length // 2] * 2 if sliced else [length]:
        before = length - tokens if ran else 0
        lengths = np.array([tokens])
        own = segments_after(segments(whole_sequence(lengths), lengths), lengths, np.array([before]))
        rows = {"rows": torch.tensor([[0, before, tokens, length]]), "cache": cache.number}
        mask = DocumentMask(torch.from_numpy(own), **(rows if sliced else {}))
        q, k, v = (torch.randn(1, tokens, 1, 128, dtype=BF16, requires_grad=True) for _ in range(3))
        out = attend(q, k, v, attention_masks=mask)
    out.sum().backward()
    assert {margin for _, margin in ran} == {16}, "multiprocessors that are left to others"
    return [name for name, _ in ran[-2:]]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_it_reaches_every_call(on_hopper, sliced, compiled):
    for wish in ("triton", "gluon"):
        assert passes(on_hopper, wish, sliced, compiled) == [wish] * 2
    if not compiled:
        assert passes(on_hopper, "auto", sliced) == ["gluon", "triton"]


GATHER = ("own_policies.ulysses_gather:UlyssesGather", {"within": 2}, (6, 2))
SHARDINGS = [("per_document", {}, (12, 4)), ("ulysses", {}, (3, 1)), GATHER]


@pytest.mark.parametrize(("policy", "settings", "expected"), SHARDINGS)
def test_kernels_are_compiled_for_the_heads_that_a_rank_has(policy, settings, expected):
    heads = replace(planning.MODEL, heads=24, kv_heads=8, head_dim=64, windows=(512, 128, None, 512))
    sharding = STRATEGIES.configure(policy, **settings)
    job = planning.job(window=1024, model=heads, degrees=Degrees(tensor=2, context=4), context=sharding)
    shapes = [implementation.attention_shape(job, rank) for rank in range(4)]
    assert [(shape.q_heads, shape.kv_heads) for shape in shapes] == [expected] * 4
    assert implementation.windows(job) == [None, 128, 512]


def wrong_by(factor, right, window=None):
    """A backward pass whose gradient of keys is too large, with this window only."""

    def backward(dout, dlse, saved, schedule, options):
        dq, dk, dv = right(dout, dlse, saved, schedule, options)
        return dq, dk * factor if options.window == window else dk, dv

    return backward


def test_kernels_that_do_not_work_on_a_gpu_end_the_job(on_hopper, monkeypatch):
    """With the window and the implementation that were checked, and what to set instead."""
    monkeypatch.setattr(self_check, "LONG", (300, 5))
    monkeypatch.setattr(self_check, "CHUNKS", ((30, 90),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    training = SimpleNamespace(mixed_precision_param="bfloat16")
    config = SimpleNamespace(training=training, wlb=SimpleNamespace(attention=AttentionSettings()))
    monkeypatch.setattr(triton_launch, "backward", wrong_by(1.3, triton_launch.backward, window=512))
    shape, cpu = Shape(1, 1, 128, 128), torch.device("cpu")
    implementation._prepare(config, shape, None, "triton", cpu, sinks=True)
    reason = r"with a window of 512 \(triton\) do not work on this NVIDIA H100: dk is .* \"reference\""
    with pytest.raises(UserError, match=reason):
        implementation._prepare(config, shape, 512, "triton", cpu, sinks=False)


@pytest.mark.parametrize(
    ("device", "name", "wish", "why"),
    [
        (HOPPER, "llama3.config_registry:llama3_8b", "auto", None),
        (AMPERE, "llama3.config_registry:llama3_8b", "auto", None),
        (BLACKWELL, "llama3.config_registry:llama3_8b", "auto", "fa4, the kernels for Blackwell, needs"),
        (CPU, "llama3.config_registry:llama3_8b", "reference", None),
        (HOPPER, "llama3.config_registry:llama3_8b", "reference", "reference is set"),
        (HOPPER, "llama3.config_registry:llama3_8b", "triton", "triton runs where gluon"),
        (HOPPER, "gpt_oss.config_registry:gpt_oss_20b", "auto", "triton runs where gluon"),
        (HOPPER, "deepseek_v3.config_registry:deepseek_v3_16b", "auto", r"takes head dims .* q has 192"),
    ],
)
def test_a_slow_path_is_said(device, name, wish, why):
    config = base_config(f"torchtitan.models.{name}")
    config.wlb.attention.implementation = wish
    which, _ = implementation.check_implementation(config, device)
    said = implementation.slow_path(config, device, which)
    assert said is None if why is None else re.search(why, said)
