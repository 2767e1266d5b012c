"""The kernels, forward and every gradient, against the dense oracle and against the reference.

TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py --device cpu    # Triton's, interpreted
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from oracle import CASES, WINDOWS, compare, packed, random_inputs, rows, wanted, with_gradients
from test_compile import HEAD_DIMS
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.implementations import REFERENCE, TABLE, TORCH, chosen, device_of
from wlb_titan.kernels.segments import Options, Shape
from wlb_titan.kernels.self_check import Noise, check_kernels

IMPLEMENTATIONS = [name for name in TABLE if name not in (REFERENCE, "torch_cpu")]  # of GPUs
SMALL = [(64, 64), (192, 128)]  # of the head dims in small; tests/kernels/interpreted.py has all
DIMS = [pytest.param(dims, marks=() if dims in SMALL else pytest.mark.gpu) for dims in HEAD_DIMS]
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 4e-3}


@pytest.fixture
def dtype(target):
    return target.pick(cuda=torch.bfloat16, cpu=torch.float16)  # which the interpreter can


def skip_unless_it_runs(implementation, dims, dtype, device):
    try:
        chosen("backward", implementation, dims, dtype, device_of(torch.device(device)), lse_gradient=True)
    except ValueError as error:
        pytest.skip(str(error))


def check(target, implementation, segments, tokens, heads, dims, dtype, window=None, judge=wanted):
    """Twice, to the same bits. torch's backward has no gradient of the log-sum-exp: without one too."""
    skip_unless_it_runs(implementation, dims, dtype, target.device)
    *given, dlse = [x.to(target.device) for x in random_inputs(*tokens, heads, dims, dtype)]

    def attend(*qkv, implementation=implementation):
        options = {"scale": 0.1, "window": window, "return_lse": True, "implementation": implementation}
        return varlen_attention(*qkv, segments, **options)

    def attend_without(*qkv, **options):
        out, lse = attend(*qkv, **options)
        return out, torch.zeros_like(lse).requires_grad_()

    for call in (attend, attend_without) if TORCH in (implementation, judge) else (attend,):
        with deterministic(not TABLE[implementation].repeats):
            got, again = (with_gradients(call, *given, dlse) for _ in range(2))
        assert all(torch.equal(got[name], again[name]) for name in got)
        if judge is wanted:
            on_cpu = [x.cpu() for x in (*given, dlse * (call is attend))]
            want = wanted(on_cpu, segments, 0.1, window)
            want["lse"] *= call is attend
        else:  # the reference in float64 on that device
            wide = torch.float64 if judge == REFERENCE else dtype
            want = with_gradients(partial(call, implementation=judge), *(x.to(wide) for x in given), dlse)
        compare(*({name: x.cpu() for name, x in each.items()} for each in (got, want)), TOLERANCE[dtype])


@contextmanager
def deterministic(enabled):
    torch.use_deterministic_algorithms(enabled)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("case", [*CASES, "long"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes(target, implementation, case, dims, dtype):
    length = target.pick(cuda=2300, cpu=290)
    segments, *tokens = (CASES | {"long": (packed([length]), length + 3, length + 1)})[case]
    check(target, implementation, segments, tokens, (4, 2), dims, dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [pytest.param((1, 1), marks=pytest.mark.gpu), (8, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_windows_and_groups(target, implementation, heads, window):
    segments, *tokens = CASES["ragged"]
    check(target, implementation, segments, tokens, heads, (64, 64), torch.float16, window)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("judge", [REFERENCE, TORCH])
@pytest.mark.parametrize("case", ["window", "chunk"])
def test_as_others_compute_it(target, case, judge, implementation, dims, dtype):
    """A packed window: documents of all lengths, enough for every multiprocessor, so that Gluon packs heads
    both ways. The last chunk of a document so long that Gluon walks over one head after the other."""
    lengths = target.pick(cuda=[3000, 1, 5, 130, 4000, 777, *[300, 64, 9] * 60], cpu=[90, 1, 5, 60])
    segments, tokens = packed(lengths), (sum(lengths) + 3, sum(lengths) + 3)
    if case == "chunk":
        tokens = target.pick(cuda=(600, 16_000), cpu=(10, 300))
        segments = rows([0, tokens[0], 0, tokens[1]])
    check(target, implementation, segments, tokens, (16, 4), dims, dtype, judge=judge)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_check_before_a_job_finds_every_configuration_right(target, implementation, heads, dims, dtype):
    device = torch.device(target.device)
    skip_unless_it_runs(implementation, dims, dtype, device)
    options = Options(dims[0] ** -0.5, implementation=implementation)
    noise = Noise.rich(Shape(*heads, *dims), dtype, device, target.pick(cuda=1, cpu=100))
    for given in (noise, noise._replace(dlse=None)):
        assert 0 < check_kernels(given, options) < TOLERANCE[dtype]
