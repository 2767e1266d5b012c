"""Rotary positions in real arithmetic against torchtitan's complex product."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from torchtitan.models.common import ComplexRoPE  # noqa: E402
from torchtitan.models.common.attention import FusedQKVLinear  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402

from wlb_titan.runtime.attention.rotary import PairwiseRoPE  # noqa: E402

pytestmark = pytest.mark.slow

HEADS, KEY_HEADS, DIM, WIDTH, TOKENS = 6, 3, 16, 8, 48


def test_compiled_it_is_one_with_the_split_of_qkv_each_way():
    torch.manual_seed(0)
    wqkv = Linear.Config(in_features=WIDTH, out_features=(HEADS + 2 * KEY_HEADS) * DIM)
    project = FusedQKVLinear.Config(head_dim=DIM, n_heads=HEADS, n_kv_heads=KEY_HEADS, wqkv=wqkv).build()
    project = project.to(torch.bfloat16)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.cat([torch.arange(32), torch.arange(TOKENS - 32)]).unsqueeze(0)
    weights = [
        torch.randn(1, TOKENS, heads, DIM, dtype=torch.bfloat16) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    leaves = [x, *project.parameters()]

    def run(rope, compiled=False):
        rope = rope(dim=DIM, max_seq_len=32, theta=100.0).build()

        def attention_inputs(x):
            q, k, v = project(x)
            return *rope(q, k, positions), v

        outputs = (torch.compile(attention_inputs, fullgraph=True) if compiled else attention_inputs)(x)
        return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]

    expected = run(ComplexRoPE.Config)
    got, (forward, backward) = run_and_get_code(run, PairwiseRoPE.Config, True)
    for result in (run(PairwiseRoPE.Config), got):
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)
    # Values, which are only copied, by themselves; and no other operation but a view of the table.
    kernels = [len(re.findall(r"^cpp_fused\w* = ", code, re.MULTILINE)) for code in (forward, backward)]
    assert kernels == [2, 1]
    assert set(re.findall(r"torch\.ops\.aten\.(\w+)\.default\(", forward + backward)) <= {"view_as_real"}
