"""The kernels, forward and every gradient, against the dense oracle and against the reference.

TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py --device cpu    # Triton's, interpreted
"""

import pytest
import torch
from oracle import attention_and_lse, compare, packed, random_inputs, with_gradients
from wlb_titan.kernels import varlen_attention
from wlb_titan.kernels.implementations import chosen, device_of
from wlb_titan.kernels.segments import Options, Shape
from wlb_titan.kernels.self_check import Noise, check_kernels

IMPLEMENTATIONS = ("triton", "gluon")
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 4e-3}
CASES = {"ragged": [60, 1, 200, 7, 333, 128], "long": [2300], "only_padding": [], "two_chunks": None}
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
MASKS = [{}, {"window": 1}, {"window": 100}, {"causal": False}]


def skip_unless_it_runs(implementation, dims, dtype, device):
    try:
        chosen("backward", implementation, dims, dtype, device_of(device))
    except ValueError as error:
        pytest.skip(str(error))


def case_of(target, name):
    """Segments, and the numbers of queries, three of them padding, and of keys."""
    if name == "two_chunks":
        return torch.tensor([[0, 130, 0, 130], [130, 130, 0, 520]], dtype=torch.int32), 263, 520
    lengths = [length // target.pick(cuda=1, cpu=8) + 1 for length in CASES[name]]
    return packed(lengths), sum(lengths) + 3, sum(lengths) + 1


def check(target, implementation, case, heads, dims, dtype, mask):
    """Sinks and the log-sum-exp's gradient always take part."""
    device = torch.device(target.device)
    skip_unless_it_runs(implementation, dims, dtype, device)
    segments, q_tokens, kv_tokens = case_of(target, case)
    tensors = random_inputs(q_tokens, kv_tokens, *heads, *dims, dtype)
    rng = torch.Generator().manual_seed(1)
    sinks, dlse = torch.randn(heads[0], generator=rng), torch.randn(heads[0], q_tokens, generator=rng)
    options = {"scale": dims[0] ** -0.5, **mask}

    def ours(q, k, v, sinks):
        return varlen_attention(
            q, k, v, segments, sinks=sinks, return_lse=True, implementation=implementation, **options
        )

    given = [*tensors[:3], sinks, tensors[3], dlse]
    got = with_gradients(ours, *(x.to(device) for x in given))
    want = with_gradients(
        lambda q, k, v, s: attention_and_lse(q, k, v, segments, sinks=s, **options),
        *(x.double() for x in given),
    )
    compare({name: x.cpu() for name, x in got.items()}, want, TOLERANCE[dtype])


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes(target, implementation, case, dims):
    dtype = target.pick(cuda=torch.bfloat16, cpu=torch.float16)  # which the interpreter can
    check(target, implementation, case, (4, 2), dims, dtype, {})


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masks_and_groups(target, implementation, heads, mask):
    check(target, implementation, "ragged", heads, (64, 64), torch.float16, mask)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["window", "chunk"])
def test_as_the_reference_computes_it_and_again_bit_for_bit(target, case, implementation, dims):
    """A packed window: documents of all lengths, enough for every multiprocessor, so that Gluon packs heads
    both ways. The last chunk of a document so long that Gluon walks over one head after the other. The
    reference in float64 on that device.
    """
    device = torch.device(target.device)
    dtype = target.pick(cuda=torch.bfloat16, cpu=torch.float16)
    skip_unless_it_runs(implementation, dims, dtype, device)
    lengths = target.pick(cuda=[3000, 1, 5, 130, 4000, 777, *[300, 64, 9] * 60], cpu=[90, 1, 5, 60])
    segments, q_tokens, kv_tokens = packed(lengths), sum(lengths) + 3, sum(lengths) + 3
    if case == "chunk":
        q_tokens, kv_tokens = target.pick(cuda=(600, 16_000), cpu=(10, 300))
        segments = torch.tensor([[0, q_tokens, 0, kv_tokens]], dtype=torch.int32)
    tensors = [x.to(device) for x in random_inputs(q_tokens, kv_tokens, 16, 4, *dims, dtype)]
    attend = {
        name: lambda q, k, v, name=name: varlen_attention(q, k, v, segments, implementation=name)
        for name in (implementation, "reference")
    }
    got, again = (with_gradients(attend[implementation], *tensors) for _ in range(2))
    compare(got, with_gradients(attend["reference"], *(x.double() for x in tensors)), TOLERANCE[dtype])
    assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(8, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_check_before_a_job_finds_every_configuration_right(target, implementation, heads, dims):
    device = torch.device(target.device)
    dtype = target.pick(cuda=torch.bfloat16, cpu=torch.float16)
    skip_unless_it_runs(implementation, dims, dtype, device)
    options = Options(dims[0] ** -0.5, implementation=implementation)
    noise = Noise.rich(Shape(*heads, *dims), dtype, device, target.pick(cuda=1, cpu=100))
    error = check_kernels(noise, options)
    assert 0 < error < TOLERANCE[dtype]
