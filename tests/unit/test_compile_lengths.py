"""A compiled module meets any length and any documents with a handful of graphs."""

import numpy as np
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator

use_cpu_without_accelerator()

from wlb_titan import context  # noqa: E402
from wlb_titan.runtime.attention.module import DocumentAttention, DocumentMask  # noqa: E402
from wlb_titan.runtime.models.compile import documents_vary  # noqa: E402


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
        segments = torch.from_numpy(context.segments(context.whole(documents), documents))
        q, k, v = torch.randn(3, 1, length, 2, 8).requires_grad_().unbind()
        out = compiled(q, k, v, attention_masks=DocumentMask(documents_vary(segments)))
        expected = module(q, k, v, attention_masks=DocumentMask(segments))
        assert torch.equal(out, expected)
        gradients = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert counter.frame_count == 2  # the first length, and all others; also with a single document
