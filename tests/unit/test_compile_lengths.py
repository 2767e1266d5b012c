"""A compiled module meets any length and any documents with few graphs; full checkpointing compiles."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models.common import ScaledBiasRowwiseLinear  # noqa: E402

from wlb_titan.context import layout  # noqa: E402
from wlb_titan.runtime.attention.module import DocumentAttention, DocumentMask  # noqa: E402
from wlb_titan.runtime.models.blocks import documents_vary, keep_inputs  # noqa: E402

pytestmark = pytest.mark.slow


def random_documents(random, tokens):
    cuts = np.sort(random.choice(np.arange(1, tokens), size=random.integers(0, 4), replace=False))
    return np.diff([0, *cuts, tokens])


def test_few_graphs_serve_every_length_and_number_of_documents():
    counter = CompileCounterWithBackend("aot_eager")
    module = DocumentAttention(DocumentAttention.Config())
    random = np.random.default_rng(0)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for _ in range(30):
        length = int(random.integers(16, 200))
        documents = random_documents(random, length)
        segments = torch.from_numpy(layout.segments(layout.whole_sequence(documents), documents))
        q, k, v = torch.randn(3, 1, length, 2, 8).requires_grad_().unbind()
        out = compiled(q, k, v, attention_masks=DocumentMask(documents_vary(segments)))
        expected = module(q, k, v, attention_masks=DocumentMask(segments))
        assert torch.equal(out, expected)
        gradients = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert counter.frame_count == 2  # the first length, and all others; also with a single document


def test_a_bias_over_one_compiles_under_full_checkpointing():
    """gpt-oss' output projection without tensor parallelism, whose division by one Inductor leaves out."""
    linear = ScaledBiasRowwiseLinear.Config(in_features=8, out_features=8, bias=True).build()
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    block = torch.nn.Sequential(linear, torch.nn.Sigmoid())
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": block})})
    FullAC.Config().build().apply(model)
    block = model["layers"]["0"]
    torch._dynamo.reset()
    with inductor.patch(joint_custom_post_pass=None):
        keep_inputs()
        compiled = torch.compile(block, fullgraph=True)
        x = torch.randn(4, 8, requires_grad=True)
        inputs = (x, *block.parameters())
        found, expected = (torch.autograd.grad(f(x).sum(), inputs) for f in (compiled, block))
    torch.testing.assert_close(found, expected)
