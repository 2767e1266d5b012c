"""Whatever segments choose was compiled before: launches are recorded, on the CPU taken for a Hopper GPU."""

from contextlib import ExitStack

import pytest
import torch
from crosscompile import recording, version
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_tiles import segment_lists
from wlb_titan.kernels import gluon_launch, op, self_check, triton_launch
from wlb_titan.kernels.implementations import GLUON_HEAD_DIMS, Device
from wlb_titan.kernels.segments import Options, Saved, Shape

CPU = torch.device("cpu")
CASES = {
    "8 heads a group": (Shape(16, 2, 128, 128), None),
    "one key head": (Shape(4, 1, 128, 128), None),
    "as many key heads": (Shape(4, 4, 64, 64), None),
    "latent attention": (Shape(2, 2, 192, 128), None),
    "short window": (Shape(8, 1, 128, 128), 512),
    "long window": (Shape(8, 1, 128, 128), 4096),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    passed = frozenset({((128, 128), torch.bfloat16)})
    for module in (op, self_check):
        monkeypatch.setattr(module, "device_of", lambda device: Device("cuda", (9, 0), passed=passed))
    monkeypatch.setattr(gluon_launch, "units", lambda device: 132)


def versions(run):
    """Of all kernels that a function launches, what Triton tells their versions by."""
    with ExitStack() as stack:
        recorded = [
            stack.enter_context(
                recording(module, *(name for name in vars(module) if name.endswith("_kernel")))
            )
            for module in (triton_launch, gluon_launch)
        ]
        run()
    return {repr(version(launch)) for launches in recorded for launch in launches}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, implementation)
        for name, (shape, _) in CASES.items()
        for implementation in ("auto", "triton", "gluon")
        if implementation != "gluon" or shape.dim in GLUON_HEAD_DIMS
    ],
)
def test_no_segments_choose_what_was_not_warmed_up(name, implementation):
    shape, window = CASES[name]
    options = Options(0.1, window, implementation=implementation)
    warm = versions(lambda: self_check.warm_up(shape, options, torch.bfloat16, CPU))

    @settings(max_examples=12, deadline=None)
    @given(segment_lists(documents=12, longest=20_000), st.booleans())
    def check(case, wants_lse):
        segments, q_tokens, kv_tokens = case
        assume(q_tokens and kv_tokens)
        segments = torch.from_numpy(segments)
        q, dout = (
            torch.empty(q_tokens, shape.q_heads, d, dtype=torch.bfloat16) for d in (shape.dim, shape.v_dim)
        )
        # Keys and values side by side, as context parallelism gathers them.
        widths = [shape.kv_heads * shape.dim, shape.kv_heads * shape.v_dim]
        kv = torch.empty(kv_tokens, sum(widths), dtype=torch.bfloat16).split(widths, dim=1)
        k, v = (x.unflatten(1, (shape.kv_heads, -1)) for x in kv)
        lse = torch.empty(shape.q_heads, q_tokens)

        def attend():
            op.forward(q, k, v, segments, options)
            saved = Saved(q, k, v, dout, lse)
            op.backward(dout, lse if wants_lse else None, saved, segments, options)

        assert versions(attend) <= warm

    check()


def test_what_is_warmed_up():
    """For Qwen3 0.6B: groups in two parts or one, and of very long documents one head after the other."""
    noise = self_check.Noise.on(self_check.FEW, Shape(16, 8, 128, 128), torch.bfloat16, CPU)
    found = [divided[:3] for divided in self_check.ways(noise, Options(0.1))]
    assert found == [(1, 1, False), (2, 1, False), (1, 1, True)]
    windowed = Options(0.1, window=4096)
    assert len(self_check.ways(noise, windowed)) == 2
    assert self_check.ways(noise, Options(0.1, implementation="triton")) == [None]
